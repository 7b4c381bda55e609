"""Every road to an answer asks the same task models about the same images, and no more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from handwriting import digits
from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import Learner, Task
from tpl.bench.evaluate import Evaluator
from tpl.cli import app as commands
from tpl.methods.bank.bank import CPUInference, QueryPart
from tpl.methods.plus import TPLPlus
from tpl.serve.model import ImageQuery, ModelSource, ServedModel
from tpl.stream import ArrayImages, Stream

OPTIONS: dict[str, Any] = {
    "latent": 16,
    "epochs": 6,
    "batch_size": 16,
    "lr": 0.05,
    "memory": 40,
    "random_features": 256,
}
TASKS, PER_CLASS, ASKED = 4, 60, 8
IMAGES = digits(range(2 * TASKS), 40, start=PER_CLASS)  # known classes, images that no model has seen
PROBE = IMAGES.select(np.arange(ASKED) * 40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, and how many tasks it asks: all of them, those worth it, or the best one."""
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **OPTIONS)
    for t in range(TASKS):
        names = (str(2 * t), str(2 * t + 1))
        learner.learn(Task(f"task {t}", names, digits([2 * t, 2 * t + 1], PER_CLASS)), held_out=0.5)
        learner.method.closed_ = None  # type: ignore[attr-defined]  # as with many images: held-out ones calibrate
    places = {}
    for passes in ("all", "auto", "1"):
        learner.method.rescore(passes=passes)  # type: ignore[attr-defined]
        places[passes] = tmp_path_factory.mktemp("road") / passes
        learner.save(places[passes])
    return places


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs of an image and a task went through the network, pass by pass."""
    counted: list[int] = []
    ask = CPUInference.run

    def counting(self: CPUInference, tokens: Tensor, pieces: list[QueryPart]) -> Tensor:
        counted.append(sum(len(piece.rows) for piece in pieces))
        return ask(self, tokens, pieces)

    monkeypatch.setattr(CPUInference, "run", counting)
    return counted


def files(place: Path) -> list[Path]:
    found = []
    for i in range(len(PROBE)):
        Image.fromarray(np.asarray(PROBE.load(i))).save(place / f"{i}.png")
        found.append(place / f"{i}.png")
    return found


def by_python(model: Path, place: Path) -> list[int | None]:
    learner = Learner.load(model, device="cpu")
    return [answer.passes for answer in learner.answers(PROBE)]


def by_labels(model: Path, place: Path) -> list[int | None]:
    Learner.load(model, device="cpu").predict(PROBE)
    return []


def by_command(model: Path, place: Path) -> list[int | None]:
    folder = place / "images"
    folder.mkdir()
    files(folder)
    out = place / "answers.jsonl"
    words = ["predict", str(model), str(folder), "--json", "--out", str(out), "--device", "cpu"]
    commands(words, standalone_mode=False)
    return [json.loads(line)["passes"] for line in out.read_text().splitlines()]


def by_server(model: Path, place: Path) -> list[int | None]:
    served = ServedModel(ModelSource(model, "cpu"))  # asks one image to warm up
    pixels = served.learner.prepare(PROBE)
    return [reply.to_dict()["passes"] for reply in served.answer([ImageQuery(each, 3) for each in pixels])]


def by_evaluation(model: Path, place: Path) -> list[int | None]:
    """`tpl evaluate`, on class folders."""
    for c in range(2):
        (place / "test" / str(c)).mkdir(parents=True)
    for i, file in enumerate(files(place)):
        file.rename(place / "test" / str(i % 2) / file.name)
    commands(["evaluate", str(model), str(place / "test"), "--json", "--device", "cpu"], standalone_mode=False)
    return []


ROADS: dict[str, Callable[[Path, Path], list[int | None]]] = {
    "python": by_python, "labels": by_labels, "command": by_command, "server": by_server, "evaluate": by_evaluation,
}  # fmt: skip


@pytest.mark.parametrize("passes", ["all", "auto", "1"])
@pytest.mark.parametrize("road", ROADS)
def test_every_road_asks_the_tasks_that_the_expert_finds_worth_asking(
    road: str, passes: str, saved: dict[str, Path], pairs: list[int], tmp_path: Path
) -> None:
    """Passes are counted in the network, and reported as they are counted."""
    method = Learner.load(saved[passes], device="cpu").method
    pixels = method.preprocess.batch(PROBE)
    expected = method.answer(pixels).passes
    assert expected is not None
    alone = method.answer(torch.zeros_like(pixels[:1])).passes  # what a model is asked when it is loaded
    assert alone is not None
    pairs.clear()
    reported = ROADS[road](saved[passes], tmp_path)
    assert reported in ([], expected.tolist())
    assert sum(pairs) == int(expected.sum()) + int(alone.sum())
    assert {"all": ASKED * TASKS, "1": None}.get(passes) in (None, int(expected.sum()))
    assert int(expected.sum()) < ASKED * TASKS or passes == "all"


@pytest.mark.parametrize("passes", ["all", "auto", "1"])
def test_a_benchmark_measures_what_the_product_answers(passes: str, saved: dict[str, Path]) -> None:
    learner = Learner.load(saved[passes], device="cpu")
    tasks = []
    for t in range(TASKS):
        rows = np.arange(80 * t, 80 * (t + 1))
        test = ArrayImages(np.stack([np.asarray(IMAGES.load(i)) for i in rows]), IMAGES.labels[rows] - 2 * t)
        tasks.append(Task(f"task {t}", (str(2 * t), str(2 * t + 1)), test, test))
    stream = Stream(tasks)
    result = Evaluator(stream, learner.method).stage(TASKS - 1)
    answers = learner.answers(IMAGES)
    right = [answer.name == str(label) for answer, label in zip(answers, IMAGES.labels, strict=True)]
    assert np.mean(result.cil) == pytest.approx(np.mean(right), abs=1 / len(right))  # one image may be on the line
    assert result.passes == pytest.approx(np.mean([answer.passes for answer in answers]), abs=0.01)


@pytest.mark.parametrize("passes", ["all", "auto", "1"])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_of_known_images_no_more_than_the_share_are_rejected(passes: str, share: float, saved: dict[str, Path]) -> None:
    """Whichever tasks are asked: a held-out image about which its own task is not asked counts as the strangest."""
    learner = Learner.load(saved[passes], device="cpu")
    rejected = np.mean([answer.rejected(share) for answer in learner.answers(IMAGES)])
    # 320 images, and thresholds from 60 held-out images a task: three deviations of both together.
    assert rejected <= share + 3 * (share * (1 - share) * (1 / 320 + 1 / (TASKS * 60))) ** 0.5
    noise = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    strange = ArrayImages(noise, np.zeros(40, np.int64))
    found = np.mean([answer.rejected(share) for answer in learner.answers(strange)])
    assert found == (share >= learner.rejection_floor())  # all of it where anything can be rejected, else none


def test_held_out_images_meet_the_rule_that_new_ones_meet(saved: dict[str, Path]) -> None:
    """The reason for the share above: a held-out image about which its task is not asked counts as the strangest."""
    unasked = {}
    for passes in ("all", "auto", "1"):
        method = Learner.load(saved[passes], device="cpu").method
        assert isinstance(method, TPLPlus)
        unasked[passes] = 0
        for t, held in enumerate(method.held_):
            assert held.common is not None and len(held.common) == len(held.labels) == PER_CLASS
            asked = method.tasks_to_query(method.expert_log_probabilities(held.common))[:, t]
            assert int(method.held_scores()[t].isneginf().sum()) == int((~asked).sum())
            unasked[passes] += int((~asked).sum())
        most = max(int(scores.isneginf().sum()) for scores in method.held_scores())
        assert method.rejection_floor() == (1 + most) / (1 + PER_CLASS)
    assert unasked["all"] == 0 < unasked["auto"] < unasked["1"]


def test_the_product_and_a_benchmark_learn_the_same_model(tmp_path: Path) -> None:
    """`tpl learn`, folder by folder, and `tpl run folder` with its settings: the same bits."""
    data = tmp_path / "data"
    for part, start, count in (("train", 0, 12), ("test", 40, 4)):
        for c in range(4):
            images = digits([c], count, start=start)
            place = data / part / f"class {c}"
            place.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(np.asarray(images.load(i))).save(place / f"{i:02d}.png")
    product, run = tmp_path / "model", tmp_path / "run"
    options = ["--epochs", "2", "--memory", "16", "--device", "cpu"]
    for classes in ("class 0,class 1", "class 2,class 3"):
        words = ["learn", str(product), str(data / "train"), "--classes", classes, "--held-out", "0.25"]
        commands([*words, "--encoder", SMALL_VIT, *options], standalone_mode=False)
    learned = Learner.load(product, device="cpu").method
    chosen = ("latent", "batch_size", "random_features", "lr")  # what `tpl learn` chooses by the encoder and the images
    sets = [word for name in chosen for word in ("--set", f"{name}={getattr(learned.config, name)}")]
    words = ["run", "folder", "--data", str(data), "--per-task", "2", "--held-out", "0.25", "--method", "tpl-plus"]
    commands([*words, "--encoder", SMALL_VIT, *options, *sets, "--out", str(run)], standalone_mode=False)
    measured = Learner.load(run / "model", device="cpu").method
    assert measured.config == learned.config and measured.task_classes_ == learned.task_classes_
    assert measured.weighting() == learned.weighting() and learned.weighting()["fitted_on"] > 0  # type: ignore[index]
    assert differences(tensors_of(measured), tensors_of(learned)) == []
    assert json.loads((run / "run.json").read_text())["held_out"] == 0.25


def test_a_reader_follows_few_files() -> None:
    """The paper's method: an answer passes through at most 15 files of the package, a task through 25."""
    script = Path(__file__).parents[1] / "benchmarks" / "roads.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["tpl predict"]["files"] <= 15
    assert found["tpl learn"]["files"] <= 25
