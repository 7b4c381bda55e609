"""The command line: what it prints, and that every mistake ends in one line that says what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import typer.main
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

from small_encoder import SMALL_VIT
from tpl import TplError, __version__, cli
from tpl.bench import demo
from tpl.bench.ablate import VARIANTS
from tpl.bench.results import RunResult
from tpl.bench.spec import RunSpec
from tpl.engine import Callback, Event
from tpl.methods import load_methods
from tpl.scores import DETECTORS

TINY = ["--encoder", SMALL_VIT, "--tasks", "2", "--epochs", "1", "--set", "latent=8", "--device", "cpu"]


def call(*arguments: str | Path) -> Result:
    """One command in this process; a TplError comes out as it is, for `main` to print."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=True)


def ask(*arguments: str | Path) -> Any:
    """The JSON that a command prints, which must be all it prints."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def joint_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cli") / "joint"
    result = call("run", "digits-5t", "--method", "joint", *TINY, "--out", place)
    assert result.exit_code == 0, result.output
    assert "joint" in result.stdout and str(place) in result.stdout.replace("\n", "")
    return place


@pytest.fixture(scope="module")
def tiny(joint_run: Path) -> tuple[Path, Result]:
    place = joint_run.parent / "tpl"
    result = call("run", "digits-5t", *TINY, "--memory", "20", "--out", place, "--against", joint_run, "--json")
    assert result.exit_code == 0, result.output
    return place, result


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `tpl ARGUMENTS` through `main` and gives the one line it ends with."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["tpl", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        assert end.value.code == 2
        assert captured.out == ""
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.fixture
def fail_run(fail: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """A run on the digits that cannot start: nothing is left that looks like a run."""

    def run(*arguments: str | Path) -> str:
        message = fail("run", "digits-5t", "--device", "cpu", "--out", tmp_path / "run", *arguments)
        assert not (tmp_path / "run" / "run.json").exists()
        return message

    return run


# What there is


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize("command", ["", "demo", "run", "list", "describe", "report", "ablate", "reproduce"])
def test_every_command_has_help(command: str) -> None:
    result = call(*command.split(), "-h")
    assert result.exit_code == 0 and "Usage" in result.stdout
    assert not command or "Example" in result.stdout


def test_long_lists_of_options_are_in_panels() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        options = [p for p in command.params if p.param_type_name == "option"]
        unsorted = [p.name for p in options if getattr(p, "rich_help_panel", None) is None]
        assert len(unsorted) <= 8, (name, unsorted)
    text = call("run", "-h").stdout
    assert [word in text for word in ("Data", "Training", "Output", "Advanced")] == [True] * 4


def test_list_names_everything_with_a_summary() -> None:
    listed = ask("list")
    assert list(listed) == ["methods", "benchmarks", "encoders", "scores", "techniques", "protections"]
    for entries in listed.values():
        assert all(set(entry) == {"name", "summary"} and entry["name"] and entry["summary"] for entry in entries)
    names = {key: {entry["name"] for entry in entries} for key, entries in listed.items()}
    assert names["methods"] >= {"finetune", "tpl", "joint", "hat", "supsup", "more", "row"}
    assert "digits-5t" in names["benchmarks"]
    assert "compact" in names["encoders"]
    assert names["scores"] >= {"tpl", "md", *DETECTORS} and len(DETECTORS) == 12
    assert names["techniques"] >= {"logitnorm", "mcdropout", "mixup", "cutmix", "oe", "mixoe", "cmg", "vos"}
    assert names["protections"] == {"hat", "supsup"}
    text = call("list").stdout
    assert all(name in text for group in names.values() for name in group)


@pytest.mark.parametrize("method", sorted(load_methods()))
def test_describe_explains_every_option(method: str) -> None:
    about = ask("describe", method)
    assert about["name"] == method and all(about[key].strip() for key in ("summary", "keeps", "cost"))
    options = {option["name"]: option for option in about["options"]}
    assert set(options) == {field.name for field in dataclasses.fields(load_methods()[method].config_class)}
    for option in options.values():
        assert set(option) == {"name", "default", "choices", "help", "group"}
        assert option["help"].strip() and option["group"].strip()
        assert not option["choices"] or option["default"] in option["choices"]
    text = call("describe", method).stdout
    explained = sys.modules[load_methods()[method].__module__].__doc__ or ""
    assert text.count("[") >= explained.count("[")  # brackets are the formulas' own, not markup
    assert all(text_of in text for option in options.values() for text_of in (option["name"], option["group"]))
    assert about["from_scratch"] == ("from scratch" in text.split("Options")[0]) == load_methods()[method].from_scratch


# Runs


def test_run_prints_one_json_object(tiny: tuple[Path, Result], joint_run: Path) -> None:
    place, result = tiny
    answer = json.loads(result.stdout)
    assert all(line.startswith("[00:") for line in result.stderr.splitlines())  # no terminal: lines of progress
    assert answer["directory"] == str(place)
    for key in ("last", "aia", "til", "tp"):
        assert 0 <= answer[key] <= 1
    assert answer["seconds"] > 0
    run, joint = RunResult.read(place), RunResult.read(joint_run)
    assert answer.pop("bound") == "joint, 1 epoch, not a bound"
    assert answer == {"directory": str(place), "method": "tpl", "order": "natural"} | run.summary | run.against(joint)
    assert run.description["options"]["memory"] == 20
    assert run.description["options"]["latent"] == 8


def test_a_run_is_compared_with_a_bound_over_other_tasks(joint_run: Path, tmp_path: Path) -> None:
    single = [text if text != "2" else "4" for text in TINY] + ["--per-task", "1", "--out", tmp_path / "run"]
    answer = ask("run", "digits-5t", *single, "--against", joint_run)
    lost = RunResult.read(joint_run).summary["last"] - answer["last"]
    assert answer["forgetting_last"] == pytest.approx(lost) and answer["forgetting_aia"] is None
    assert answer["bound"] == "joint, 1 epoch, run over other tasks, not a bound"
    table = call("run", "digits-5t", *single, "--against", joint_run, "--resume").stdout
    (shown,) = [line for line in table.splitlines() if line.startswith("joint")]
    assert f"{100 * RunResult.read(joint_run).summary['last']:.2f}" in shown
    assert len(re.findall(r"\d+\.\d+", shown)) == 1  # nothing that depends on its tasks


def test_a_second_run_in_the_same_place_needs_resume(tiny: tuple[Path, Result], fail: Callable[..., str]) -> None:
    place, first = tiny
    same = ["run", "digits-5t", *TINY, "--memory", "20", "--out", place]
    assert "--resume" in fail(*same)
    assert json.loads(first.stdout).items() >= ask(*same, "--resume").items()
    assert "options" in fail(*same, "--resume", "--set", "k=3")


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tpl.bench.run.execute_together", interrupt)
    result = call("run", "digits-5t", "--out", tmp_path / "here")
    assert result.exit_code == 130
    assert "--resume" in result.stderr and result.stdout == ""


def test_only_bounds_are_compared_with(tiny: tuple[Path, Result], tmp_path: Path, fail: Callable[..., str]) -> None:
    said = fail("run", "digits-5t", *TINY, "--out", tmp_path / "run", "--against", tiny[0])
    assert "is a run of tpl; --against takes runs of joint or joint-ridge" in said
    assert not (tmp_path / "run").exists()


def test_a_run_says_first_what_its_benchmark_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(specs: list[RunSpec], places: list[Path], resume: bool, callback: Callback, *_: object) -> None:
        for _spec in specs:
            callback(Event("run", {"images": [1], "learned": 0, "method": "one of them"}))
        raise TplError("no more is run")

    monkeypatch.setattr("tpl.bench.run.execute_together", execute)
    arguments = ["run", "digits-5t", "--method", "tpl,joint", "--order", "natural,random:1", "--epochs", "2"]
    assert call(*arguments, "--out", tmp_path).stderr.splitlines() == [
        "digits-5t with compact sets for tpl: latent=32, lr=0.05, memory=200, batch_size=16 (change with --set)",
        "digits-5t with compact sets for joint: latent=32, lr=0.05, batch_size=16, schedule=cosine (change with --set)",
    ]
    assert call(*arguments, "--out", tmp_path, "--json").stderr == ""


def test_report_puts_runs_on_a_page(tiny: tuple[Path, Result], joint_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    answer = ask("report", tiny[0], joint_run, "--out", page, "--title", "Two runs")
    assert answer["report"] == str(page)
    assert [row["name"] for row in answer["runs"]] == ["tpl", "joint"]
    assert answer["runs"][0]["forgetting_last"] is not None
    html = page.read_text(encoding="utf-8")
    assert html.lstrip().lower().startswith("<!doctype html>") and "Two runs" in html
    shown = call("report", tiny[0], joint_run, "--out", page)
    assert shown.exit_code == 0 and "joint" in shown.stdout


def test_report_keeps_two_runs_of_one_method_apart(tiny: tuple[Path, Result], tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for name in ("run.json", "results.json"):
        (again / name).write_bytes((tiny[0] / name).read_bytes())
    answer = ask("report", tiny[0], tiny[0], again, "--out", tmp_path / "page.html")  # named twice, it counts once
    assert [row["name"] for row in answer["runs"]] == [f"tpl ({tiny[0].parent})", f"tpl ({tmp_path})"]


def test_report_needs_finished_runs(fail: Callable[..., str], tmp_path: Path) -> None:
    assert "holds no finished run" in fail("report", tmp_path / "absent")


def test_ablate_lists_the_variants(tiny: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    place, result = tiny
    answer = ask("ablate", place, "--device", "cpu")
    rows = {row["variant"]: row for row in answer["variants"]}
    assert answer["run"] == str(place) and list(rows) == list(VARIANTS)
    assert all(0 <= row[key] <= 1 for row in rows.values() for key in ("last", "tp", "auroc"))
    measured = json.loads(result.stdout)
    assert rows["as trained"]["last"] == pytest.approx(measured["last"])
    assert rows["as trained"]["tp"] == pytest.approx(measured["tp"])
    assert rows["as trained"]["auroc"] == pytest.approx(measured["detection"]["auroc_pooled"])
    monkeypatch.setattr("tpl.bench.ablate.ablate", lambda *_: answer["variants"])
    text = call("ablate", place).stdout
    assert all(name.split(",")[0] in text for name in VARIANTS)


def test_ablate_measures_the_groups_it_is_asked_for(tiny: tuple[Path, Result], fail: Callable[..., str]) -> None:
    answer = ask("ablate", tiny[0], "--device", "cpu", "--only", "k, memory")
    assert {row["group"] for row in answer["variants"]} == {"", "k", "memory"}
    assert "no group of variants 'nonsense'" in fail("ablate", tiny[0], "--only", "nonsense")


def test_ablate_wants_a_run_of_tpl(joint_run: Path, fail: Callable[..., str]) -> None:
    assert "only tpl and tpl-plus have a score" in fail("ablate", joint_run)


def test_demo_shows_three_methods(
    tiny: tuple[Path, Result], joint_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo around its runs; the runs themselves are those at hand."""
    started: list[tuple[str, bool]] = []

    def execute(spec: RunSpec, place: Path, resume: bool, callback: Callable[[Event], None]) -> RunResult:
        started.append((spec.method, (place / "run.json").exists()))
        found = RunResult.read(joint_run if spec.method == "joint" else tiny[0])
        place.mkdir(parents=True, exist_ok=True)
        (place / "run.json").write_text("{}")
        return replace(found, description=found.description | {"method": spec.method})

    monkeypatch.setattr(demo, "execute", execute)
    answer = ask("demo", "--out", tmp_path)
    assert list(answer["methods"]) == ["finetune", "tpl", "joint"]
    for row in answer["methods"].values():
        assert set(row) == {"last", "aia", "til", "tp", "forgetting_last", "forgetting_aia", "seconds"}
    assert Path(answer["report"]).is_file()
    assert "upper" in call("demo", "--out", tmp_path).stdout
    assert call("demo", "--out", tmp_path, "--resume").exit_code == 0
    fresh, kept = [(m, False) for m in demo.METHODS], [(m, True) for m in demo.METHODS]
    assert started == fresh + fresh + kept  # a demo starts anew unless it is to be resumed


