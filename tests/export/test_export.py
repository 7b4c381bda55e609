"""The ONNX file: its answers, alone in onnxruntime, are the model's; so are its names, and it needs nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import Result
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

from pictures import photos
from tpl import Learner, TplError, cli
from tpl._version import __version__
from tpl.export.file import export_onnx, quantised
from tpl.export.graph import AnswerGraph, FrozenTrunk
from tpl.methods.plus import TPLPlus
from tpl.nets.compact import DATA_CONFIG
from tpl.nets.vit import ViTEncoder

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
OPTIONS: dict[str, Any] = {"latent": 8, "epochs": 3, "batch_size": 16, "lr": 0.05, "memory": 16, "device": "cpu"}
PETS, BIRDS = ["cat", "cow"], ["hen", "owl"]


def tiny(name: str, weights: object = None, download: bool = True) -> ViTEncoder:
    """One block or two, quick to trace; the small one has layer scale, and its norm behind the pooling."""
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    kinds = {"one": {"depth": 1, "init_values": 0.5, "global_pool": "avg"}, "two": {"depth": 2}}
    return ViTEncoder(VisionTransformer(**shape, **kinds[name]), name, "0" * 64, DATA_CONFIG)


@pytest.fixture(scope="module", autouse=True)
def _tiny_encoders() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpl.learner.create_encoder", tiny)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    photos(root / "pets", PETS)
    photos(root / "birds", BIRDS)
    photos(root / "test", [*PETS, *BIRDS, "yak"], count=4, seed=1)
    return root


def taught(
    place: Path, method: str, encoder: str, folders: Sequence[str], held_out: float = 0.3, **options: Any
) -> Learner:
    learner = Learner(method, encoder, **(OPTIONS | options))
    for folder in folders:
        learner.learn(place / folder, held_out=held_out)
    return learner


@pytest.fixture(scope="module")
def learner(place: Path) -> Learner:
    learner = taught(place, "tpl", "two", ["pets", "birds"])
    learner.save(place / "model")
    return learner


@pytest.fixture(scope="module")
def report(place: Path, learner: Learner) -> Any:
    """What the command says; the file is there then."""
    result = call("export", place / "model", place / "model.onnx", "--check", place / "test", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def file(place: Path, report: Any) -> Path:
    return place / "model.onnx"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def images(place: Path, count: int) -> list[Path]:
    return sorted((place / "test").rglob("*.png"))[:count]


def ask(file: Path, pixels: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    answers: list[np.ndarray[Any, Any]] = session.run(None, {"images": pixels.numpy()})
    return answers


def assert_same(file: Path, learner: Learner, given: list[Path]) -> None:
    """All outputs of the file against the learner's own answers."""
    log_p, of_task, *unknown = ask(file, learner.prepare(given))
    np.testing.assert_allclose(log_p, learner.log_probabilities(given).numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_task, learner.task_proba(given), atol=1e-4)
    assert len(unknown) == (learner.rejection_floor() < 1)
    for scores in unknown:
        np.testing.assert_allclose(scores, learner.unknown_score(given), atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_file_answers_as_the_model(file: Path, learner: Learner, place: Path, batch: int) -> None:
    assert_same(file, learner, images(place, batch))


def test_blocks_below_the_adapted_ones_are_in_the_file_once(place: Path, tmp_path: Path) -> None:
    learner = taught(
        place,
        "tpl-plus",
        "two",
        ["pets", "birds"],
        epochs=1,
        random_features=32,
        adapted_blocks=1,
        expert_views="first",
    )
    export_onnx(learner, tmp_path / "model.onnx")
    assert_same(tmp_path / "model.onnx", learner, images(place, 5))
    pixels = learner.prepare(images(place, 5))
    graph = AnswerGraph(learner.method)  # type: ignore[arg-type]
    rows: list[int] = []
    first, last = graph.trunk.encoder.vit.blocks
    for block in (first.mlp, last.mlp):
        block.register_forward_hook(lambda module, given, found: rows.append(len(given[0])))
    graph(pixels)
    assert rows == [5, 3 * 5]  # two tasks and the encoder's own features


def test_a_global_expert_and_every_other_reading_are_exported_too(place: Path, tmp_path: Path) -> None:
    """The other choice wherever the default model above has one; some tasks are not asked, the first one is gone."""
    choices = {"protect": "supsup", "calibration": "shift", "compose": "and", "logit_score": "ebo", "out_of_task": "md"}
    choices |= {"expert_views": "first", "passes": "auto"}
    learner = taught(
        place, "tpl-plus", "one", ["pets", "birds"], held_out=0, random_features=32, passes_mass=0.6, **choices
    )
    for name in learner.tasks_[0].classes:
        learner.remove(name)
    learner.learn(place / "pets", held_out=0)
    method, given = learner.method, images(place, 8)
    assert isinstance(method, TPLPlus) and len(method.models) > len(method.bank.tasks)
    assert not method.tasks_to_query(
        method.expert_log_probabilities(method.common_features(learner.prepare(given)))
    ).all()
    export_onnx(learner, tmp_path / "plus.onnx")
    for batch in (1, 3, 8):
        assert_same(tmp_path / "plus.onnx", learner, given[:batch])


def closed_form(place: Path, *folders: str, count: int | None = None) -> Learner:
    """A model of the closed form, of all images or of the first `count` of every class."""
    learner = Learner("closed-form", "one", device="cpu", random_features=64)
    for folder in folders:
        files = [file for own in sorted((place / folder).iterdir()) for file in sorted(own.iterdir())[:count]]
        learner.learn(files, [file.parent.name for file in files], name=folder)
    return learner


@pytest.fixture(scope="module")
def closed(place: Path) -> Learner:
    return closed_form(place, "pets", "birds")


def test_a_closed_form_is_exported_with_its_unknown_score(closed: Learner, place: Path, tmp_path: Path) -> None:
    """Known and unknown images, alone and together: some scores lie among the stored ones, others beyond them all."""
    made = export_onnx(closed, tmp_path / "closed.onnx")
    assert made.outputs == ("log_probabilities", "task_probabilities", "unknown")
    given = images(place, 20)
    scores = closed.unknown_score(given)
    assert scores.min() < 0.9 and scores.max() > 1 - closed.rejection_floor()
    for batch in (1, 3, 20):
        assert_same(made.file, closed, given[-batch:])
    about = onnxruntime.InferenceSession(str(made.file)).get_modelmeta().custom_metadata_map
    assert about["method"] == "closed-form" and json.loads(about["classes"]) == PETS + BIRDS
    assert json.loads(about["smallest_reject"]) == closed.rejection_floor() == 1 / 41


def test_a_closed_form_that_was_changed_is_exported_as_it_is_now(place: Path, tmp_path: Path) -> None:
    learner = closed_form(place, "pets", "birds")
    learner.remove(PETS[0])
    export_onnx(learner, tmp_path / "closed.onnx")
    assert_same(tmp_path / "closed.onnx", learner, images(place, 8))


def test_one_image_a_class_gives_no_unknown_score(place: Path, tmp_path: Path) -> None:
    """No image can be left out."""
    learner = closed_form(place, "pets", count=1)
    made = export_onnx(learner, tmp_path / "closed.onnx")
    assert made.outputs == ("log_probabilities", "task_probabilities") and made.comparison.unknown is None
    assert_same(made.file, learner, images(place, 5))


def test_a_closed_forms_trunk_has_the_chosen_precision(closed: Learner, place: Path, tmp_path: Path) -> None:
    given = images(place, 16)
    expected = closed.log_probabilities(given).exp().numpy()
    made = export_onnx(closed, tmp_path / "half.onnx", "fp16")
    log_p, *_ = ask(made.file, closed.prepare(given))
    np.testing.assert_allclose(np.exp(log_p), expected, atol=0.02)
    trunk = [tensor for tensor in onnx.load(made.file).graph.initializer if ".vit." in tensor.name]
    assert trunk and {tensor.data_type for tensor in trunk} == {onnx.TensorProto.FLOAT16}
    made = export_onnx(closed, tmp_path / "small.onnx", "int8")
    assert sum(node.op_type == "MatMulInteger" for node in onnx.load(made.file).graph.node) == 4  # of one block
    log_p, *_ = ask(made.file, closed.prepare(given))
    assert (log_p.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.8


def test_a_graph_that_answers_otherwise_is_not_written(
    closed: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise, which a model without a memory is compared on, shows it, too."""
    right = FrozenTrunk.forward
    monkeypatch.setattr(FrozenTrunk, "forward", lambda trunk, images: right(trunk, images).roll(1, dims=1))
    with pytest.raises(TplError, match="Nothing was written"):
        export_onnx(closed, tmp_path / "wrong.onnx")
    assert list(tmp_path.iterdir()) == []


def test_half_precision_is_close(place: Path, tmp_path: Path) -> None:
    learner = taught(place, "tpl", "one", ["pets"], masks="soft")
    made = export_onnx(learner, tmp_path / "half.onnx", "fp16")
    given = images(place, 8)
    log_p, *_ = ask(made.file, learner.prepare(given))
    np.testing.assert_allclose(np.exp(log_p), learner.predict_proba(given), atol=0.02)
    trunk = [tensor for tensor in onnx.load(made.file).graph.initializer if ".vit." in tensor.name]
    assert {tensor.data_type for tensor in trunk} == {onnx.TensorProto.FLOAT16}


def test_int8_quantises_the_trunks_linear_layers_alone(
    file: Path, learner: Learner, place: Path, tmp_path: Path
) -> None:
    model = quantised(onnx.load(file), tmp_path)
    assert sum(node.op_type == "MatMulInteger" for node in model.graph.node) == 2 * 4  # of two blocks
    onnx.save_model(model, tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size < file.stat().st_size
    given = images(place, 16)
    log_p, *_ = ask(tmp_path / "small.onnx", learner.prepare(given))
    assert (log_p.argmax(axis=1) == learner.log_probabilities(given).argmax(dim=1).numpy()).mean() >= 0.8


def test_the_file_describes_itself(file: Path, learner: Learner) -> None:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == PETS + BIRDS
    assert json.loads(about["tasks"]) == [{"name": "pets", "classes": PETS}, {"name": "birds", "classes": BIRDS}]
    assert json.loads(about["input_size"]) == [3, 32, 32]
    assert json.loads(about["encoder"])["fingerprint"] == learner.method.encoder.fingerprint
    assert about["tpl"] == __version__ and about["precision"] == "fp32"
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["n", 3, 32, 32])
    assert [(o.name, o.shape) for o in session.get_outputs()] == [
        ("log_probabilities", ["n", 4]),
        ("task_probabilities", ["n", 2]),
        ("unknown", ["n"]),
    ]
    assert str(Path(torch.__file__).parent).encode() not in file.read_bytes()  # nor where it was made


def test_the_command_compares_on_labelled_images(report: Any, learner: Learner, place: Path) -> None:
    check = report["check"]
    names = [path.parent.name for path in images(place, 100)]
    known = [name != "yak" for name in names]
    right = [a == b for a, b in zip(learner.predict(images(place, 100)), names, strict=True)]
    assert (check["images"], check["known"]) == (20, 16) == (len(names), sum(known))
    assert check["accuracy"] == check["accuracy_pytorch"] == sum(right) / sum(known)
    assert check["same_class"] == 20 and 0 < check["largest_difference"]["probability"] < 1e-4
    assert check["largest_difference"]["unknown"] < 1e-4
    assert report["outputs"] == ["log_probabilities", "task_probabilities", "unknown"]
    assert report["bytes"] == (place / "model.onnx").stat().st_size
    assert [path.name for path in place.iterdir() if path.name.startswith(".tpl")] == []


def test_the_pages_example_needs_onnxruntime_alone(file: Path, learner: Learner, place: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(re.findall(r"^.+$", example, re.MULTILINE)) <= 10
    (photo,) = (place / "test" / "owl").glob("0.png")
    (place / "photo.jpg").write_bytes(photo.read_bytes())  # Pillow looks inside
    alone = "\nimport sys\nassert not {'torch', 'tpl', 'onnx'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", example + alone], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == learner.predict([photo])[0]


@pytest.mark.parametrize(
    "choices",
    [{"in_task": "knn", "k": 1}, {"logit_score": "none"}, {"in_task": "none"}, {"calibration": "probability"}],
)
def test_choices_made_later_change_the_graph(learner: Learner, place: Path, choices: dict[str, Any]) -> None:
    """Before it is traced, the module itself must already say what the model says."""
    other = Learner.load(place / "model", device="cpu")
    other.method.rescore(**choices)  # type: ignore[attr-defined]
    pixels = other.prepare(images(place, 5))
    log_p, _, unknown = AnswerGraph(other.method)(pixels)  # type: ignore[arg-type]
    torch.testing.assert_close(log_p.double(), other.method.log_probabilities(pixels), rtol=1e-4, atol=1e-4)
    assert unknown.shape == (5,)
    assert not torch.equal(other.method.log_probabilities(pixels), learner.method.log_probabilities(pixels))


def test_what_cannot_be_exported_is_explained(place: Path, learner: Learner, tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    finetune = Learner("finetune", "one", device="cpu", epochs=1).learn(place / "pets")
    with pytest.raises(TplError, match="'finetune' cannot be exported; only closed-form, tpl and tpl-plus can"):
        export_onnx(finetune, out)
    with pytest.raises(TplError, match="Nothing was learned"):
        export_onnx(Learner("tpl", "one", device="cpu"), out)
    with pytest.raises(TplError, match="one of fp32, fp16, int8"):
        export_onnx(learner, out, "int4")
    for wrong, words in (("model.pt", "must end in .onnx"), ("none/model.onnx", "no folder")):
        result = call("export", place / "model", tmp_path / wrong)
        assert isinstance(result.exception, TplError) and words in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(
    learner: Learner, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpl.export.find_spec", lambda name: None if name == "onnxscript" else object())
    result = call("export", place / "model", tmp_path / "model.onnx")
    assert isinstance(result.exception, TplError) and "tpl-cil[export]" in str(result.exception)
