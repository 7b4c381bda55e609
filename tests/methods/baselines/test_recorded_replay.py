"""On a GPU the steps of the replay methods are recorded and replayed; the answers must be those of plain steps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tpl import Learner
from tpl.stream import Stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("method", ["agem", "derpp", "hal"])
def test_recorded_steps_are_plain_steps(method: str, small_stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"latent": 8, "epochs": 3, "batch_size": 10, "lr": 0.02, "memory": 12}
    answers = []
    for recorded in (True, False):
        if not recorded:  # (the package's `train` is the function, so the module is asked for by name)
            monkeypatch.setattr(sys.modules["tpl.engine.train"], "RecordedStep", lambda plain: plain)
        learner = Learner(method, device="cuda", precision="fp32", **options)
        for task in small_stream:
            learner.learn(task)
        answers.append(torch.cat([learner.log_probabilities(task.test) for task in small_stream if task.test]))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-2, atol=1e-2)
