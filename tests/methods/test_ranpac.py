"""RanPAC as published: the first task adapts, the others only add to the sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.bench.results import read_description
from tpl.methods.parts.ridge import RandomRidge
from tpl.methods.ranpac import OwnTaskRidge, RanPAC, RanPACConfig
from tpl.stream import Stream

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05, "random_features": 64}


def new(**options: Any) -> tuple[Learner, RanPAC]:
    learner = Learner("ranpac", SMALL_VIT, device="cpu", **OPTIONS | options)
    assert isinstance(learner.method, RanPAC)
    return learner, learner.method


def test_the_first_task_alone_adapts(small_stream: Stream) -> None:
    learner, method = new()
    pixels = learner.prepare(small_stream[2].train)
    before = method.encoder_features(pixels)
    learner.learn(small_stream[0], held_out=0)
    first = method.features(pixels)
    assert not torch.allclose(first, before, atol=1e-3)
    for task in small_stream[1:]:
        learner.learn(task, held_out=0)
        assert torch.equal(method.features(pixels), first)
    assert method.state().shared["head_weight"].shape == (0, method.encoder.dim)  # its head was for training alone


def test_without_adaptation_the_features_are_the_encoders(small_stream: Stream) -> None:
    learner, method = new(adapt="none")
    pixels = learner.prepare(small_stream[0].train)
    learner.learn(small_stream[0], held_out=0)
    assert torch.equal(method.features(pixels), method.encoder_features(pixels))
    assert not [name for name in method.state().shared if not name.startswith("ridge.")]


def test_the_defaults_are_the_published_ones() -> None:
    config = RanPACConfig()
    assert (config.adapt, config.ridge_criterion, config.logit_adjustment) == ("first", "error", False)


def test_stored_runs_and_models_keep_the_options_they_were_made_with(small_stream: Stream, tmp_path: Path) -> None:
    names = [file for file in (ROOT / "results").rglob("run.json") if "ranpac" in str(file)]
    files = [file for file in names if "digits-5t" not in str(file)]  # those are of today's defaults
    kinds = {
        "ranpac-first": ("first", "error"), "ranpac-best": ("first", "entropy"),
        "ranpac-none": ("none", "error"), "ranpac": ("none", "entropy"),
    }  # fmt: skip
    for kind, options in kinds.items():
        own = [file for file in files if next(name for name in kinds if name in str(file)) == kind]
        runs = [read_description(file.parent) for file in own]
        assert len(runs) >= 3
        assert {(run["options"]["adapt"], run["options"]["ridge_criterion"]) for run in runs} == {options}
    learner, _ = new(adapt="none", ridge_criterion="entropy")
    learner.learn(small_stream[0], held_out=0)
    learner.save(tmp_path)
    header = next(file for file in tmp_path.rglob("*.json") if "adapt" in file.read_text(encoding="utf-8"))
    assert json.loads(header.read_text(encoding="utf-8"))["options"]["adapt"] == "none"
    assert Learner.load(tmp_path, device="cpu").method.config.adapt == "none"


@pytest.mark.parametrize("images", [40, 400])
def test_the_strength_can_be_that_of_the_newest_task(images: int) -> None:
    """G + lambda I with the task's own lambda, whatever the size of G."""
    draw = torch.Generator().manual_seed(0)
    config = RanPACConfig(random_features=32, ridge_fit="task")
    ridge = OwnTaskRidge.drawn_for(torch.empty(0, 6), config, torch.Generator().manual_seed(1))
    z, y = torch.randn(images, 6, generator=draw), torch.arange(images) % 4
    for task in (0, 1):
        own = y // 2 == task
        ridge.learn(z[own], y[own], torch.Generator().manual_seed(2))
    alone = RandomRidge(ridge.projections, config)
    alone.learn(z[own], y[own] - 2, torch.Generator().manual_seed(2))
    strength = alone.strength * float(alone.gram.diagonal().mean())
    h = ridge.hidden(z)
    expected = torch.linalg.solve(h.T @ h + strength * torch.eye(32), h.T @ torch.nn.functional.one_hot(y).double())
    torch.testing.assert_close(ridge.weights, expected, rtol=1e-6, atol=1e-8)
