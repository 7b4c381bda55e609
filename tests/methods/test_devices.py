"""No method leaves a tensor on the CPU that belongs on the device, or mixes precisions: checked without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from common_checks import OPTIONS
from elsewhere import ELSEWHERE, elsewhere
from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.bench.evaluate import Evaluator
from tpl.methods import load_methods
from tpl.methods.bank.techniques import TECHNIQUES, cmg
from tpl.stream import Stream

SHORT = OPTIONS | {"epochs": 1, "width": 64, "lr": 0.01}
CASES = {name: (name, {"encoder": SMALL_VIT}) for name in load_methods()}
CASES |= {f"hat, {name}": ("hat", {"encoder": SMALL_VIT, "technique": name}) for name in TECHNIQUES if name != "none"}
CASES |= {
    "tpl, features": ("tpl", {"encoder": SMALL_VIT, "memory_kind": "features"}),
    "tpl, supsup": ("tpl", {"encoder": SMALL_VIT, "protect": "supsup"}),
    "tpl, per class": ("tpl", {"encoder": SMALL_VIT, "others": "per_class", "augment": "mirror"}),
    "tpl-plus, auto, no memory": ("tpl-plus", {"encoder": SMALL_VIT, "passes": "auto", "memory_kind": "none"}),
    "ranpac, first": ("ranpac", {"encoder": SMALL_VIT, "adapt": "first"}),
    "resnet18": ("tpl", {"encoder": "resnet18:4", "augment": "crop"}),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """CMG's generator, as short as it can be and still be trained."""
    monkeypatch.setattr(cmg, "GENERATOR_STEPS", 5)


@pytest.fixture
def there() -> Iterator[torch.device]:
    with elsewhere() as device:
        yield device


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_learns_answers_and_moves_house(case: tuple[str, dict[str, str]], small_stream: Stream, tmp_path: Path) -> None:
    """Two tasks in half precision, evaluated as in a run; the saved model answers the same there, and here, too."""
    name, options = case
    known = load_methods()[name].config_class.__dataclass_fields__
    stream = Stream(small_stream[:2])
    images = stream[0].test
    assert images is not None
    with elsewhere() as device:
        learner = Learner(
            name, device=device.type, precision="bf16", **{k: v for k, v in SHORT.items() if k in known} | options
        )
        evaluator = Evaluator(stream, learner.method)
        for stage, task in enumerate(stream.once()):
            learner.learn(stream.union(stage) if learner.method.cumulative else task)
            assert evaluator.stage(stage).drift in (None, 0.0)
        answers = learner.log_probabilities(images)
        learner.save(tmp_path)
        again = Learner.load(tmp_path, device=device.type, precision="bf16").log_probabilities(images)
    assert answers.device.type == "cpu" and torch.equal(again, answers)
    at_home = Learner.load(tmp_path, device="cpu", precision="bf16").log_probabilities(images)
    assert at_home.shape == answers.shape
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
