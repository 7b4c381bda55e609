"""Runs side by side: the numbers of runs one by one, in directories of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from small_encoder import SMALL_VIT
from tpl.bench.run import execute, execute_together
from tpl.bench.spec import RunSpec
from tpl.engine import Event, RunLabel
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.bank import BankMethod

OPTIONS = {"latent": 8, "epochs": 1, "memory": 20}
SPEC = RunSpec("digits-5t", encoder=SMALL_VIT, tasks=2, validation=0.5, options=OPTIONS, device="cpu")


def specs(**changes: object) -> list[RunSpec]:
    orders = ("natural", "random:1")
    return [replace(SPEC, order=o, **changes) for o in orders]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    folder, events = tmp_path_factory.mktemp("together"), list[Event]()
    execute_together(specs(), [folder / "0", folder / "1"], callback=events.append)
    return folder, events


def test_runs_side_by_side_give_the_numbers_of_runs_alone(
    side_by_side: tuple[Path, list[Event]], tmp_path: Path
) -> None:
    folder, _ = side_by_side
    for i, spec in enumerate(specs()):
        alone = execute(spec, tmp_path / str(i))
        stages = [json.loads((folder / str(i) / "stages" / f"{t:03d}.json").read_text()) for t in range(2)]
        assert [stage["together"] for stage in stages] == [2, 2]
        for kind in ("cil", "til", "tp"):
            for t, stage in enumerate(stages):
                np.testing.assert_allclose(stage[kind], alone.matrices[kind][t, : t + 1], atol=0.03)
        one, other = (
            Learner.load(path / "model", device="cpu").method.state() for path in (folder / str(i), tmp_path / str(i))
        )
        assert one.shared.keys() == other.shared.keys()
        for part, same in zip((one.shared, *one.tasks), (other.shared, *other.tasks), strict=True):
            for name, tensor in part.items():
                torch.testing.assert_close(tensor, same[name], rtol=1e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_one_listener_hears_all_runs_by_their_labels(side_by_side: tuple[Path, list[Event]]) -> None:
    folder, events = side_by_side
    labels = [RunLabel("natural", 0, 2, together=2), RunLabel("random:1", 1, 2, together=2)]
    assert [(e.run, e.data["directory"]) for e in events if e.kind == "run"] == [
        (label, str(folder / str(number))) for number, label in enumerate(labels)
    ]
    for label in labels:
        assert [e.data["stage"] for e in events if e.kind == "stage" and e.run == label] == [0, 1]
    for i in "01":
        kinds = [json.loads(line)["kind"] for line in (folder / i / "events.jsonl").read_text().splitlines()]
        assert kinds.count("stage") == 2 and kinds.count("trained") == 2


def test_finished_runs_are_read_and_unequal_ones_take_turns(
    side_by_side: tuple[Path, list[Event]], tmp_path: Path
) -> None:
    folder, _ = side_by_side
    longer = replace(SPEC, per_task=(2, 3))
    done, fresh = execute_together([specs()[0], longer], [folder / "0", tmp_path / "longer"], resume=True)
    assert done.summary["together"] == 2 and fresh.summary["together"] == 1


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    mixed, events = [replace(SPEC, options=OPTIONS | {"lr": 1e30}), *specs()], list[Event]()
    places = [tmp_path / name for name in ("bad", "good", "better")]
    with pytest.raises(TplError, match=r"(?s)1 of 3 runs.*bad: .*learning rate.*Finished runs: .*good, .*better"):
        execute_together(mixed, places, callback=events.append)
    for spec, place in zip(specs(), places[1:], strict=True):
        assert execute(spec, place, resume=True).summary["last"] > 0.3  # it is there already
        assert json.loads((place / "stages/001.json").read_text())["together"] == 2  # and shared the second task
    assert not (places[0] / "results.json").exists() and not list((places[0] / "stages").iterdir())
    (told,) = [e for e in events if e.kind == "warning"]
    assert told.run is not None and told.run.number == 0 and "This run ends here" in told.data["text"]


def test_a_run_that_fails_later_keeps_what_it_has_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect is raised as it is, when all other runs are finished; the run can be resumed."""
    learn = BankMethod.training_job

    def broken(method: BankMethod, *given: object) -> object:
        if method.seed == 1 and method.classes_:
            raise ZeroDivisionError("a defect")
        return learn(method, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(BankMethod, "training_job", broken)
    mixed, places = [replace(SPEC, method="row", seed=seed) for seed in (0, 1)], [tmp_path / "good", tmp_path / "bad"]
    with pytest.raises(ZeroDivisionError) as raised:
        execute_together(mixed, places)
    assert str(places[0]) in raised.value.__notes__[0]
    assert (places[0] / "results.json").exists() and not (places[1] / "results.json").exists()
    monkeypatch.undo()
    resumed = execute(mixed[1], places[1], resume=True)
    alone = execute(mixed[1], tmp_path / "alone")
    np.testing.assert_allclose(resumed.matrices["cil"], alone.matrices["cil"], atol=0.03)


def test_methods_on_equal_banks_ask_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BankMethod] = []
    answers = BankMethod.query
    monkeypatch.setattr(BankMethod, "query", lambda self, *given: asked.append(self) or answers(self, *given))
    twins = [SPEC, replace(SPEC, method="row")]
    results = execute_together(twins, [tmp_path / "0", tmp_path / "1"])
    for spec, result in zip(twins, results, strict=True):
        count = len(asked)
        alone = execute(spec, tmp_path / f"{spec.method} alone")
        np.testing.assert_array_equal(result.matrices["cil"], alone.matrices["cil"])
        more = len(asked) - count
        together = sum(type(method) is type(asked[-1]) for method in asked[:count])
        assert together == more if spec.method == "tpl" else together < more


def test_a_run_that_keeps_no_model_has_the_same_numbers(side_by_side: tuple[Path, list[Event]], tmp_path: Path) -> None:
    folder, _ = side_by_side
    found = execute_together(specs(), [tmp_path / "0", tmp_path / "1"], keep_model=False)
    for i, result in enumerate(found):
        assert not (tmp_path / str(i) / "model" / "model.json").exists()
        assert result.summary["last"] == json.loads((folder / str(i) / "results.json").read_text())["summary"]["last"]
