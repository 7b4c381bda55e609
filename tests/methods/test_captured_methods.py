"""On a GPU every method's steps are captured and replayed; the answers must be those of plain steps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from common_checks import known_to
from tpl import Learner
from tpl.methods import load_methods
from tpl.stream import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


OPTIONS: dict[str, Any] = {"latent": 8, "epochs": 3, "batch_size": 10, "lr": 0.02, "memory": 12}


CASES = [(method, "compact") for method in sorted(load_methods())]
CASES += [(name, "resnet18:8") for name, method in sorted(load_methods().items()) if method.from_scratch]
LAST_BLOCKS = ("tpl", "tpl-plus", "hat", "supsup")  # also trained on tokens that are computed once


@pytest.fixture(params=[None, 2])
def adapted(request: pytest.FixtureRequest, method: str, encoder: str) -> dict[str, Any]:
    """Adapters in all blocks, or in the last two."""
    if request.param is None:
        return {}
    if method not in LAST_BLOCKS or encoder != "compact":
        pytest.skip("as with all blocks")
    return {"adapted_blocks": request.param}


@pytest.mark.parametrize(("method", "encoder"), CASES)
def test_captured_steps_are_plain_steps(
    method: str, encoder: str, adapted: dict[str, Any], small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else two plain runs differ as well
    options = known_to(method, OPTIONS) | adapted
    answers = []
    for captured in (True, False):
        if not captured:  # (the package's `train` is the function, so the module is asked for by name)
            monkeypatch.setattr(sys.modules["tpl.engine.train"], "CapturedStep", lambda plain: plain)
        learner = Learner(method, encoder, device="cuda", precision="fp32", **options)
        for t, task in enumerate(small_stream):
            learner.learn(small_stream.union(t) if learner.method.cumulative else task)
        answers.append(torch.cat([learner.log_probabilities(task.test) for task in small_stream if task.test]))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-2, atol=1e-2)


# The compiler reads gradients of tensors that have none, and hides the warning unless it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("method", ["agem", "hal"])
def test_gradients_beside_the_step_s_own_are_taken_of_compiled_networks(method: str, small_stream: Stream) -> None:
    """In these methods, a step has several backward passes; a compiled one reuses the memory of its activations."""
    learner = Learner(method, "compact", device="cuda", compile="on", **known_to(method, OPTIONS))
    for task in small_stream:
        learner.learn(task)
    assert all(bool(learner.log_probabilities(task.test).isfinite().all()) for task in small_stream if task.test)
