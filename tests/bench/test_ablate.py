"""Ablations: the test images are seen once, the variants are what they say, and the memory comes back whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pictures import photos
from small_encoder import SMALL_VIT
from tpl import Learner, TplError
from tpl.bench import outputs
from tpl.bench.ablate import VARIANTS, ablate, groups_of, smaller_memory
from tpl.bench.outputs import read_outputs, run_outputs
from tpl.bench.results import RunResult
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.methods.bank import Bank
from tpl.methods.plus import TPLPlus
from tpl.methods.tpl import TPL
from tpl.stream import Stream

Rows = list[dict[str, Any]]
CLASSES = [f"class {n}" for n in range(6)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Rows]:
    """Pictures, a run over them in three tasks, and its first ablation."""
    place = tmp_path_factory.mktemp("ablate")
    for part, count, seed in (("train", 12, 0), ("test", 6, 1)):
        photos(place / "pictures" / part, CLASSES, count, seed)
    options = {"epochs": 1, "latent": 8, "batch_size": 16, "memory": 48}
    execute(RunSpec("folder", encoder=SMALL_VIT, data=place / "pictures", device="cpu", options=options), place / "run")
    return place / "pictures", place / "run", ablate(place / "run", place / "pictures", None, "cpu")


@pytest.fixture
def run(made: tuple[Path, Path, Rows], tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(made[1], tmp_path / "run"))


def load(run: Path) -> TPL:
    method = Learner.load(run / "model", device="cpu").method
    assert isinstance(method, TPL)
    return method


# What is measured


def test_the_score_as_trained_gives_the_numbers_of_the_run(made: tuple[Path, Path, Rows]) -> None:
    _, run, rows = made
    summary = RunResult.read(run).summary
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert rows[0]["last"] == pytest.approx(summary["last"])
    assert rows[0]["tp"] == pytest.approx(summary["tp"])
    assert rows[0]["auroc"] == pytest.approx(summary["detection"]["auroc_pooled"])


def test_every_variant_is_what_rescoring_alone_gives(made: tuple[Path, Path, Rows]) -> None:
    """Against the method's own answers, with no scores shared between variants."""
    data, run, rows = made
    stream = RunSpec("folder", data=data).stream()
    method = load(run)
    labels = torch.cat([torch.tensor(task.test.labels) + 2 * t for t, task in enumerate(stream) if task.test])
    pixels = torch.cat([method.preprocess.batch(task.test) for task in stream if task.test is not None])
    seen, trained = method.outputs(pixels), method.config.to_dict()
    for row in rows:
        if row["memory_share"] == 1:
            method.rescore(**(trained | row["changes"]))
            right = method.log_probabilities_of(seen).argmax(dim=1) == labels
            assert float(right.double().mean()) == pytest.approx(row["last"]), row["variant"]


def test_only_the_groups_asked_for_are_measured(made: tuple[Path, Path, Rows]) -> None:
    _, run, rows = made
    some = ablate(run, None, None, "cpu", ["gamma", "k"])
    assert some == [row for row in rows if row["group"] in ("", "gamma", "k")]
    assert {row["group"] for row in rows} == {"", *groups_of("tpl")}
    with pytest.raises(TplError, match=r"no group of variants 'kk'; there are compose, terms, beta, gamma, k, memory"):
        ablate(run, None, None, "cpu", ["k", "kk"])


