"""Upper bounds: trained once for both, measured at the last stage alone if so wished."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from small_encoder import SMALL_VIT
from tpl.bench.bounds import BOUNDS, FEWEST_EPOCHS
from tpl.bench.results import RunResult
from tpl.bench.run import execute, execute_together
from tpl.bench.spec import RunSpec
from tpl.engine import Event
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.joint import Joint
from tpl.methods.joint_ridge import JointRidge

OPTIONS = {"latent": 8, "epochs": 2}
SPEC = RunSpec("digits-5t", "joint", SMALL_VIT, tasks=3, validation=0.5, options=OPTIONS, device="cpu")
LAST = replace(SPEC, options=OPTIONS | {"stages": "last"})


def both(spec: RunSpec) -> list[RunSpec]:
    return [replace(spec, method=method) for method in BOUNDS]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunResult], list[Event]]:
    folder, events = tmp_path_factory.mktemp("bounds"), list[Event]()
    return folder, execute_together(both(LAST), [folder / "0", folder / "1"], callback=events.append), events


def test_both_bounds_train_one_network(together: tuple[Path, list[RunResult], list[Event]]) -> None:
    folder, _, events = together
    one, other = (Learner.load(folder / number, device="cpu").method for number in ("0/model", "1/model"))
    assert isinstance(one, Joint) and isinstance(other, JointRidge)
    for name, tensor in one.network.state_dict().items():
        assert torch.equal(tensor, other.network.state_dict()[name]), name
    trained = [event for event in events if event.kind == "trained"]
    assert len(trained) == 2 and trained[0].data == trained[1].data  # one training, which both runs are told of


def test_a_bound_trained_beside_the_other_is_the_one_trained_alone(
    together: tuple[Path, list[RunResult], list[Event]], tmp_path: Path
) -> None:
    for spec, result in zip(both(LAST), together[1], strict=True):
        alone = execute(spec, tmp_path / spec.method)
        np.testing.assert_array_equal(alone.matrices["cil"], result.matrices["cil"])


def test_other_settings_are_trained_on_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied: list[Joint] = []
    copy = Joint.learn_task_from
    monkeypatch.setattr(Joint, "learn_task_from", lambda self, *given: copied.append(self) or copy(self, *given))
    joint, ridge = both(replace(LAST, tasks=1))
    longer = replace(ridge, options=ridge.options | {"epochs": 3})
    for number, other in enumerate((longer, replace(ridge, seed=1), replace(ridge, order="random:1"), ridge)):
        execute_together([joint, other], [tmp_path / f"{number}-{name}" for name in BOUNDS])
        assert len(copied) == (other is ridge)


def test_a_run_of_the_last_stage_has_one_row(together: tuple[Path, list[RunResult], list[Event]]) -> None:
    folder, (result, _), events = together
    matrix = result.matrices["cil"]
    assert np.isnan(matrix[:2]).all() and np.isfinite(matrix[2]).all()
    assert result.summary["last"] == pytest.approx(float(matrix[2] @ result.sizes) / sum(result.sizes))
    assert result.summary["aia"] is None and result.summary["forgetting_classic"] is None
    assert result.class_accuracy is None and result.task_confusion is not None
    text = (folder / "0/results.json").read_text()
    assert "NaN" not in text and json.loads(text)["matrices"]["cil"][:2] == [[], []]
    np.testing.assert_array_equal(RunResult.read(folder / "0").matrices["cil"], matrix)
    assert sorted(file.name for file in (folder / "0/stages").iterdir()) == ["002.json"]
    (begun,) = [event for event in events if event.kind == "run" and event.run.name == "joint"]
    assert begun.data["learned"] == 2 and begun.data["images"][:2] == [0, 0]


def test_the_last_stage_is_that_of_a_run_over_all_stages(
    together: tuple[Path, list[RunResult], list[Event]], tmp_path: Path
) -> None:
    whole = execute(SPEC, tmp_path / "run")
    np.testing.assert_array_equal(whole.matrices["cil"][2], together[1][0].matrices["cil"][2])
    lost = whole.against(together[1][0])
    assert lost == {"forgetting_last": 0.0, "forgetting_aia": None}


def test_a_run_of_the_last_stage_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tpl.bench.evaluate.Evaluator.stage", cut)
        with pytest.raises(KeyboardInterrupt):
            execute(LAST, tmp_path)
    monkeypatch.setattr(Joint, "learn_task", cut)  # it has been learned
    assert execute(LAST, tmp_path, resume=True).summary["last"] > 0.15


@pytest.mark.parametrize("benchmark", ["digits-5t", "c10-5t", "c100-10t", "c100-20t", "t-5t", "t-10t"])
@pytest.mark.parametrize("method", BOUNDS)
def test_a_benchmark_trains_bounds_to_the_end(benchmark: str, method: str) -> None:
    spec = RunSpec(benchmark, method, "vit_tiny_patch16_224")
    chosen = spec.benchmark_options()
    assert chosen["epochs"] >= FEWEST_EPOCHS and chosen["schedule"] == "cosine"
    assert spec.all_options()["augment"] == ("none" if benchmark == "digits-5t" else "flip")
    assert f"epochs={chosen['epochs']}" in spec.benchmark_note()


def test_stages_are_all_or_the_last() -> None:
    with pytest.raises(TplError, match="stages must be one of all, last"):
        replace(SPEC, options={"stages": "first"}).check()
