"""A model directory from elsewhere can hold anything: it is refused, and nothing is started or written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torture.audited import watch
from torture.forged import forge_tensors
from torture.small_models import apart, learned, new_learner, probes
from tpl import Learner, TplError
from tpl.store import ModelStore

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).parent / "models" / "0.1-tpl"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n(/tmp) (w) file closefile\nshowpage\n%%EOF\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = next(file.parent for file in STORED.rglob("model.json"))
    return Path(shutil.copytree(found, tmp_path / "model"))


def header_of(model: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((model / "model.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def write_header(model: Path, header: dict) -> None:  # type: ignore[type-arg]
    (model / "model.json").write_text(json.dumps(header), encoding="utf-8")


def with_exemplar(model: Path, image: bytes) -> None:
    """Put bytes in the place of every stored image, with a corrected checksum."""
    header = header_of(model)
    name = f"{header['newest']}/memory.safetensors"
    memory = load_file(model / name)
    count = len(memory["lengths"])
    memory["bytes"] = torch.frombuffer(bytearray(image * count), dtype=torch.uint8)
    memory["lengths"] = torch.full((count,), len(image))
    save_file(memory, model / name)
    header["files"][name] = hashlib.sha256((model / name).read_bytes()).hexdigest()
    write_header(model, header)


def test_a_hostile_model_starts_connects_opens_and_imports_nothing(model: Path) -> None:
    """Loading, predicting, serving, learning, updating and merging; `make torture` exports it, too."""
    header = header_of(model)
    header["options"]["epochs"] = 1
    write_header(model, header)
    hostile = Path(shutil.copytree(model, model.parent / "hostile"))
    with_exemplar(hostile, EPS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*(path for path in sys.path if path), str(ROOT)])}
    command = [sys.executable, "-m", "torture.audited", str(model), str(hostile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["events"] == [] and found["failed"] == {}
    assert "is not an image this program reads" in found["refused"]["learn"]


def test_the_hook_sees_what_leads_out_of_a_model(model: Path) -> None:
    events: list[str] = []
    hook = watch(model, events)
    hook("open", (str(model / "model.json"), "r", 0))
    assert events == []
    hook("open", ("/etc/passwd", "r", 0))
    hook("subprocess.Popen", ("gs",))
    hook("socket.connect", (None, ("example.org", 80)))
    hook("import", ("antigravity",))
    assert events == ["open /etc/passwd", "subprocess.Popen", "socket.connect", "import antigravity"]


def outside(model: Path) -> Path:
    """A file of somebody else."""
    place = model.parent / "other" / "tasks" / "000"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / header_of(model)["tasks"][0]["file"], place / "task-0.safetensors")
    return place


def absolute(model: Path) -> str:
    return str(outside(model) / "task-0.safetensors")


def upwards(model: Path) -> str:
    outside(model)
    return "../other/tasks/000/task-0.safetensors"


def device(model: Path) -> str:
    return "/dev/zero"


@pytest.mark.parametrize("path", [absolute, upwards, device])
def test_a_header_that_names_files_elsewhere_is_refused(model: Path, path: Callable[[Path], str]) -> None:
    header = header_of(model)
    old, new = header["tasks"][0]["file"], path(model)
    header["tasks"][0]["file"] = new
    header["files"][new] = header["files"].pop(old)
    write_header(model, header)
    with pytest.raises(TplError, match=r"model\.json is damaged \(tasks\.0\.file"):
        Learner.load(model, device="cpu")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_that_are_no_files_are_refused(model: Path, kind: str) -> None:
    part = model / header_of(model)["tasks"][0]["file"]
    if kind == "link":
        shutil.move(part, model.parent / "moved")
        part.symlink_to(model.parent / "moved")
    elif kind == "pipe":
        part.unlink()
        os.mkfifo(part)  # without care, reading it would wait for ever
    else:
        outer = shutil.move(part.parent, model.parent / "moved")
        part.parent.symlink_to(outer)
    with pytest.raises(TplError, match="link|no ordinary file"):
        Learner.load(model, device="cpu")


def test_a_linked_folder_of_another_model_is_not_emptied(model: Path) -> None:
    victim = outside(model)
    (model / "tasks" / "777").symlink_to(victim)
    with ModelStore(model).writing():
        pass
    assert (victim / "task-0.safetensors").is_file()


@pytest.mark.parametrize("name", [".lock", ".lock.json", "tasks", "model.json"])
def test_writing_through_a_link_is_refused(model: Path, name: str) -> None:
    target = model.parent / "precious"
    if (model / name).exists():
        shutil.move(model / name, target)
    else:
        target.write_text("precious", encoding="utf-8")
    before = target.read_bytes() if target.is_file() else sorted(target.rglob("*"))
    (model / name).symlink_to(target)
    with pytest.raises(TplError, match="link"), ModelStore(model).writing():
        pytest.fail("the lock was taken")
    assert (target.read_bytes() if target.is_file() else sorted(target.rglob("*"))) == before


def test_a_huge_header_is_not_read(model: Path) -> None:
    with (model / "model.json").open("r+b") as stream:
        stream.truncate(1 << 40)  # a sparse file: it takes no room on disk, but a terabyte in memory
    with pytest.raises(TplError, match="is damaged"):
        Learner.load(model, device="cpu")


def test_a_linked_partial_header_is_not_written_through(model: Path) -> None:
    precious = model.parent / "precious"
    precious.write_text("precious", encoding="utf-8")
    (model / ".model.json.partial").symlink_to(precious)
    Learner.load(model, device="cpu").rename("zero", "nought").save(model)
    assert precious.read_text(encoding="utf-8") == "precious"
    assert not (model / "model.json").is_symlink()


def without_counts(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["score.counts_"]


def twice_as_many_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors["ridge.sums"] = torch.cat([tensors["ridge.sums"]] * 2)


def negative(tensors: dict[str, torch.Tensor]) -> None:
    tensors["ridge.gram"] = -tensors["ridge.gram"]


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["ridge.sums"] = tensors["ridge.sums"] * float("nan")


@pytest.mark.parametrize(
    ("method", "part", "change"),
    [
        ("tpl", "task-0", without_counts),
        ("closed-form", "shared", twice_as_many_rows),
        ("closed-form", "shared", negative),
        ("closed-form", "shared", not_finite),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tensors_that_fail_only_in_use_are_reported(
    method: str, part: str, change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    """A merge or an update is the first to use some of them; an answer may come from the others."""
    model, other = tmp_path / "model", tmp_path / "other"
    learned(model, method)
    apart(other, method)
    forge_tensors(model, part, change)
    images = probes()

    def update() -> None:
        learner = Learner.load(model, device="cpu")
        learner.update(images[:3], [learner.classes_[0]] * 3)

    uses = [update, lambda: Learner.load(other, device="cpu").merge(Learner.load(model, device="cpu"))]
    for use in uses:
        try:
            use()
        except TplError as error:
            said = str(error)
    assert "damaged" in said and str(model) in said


def test_an_error_of_a_new_model_is_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = new_learner("slda")
    images = probes()
    learner.learn(images[:4], ["a", "b"] * 2)
    monkeypatch.setattr(type(learner.method), "update", lambda *_, **__: {}["missing"])
    with pytest.raises(KeyError):
        learner.update(images[:2], ["a", "b"])