def test_scores_that_a_variant_does_not_change_are_computed_once(
    made: tuple[Path, Path, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    whole = TPL.task_scores
    monkeypatch.setattr(TPL, "task_scores", lambda self, *seen: asked.append(1) or whole(self, *seen))
    ablate(made[1], None, None, "cpu", ["compose", "gamma"])
    # A blank image when the model is loaded; then or and and, each with two distances. Calibration and temperature come
    # afterwards.
    assert len(asked) == 1 + 4


# What is kept


def test_the_second_time_neither_images_nor_encoder_are_asked(
    made: tuple[Path, Path, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run, rows = made

    def blank_alone(whole: Callable[..., Any]) -> Callable[..., Any]:
        def asked(bank: Bank, pixels: Tensor, *what: Any) -> Any:
            assert len(pixels) == 1 and not pixels.any(), "the encoder was asked"
            return whole(bank, pixels, *what)

        return asked

    for name in ("outputs", "query"):
        monkeypatch.setattr(Bank, name, blank_alone(getattr(Bank, name)))  # a loaded model is tried on a blank image
    away = data.rename(data.with_name("away"))
    try:
        assert ablate(run, None, None, "cpu") == rows
    finally:
        away.rename(data)


def test_the_kept_outputs_are_those_of_the_model(made: tuple[Path, Path, Rows], run: Path) -> None:
    description = RunResult.read(run).description
    kept = read_outputs(run, description)
    assert kept is not None
    shutil.rmtree(run / "outputs")
    assert read_outputs(run, description) is None
    fresh = run_outputs(run, description, made[0], lambda: load(run))
    assert torch.equal(kept.labels, torch.arange(6).repeat_interleave(6))
    assert torch.equal(kept.tasks, torch.arange(3).repeat_interleave(12))
    assert torch.equal(fresh.labels, kept.labels)
    for a, b in zip(kept.models, fresh.models, strict=True):
        assert torch.equal(a.features, b.features)
        assert torch.equal(a.logits, b.logits)
    assert sorted(p.name for p in (run / "outputs").iterdir()) == [f"{t:03d}.safetensors" for t in range(3)]


def spoil_images(run: Path) -> None:
    file = run / "outputs" / "001.safetensors"
    with safe_open(file, framework="pt") as content:
        tensors = {name: content.get_tensor(name) for name in ("features", "logits", "labels")}
        noted = content.metadata()
    save_file(tensors, file, metadata=noted | {"images": "0" * 64})


def spoil_model(run: Path) -> None:
    file = run / "model" / "model.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def spoil_file(run: Path) -> None:
    file = run / "outputs" / "002.safetensors"
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_images, "001.safetensors was made from other images than"),
        (spoil_model, "000.safetensors was made by another model than the one that is now in"),
        (spoil_file, "002.safetensors cannot be read"),
    ],
)
def test_stale_outputs_are_refused_or_made_anew(
    made: tuple[Path, Path, Rows], run: Path, spoil: Any, text: str
) -> None:
    data, _, rows = made
    spoil(run)
    with pytest.raises(TplError, match="the images are needed: .*--data") as refused:
        ablate(run, None, None, "cpu", ["k"])
    assert text in str(refused.value)
    wanted = [row for row in rows if row["group"] in ("", "k")]
    assert ablate(run, data, None, "cpu", ["k"]) == wanted
    assert ablate(run, None, None, "cpu", ["k"]) == wanted


def test_other_images_are_refused(made: tuple[Path, Path, Rows], run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "outputs")
    others = shutil.copytree(made[0], tmp_path / "others")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(next((others / "test" / "class 0").iterdir()))
    with pytest.raises(TplError, match="are not those that .* was measured on"):
        ablate(run, others, None, "cpu")
    assert not (run / "outputs").exists()


def test_a_model_that_was_changed_since_is_refused(made: tuple[Path, Path, Rows], run: Path) -> None:
    with Learner.changing(run / "model", device="cpu") as learner:
        learner.remove("class 3")
    with pytest.raises(TplError, match="gained or lost classes since"):
        ablate(run, made[0], None, "cpu")


def test_a_full_disk_costs_nothing_but_time(
    made: tuple[Path, Path, Rows], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "outputs")

    def full(_: object, file: Path, **__: object) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(outputs, "save_file", full)
    assert ablate(run, made[0], None, "cpu", ["gamma"]) == [r for r in made[2] if r["group"] in ("", "gamma")]
    assert not list((run / "outputs").iterdir())


# A smaller memory


@pytest.mark.parametrize(("share", "left"), [(0.01, 1), (0.1, 1), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_smaller_memory_is_what_a_smaller_budget_keeps(run: Path, share: float, left: int) -> None:
    method = load(run)
    before = [list(images) for images in method.memory.exemplars]
    whole = method.task_scores(method.memory_outputs_)
    with smaller_memory(method, share):
        assert method.memory.exemplars == [images[:left] for images in before]
        assert len(method.memory.labels) == 6 * left
        seen = method.outputs(method.memory.pixels(method.preprocess, "cpu"))
        for a, b in zip(method.memory_outputs_, seen, strict=True):
            assert torch.allclose(a.features, b.features, atol=1e-5)
        method.rescore()
    assert method.memory.exemplars == before
    assert [len(o.features) for o in method.memory_outputs_] == [48] * 3
    method.rescore()
    assert torch.equal(method.task_scores(method.memory_outputs_), whole)


def test_the_memory_comes_back_whatever_happens(run: Path) -> None:
    method = load(run)
    before = method.memory.labels
    with pytest.raises(RuntimeError), smaller_memory(method, 0.5):
        raise RuntimeError
    assert torch.equal(method.memory.labels, before)


def accuracy_of_the_expert(run: Path, stream: Stream) -> float:
    """The mean over tasks of how often ridge regression alone is right."""
    method, right, first = Learner.load(run / "model", device="cpu").method, [], 0
    assert isinstance(method, TPLPlus)
    for task in stream:
        assert task.test is not None
        says = method.expert_log_probabilities(method.common_features(method.preprocess.batch(task.test)))
        right.append(float((says.argmax(dim=1) == torch.tensor(task.test.labels) + first).double().mean()))
        first += len(task.classes)
    return sum(right) / len(right)


def test_what_tpl_plus_adds_can_be_taken_away_again(made: tuple[Path, Path, Rows], tmp_path: Path) -> None:
    """Without the expert it answers as tpl, without the bank as its expert does, and fewer passes are counted."""
    data, run, _ = made
    options = RunResult.read(run).description["options"] | {"expert_views": "encoder", "expert_weight": 1.0}
    spec = RunSpec("folder", "tpl-plus", SMALL_VIT, data=data, device="cpu", options=options)
    execute(spec, tmp_path / "plus")
    rows = {row["variant"]: row for row in ablate(tmp_path / "plus", data, None, "cpu", ["expert", "passes"])}
    assert rows["bank alone"]["last"] == pytest.approx(RunResult.read(run).summary["last"])
    assert rows["expert alone"]["last"] == pytest.approx(accuracy_of_the_expert(tmp_path / "plus", spec.stream()))
    assert rows["expert weight = 1.0"]["last"] == rows["as trained"]["last"]
    assert [rows[f"passes = {n}"]["passes"] for n in (1, 2, 3)] == [1, 2, 3]
    assert 1 <= rows["passes = auto, mass = 0.3"]["passes"] <= rows["passes = auto, mass = 0.95"]["passes"] <= 3
    with pytest.raises(TplError, match="tpl has no group of variants 'expert'"):
        ablate(run, data, None, "cpu", ["expert"])
