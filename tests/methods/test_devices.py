"""What a GPU asks of a method, checked without one.

No tensor lies on the CPU that belongs on the device, or the other way round; precisions do not mix; and a step that is
captured once and replayed does what it would do anew.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common_checks import OPTIONS, known_to
from elsewhere import ELSEWHERE, elsewhere
from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.bench.evaluate import Evaluator
from tpl.engine import compute as engine_compute
from tpl.engine.compute import capture
from tpl.methods import load_methods
from tpl.methods.bank import bank as bank_module
from tpl.methods.bank.techniques import TECHNIQUES, ClassVAE
from tpl.stream import Stream

Case = tuple[str, dict[str, Any]]
# Six steps, the last of two images: three go before a recording.
SHORT = OPTIONS | {"epochs": 1, "batch_size": 6, "memory": 12, "random_features": 64, "lr": 0.01, "anchor_steps": 1}
CASES: dict[str, Case] = {name: (name, {"encoder": SMALL_VIT, "precision": "bf16"}) for name in load_methods()}
CASES |= {f"hat, {name}": ("hat", {"encoder": SMALL_VIT, "technique": name}) for name in TECHNIQUES if name != "none"}
CASES |= {
    "tpl, features": ("tpl", {"encoder": SMALL_VIT, "memory_kind": "features"}),
    "tpl, supsup": ("tpl", {"encoder": SMALL_VIT, "protect": "supsup"}),
    "tpl, per class": ("tpl", {"encoder": SMALL_VIT, "others": "per_class", "augment": "flip", "schedule": "cosine"}),
    "tpl-plus, auto, no memory": ("tpl-plus", {"encoder": SMALL_VIT, "passes": "auto", "memory_kind": "none"}),
    "tpl, last block": (
        "tpl",
        {"encoder": SMALL_VIT, "adapted_blocks": 1, "epochs": 3, "batch_size": 16, "augment": "flip"},
    ),
    "tpl-plus, last block": ("tpl-plus", {"encoder": SMALL_VIT, "adapted_blocks": 1, "precision": "bf16"}),
    "ranpac, first": ("ranpac", {"encoder": SMALL_VIT, "adapt": "first"}),
    "resnet18": ("tpl", {"encoder": "resnet18:4", "augment": "crop"}),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as can be: of CMG's generator, and of the rows that fill a GPU's passes up."""
    monkeypatch.setattr(ClassVAE, "steps", 5)
    for module, name in ((engine_compute, "BLOCK"), (bank_module, "BLOCK"), (bank_module, "ROWS")):
        monkeypatch.setattr(module, name, 32)
    monkeypatch.setattr("tpl.methods.parts.closed_form.RANDOM_FEATURES", 64)


@pytest.fixture
def there() -> Iterator[torch.device]:
    with elsewhere() as device:
        yield device


def new_learner(case: Case) -> Learner:
    name, options = case
    return Learner(name, device=ELSEWHERE.type, **known_to(name, SHORT) | options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_learns_recorded_as_plain_and_moves_house(
    case: Case, small_stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks, evaluated as in a run; by plain steps it is the same to the bit, and so is the saved model there.

    One task is enough for a technique, which keeps nothing from one task to the next.
    """
    stream = Stream(small_stream[: 1 if "technique" in case[1] else 2])
    images = stream[0].test
    assert images is not None
    with elsewhere(recording=True):
        learner, plain = new_learner(case), new_learner(case)
        evaluator = Evaluator(stream, learner.method)
        for stage in range(len(stream)):
            task = stream.union(stage) if learner.method.cumulative else stream[stage]
            learner.learn(task)
            assert evaluator.stage(stage).drift in (None, 0.0)
            with monkeypatch.context() as patch:  # (the package's `train` is the function: the module by its name)
                patch.setattr(sys.modules["tpl.engine.train"], "CapturedStep", lambda step: step)
                plain.learn(task)
        answers = learner.log_probabilities(images)
        assert torch.equal(answers, plain.log_probabilities(images))
        learner.save(tmp_path)
        again = Learner.load(tmp_path, device=ELSEWHERE.type, precision=case[1].get("precision", "fp32"))
        assert torch.equal(answers, again.log_probabilities(images))
    at_home = Learner.load(tmp_path, device="cpu").log_probabilities(images)
    assert answers.device.type == "cpu" and at_home.shape == answers.shape
    torch.testing.assert_close(at_home.exp().sum(dim=1), torch.ones(len(images), dtype=torch.float64))


def test_what_a_gpu_refuses_is_refused(there: torch.device) -> None:
    far, near = torch.ones(3, device=there), torch.ones(3)
    assert far.device == ELSEWHERE and torch.tensor([1.0], device=there).device == ELSEWHERE
    for mixed in (lambda: far + near, lambda: near[far.long()], lambda: torch.cat([near, far])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=there, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="numpy"):
        far.numpy()


def test_what_a_gpu_does_is_done(there: torch.device) -> None:
    far, near = torch.arange(3.0, device=there), torch.arange(3.0)
    assert far.tolist() == (far + torch.tensor(0.0)).cpu().tolist() == near.tolist()  # single numbers may be anywhere
    assert far[torch.tensor([2])].item() == 2  # so may positions
    far[0] = 7
    assert near.copy_(far).tolist() == [7, 1, 2] and near.device.type == "cpu"
    layer = nn.Linear(3, 1).to(there)
    layer(far).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[7, 1, 2]]


def test_a_tape_does_the_same_with_other_numbers() -> None:
    with elsewhere(recording=True) as device:
        given, total = torch.ones(3, device=device), torch.zeros(3, device=device)
        tape = torch.cuda.CUDAGraph()
        with capture(tape):
            doubled = given * 2
            total += doubled
        assert total.tolist() == [0, 0, 0]  # noted, not done
        for value in (1, 5):
            given.fill_(value)
            tape.replay()
        assert doubled.tolist() == [10, 10, 10] and total.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    "step",
    [
        lambda far: far.sum().item(), lambda far: far.cpu(), lambda far: far[far > 1], lambda far: far.nonzero(),
        lambda far: far + torch.ones(3).to(far.device), lambda far: far.tolist(), lambda far: far.long().bincount(),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused(step: Callable[[torch.Tensor], object]) -> None:
    with elsewhere(recording=True) as device:
        far = torch.arange(3.0, device=device)
        step(far)
        with capture(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="not permitted"):
            step(far)


def test_what_nobody_needs_is_freed_only_after_a_recording() -> None:
    with elsewhere(recording=True):
        with pytest.raises(RuntimeError, match="freed now"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
        with pytest.raises(ZeroDivisionError), capture(torch.cuda.CUDAGraph()):
            raise ZeroDivisionError
    assert gc.isenabled()