# Mistakes


def test_unknown_names_list_the_known_ones(fail: Callable[..., str], fail_run: Callable[..., str]) -> None:
    assert "eeil, finetune, foster" in fail_run("--method", "nonsense")
    assert "eeil, finetune, foster" in fail("describe", "nonsense")
    assert "digits-5t" in fail("run", "nonsense")
    message = fail_run("--encoder", "vit_nonsense")
    assert "'vit_nonsense'" in message and "compact" in message
    message = fail_run("--set", "nonsense=1")
    assert "'nonsense'" in message and "epochs" in message and "memory" in message
    assert "compose must be one of" in fail_run("--set", "compose=nonsense")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--set", "epochs"], "--set takes NAME=VALUE; got 'epochs'"),
        (["--set", "epochs=many"], "epochs must be a int; got 'many'"),
        (["--epochs", "0"], "epochs must be at least 1; got 0"),
        (["--lr", "0"], "lr must be above 0"),
        (["--memory", "-1"], "memory must be at least 0"),
        (["--device", "abacus"], "Device 'abacus' cannot be used here"),
        (["--precision", "fp8"], "Precision must be one of auto, fp32, bf16"),
        (["--order", "[bold]"], '"natural", "random:SEED" or "FILE.json:ID"'),
        (["--order", "random:x"], "must be a whole number"),
        (["--order", "absent.json:1"], "there is no class-order file absent.json"),
        (["--tasks", "0"], "digits-5t has 5 tasks; --tasks must lie between 1 and that"),
        (["--tasks", "6"], "digits-5t has 5 tasks"),
        (["--validation", "1.5"], "the validation fraction must lie between 0 and 1"),
        (["--weights", "absent.safetensors"], "There is no weight file absent.safetensors"),
        (["--against", "absent"], "absent holds no finished run"),
        (["--set", "[/]=1"], "There is no option '[/]' here"),
    ],
)
def test_a_bad_value_is_answered_by_what_would_do(
    arguments: list[str], text: str, fail_run: Callable[..., str]
) -> None:
    assert text in fail_run(*arguments)


