"""Methods whose features are final after the first task encode each test image once."""

from __future__ import annotations

import pytest
import torch

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.bench.evaluate import Evaluator
from tpl.methods.parts.fixed_features import FixedFeatures
from tpl.stream import Stream

OPTIONS = {"aper": {"epochs": 1, "latent": 16}, "ranpac": {"adapt": "none"}, "klda": {"ensemble": 2}, "slda": {}}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_benchmark_encodes_each_test_image_once(
    name: str, small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(name, SMALL_VIT, device="cpu", **OPTIONS[name])
    method, encoded = learner.method, list[int]()
    assert isinstance(method, FixedFeatures)
    evaluator, features = Evaluator(small_stream, method), method.features

    def counted(pixels: torch.Tensor) -> torch.Tensor:
        encoded.append(len(pixels))
        return features(pixels)

    for stage, task in enumerate(small_stream):
        assert task.test is not None
        learner.learn(task, held_out=0)
        encoded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(method, "features", counted)
            found = evaluator.stage(stage)
        assert encoded == [len(task.test)]
        own = learner.log_probabilities(small_stream[0].test).argmax(dim=1)
        right = own == torch.tensor(small_stream[0].test.labels)
        assert found.cil[0] == pytest.approx(float(right.double().mean()))