def test_a_data_set_that_is_not_there_says_where_it_may_come_from(fail: Callable[..., str], tmp_path: Path) -> None:
    message = fail("run", "c100-10t", "--data", tmp_path / "absent", "--out", tmp_path / "run")
    assert "--data" in message and "--download" in message


class MakesFolder:
    """Asks the unpickler to make a folder: a stand-in for anything worse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_pickled_weights_are_refused_and_not_executed(fail_run: Callable[..., str], tmp_path: Path) -> None:
    file, folder = tmp_path / "weights.pth", tmp_path / "executed"
    torch.save(MakesFolder(folder), file)
    message = fail_run("--weights", file)
    assert "was not loaded; save it as safetensors" in message
    assert not folder.exists()


def test_weights_of_another_encoder_are_refused(fail_run: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"layer.weight": torch.zeros(2)}, file)
    assert "does not hold the weights of 'compact'" in fail_run("--weights", file)


def test_without_network_both_ways_out_are_named(fail_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: Any) -> Any:
        if pretrained:
            raise OSError("network unreachable")
        return create(name, pretrained=pretrained, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    message = fail_run("--encoder", "vit_tiny_patch16_224")
    assert "--weights" in message and "network" in message and "--encoder compact" in message


def test_a_mistake_is_a_tpl_error_below_main() -> None:
    assert isinstance(call("run", "nonsense").exception, TplError)


def test_the_program_ends_with_code_2_and_one_line() -> None:
    command = [sys.executable, "-m", "tpl", "reproduce", "[bold]"]  # a mistake that is found without torch
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and "'[bold]'" in done.stderr and "--list" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
