"""A command imports nothing that it does not use: torch, timm and their kind take seconds each."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tpl
from pictures import photos
from tpl import cli
from tpl import outline as outline_module
from tpl.methods import load_methods
from tpl.methods.bank.protect import PROTECTIONS
from tpl.methods.bank.techniques import TECHNIQUES
from tpl.nets import ENCODERS
from tpl.outline import StandIn, method_outlines, outline
from tpl.scores import SCORES

NOT_TO_TALK = {"torch", "numpy", "PIL", "safetensors.torch"}
NOT_TO_PREDICT = {"torchvision", "sympy", "torch._dynamo", "torch._inductor", "tpl.report", "tpl.bench.run"}
NEVER = {
    "timm",
    "sklearn",
    "scipy",
    "matplotlib",
    "ray",
    "fastapi",
    "uvicorn",
    "onnx",
    "onnxruntime",
    "mlflow",
    "wandb",
}

PROGRAM = """
import json, sys
arguments, unwanted = json.loads(sys.argv[1])
sys.argv = ["tpl", *arguments]
try:
    from tpl.cli import main
    main()
except SystemExit as end:
    assert end.code in (None, 0), end.code
found = [name for name in unwanted if name in sys.modules]
assert not found, found
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the encoder that is in the package."""
    place = tmp_path_factory.mktemp("imports")
    folder = photos(place / "pets", ["cat", "dog"], count=5)
    options = ["--epochs", "1", "--device", "cpu", "--json"]
    done = CliRunner().invoke(cli.app, ["learn", str(place / "model"), str(folder), *options])
    assert done.exit_code == 0, done.output
    return place / "model"


def run(arguments: list[str], unwanted: set[str]) -> str:
    given = json.dumps([arguments, sorted(unwanted)])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


@pytest.mark.parametrize("command", ["--help", "run --help", "list", "describe tpl-plus", "show"])
def test_commands_that_compute_nothing_import_no_torch(command: str, model: Path) -> None:
    arguments = [*command.split(), str(model)] if command == "show" else command.split()
    assert run(arguments, NOT_TO_TALK | NOT_TO_PREDICT | NEVER)


def test_predicting_with_the_encoder_of_the_package_imports_torch_alone(model: Path) -> None:
    others = {f"tpl.methods.{name}" for name in ("foster", "slca", "owm")}
    printed = run(
        ["predict", str(model), str(model.parent / "pets" / "dog"), "--json"], NOT_TO_PREDICT | NEVER | others
    )
    assert {json.loads(line)["class"] for line in printed.splitlines()} <= {"cat", "dog"}


def test_learning_without_training_imports_no_compiler(model: Path, tmp_path: Path) -> None:
    birds, new = photos(tmp_path / "birds", ["hen", "owl"], count=3), ["--encoder", "compact", "--preset", "quick"]
    for folder, options in ((model.parent / "pets", new), (birds, [])):
        assert run(["learn", str(tmp_path / "model"), str(folder), "--json", *options], NOT_TO_PREDICT | NEVER)


def test_a_report_of_runs_without_stored_outputs_imports_no_torch(tmp_path: Path) -> None:
    finished = Path(__file__).parents[2] / "results" / "digits-5t" / "tpl-seed0"
    assert run(["report", str(finished), "--out", str(tmp_path / "report.html")], {"torch", "timm"})
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_package_itself_imports_little() -> None:
    program = "import sys, tpl; assert not {'torch', 'numpy', 'typer'} & set(sys.modules); tpl.TplError, tpl.Answer"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def facts(method: Any) -> dict[str, Any]:
    texts = {name: getattr(method, name) for name in ("name", "summary", "paper", "keeps", "cost", "from_scratch")}
    options = [(f.name, f.default, dict(f.metadata)) for f in dataclasses.fields(method.config_class)]
    return texts | {"doc": sys.modules[method.__module__].__doc__, "options": options}


def test_an_outline_says_what_the_module_says() -> None:
    own = {name: m for name, m in load_methods().items() if m.__module__.startswith("tpl.methods.")}
    assert {n: facts(m) for n, m in method_outlines().items()} == {n: facts(own[n]) for n in sorted(own)}
    for registry, module in (
        (SCORES, outline("tpl.scores").SCORES),
        (TECHNIQUES, outline("tpl.methods.bank.techniques").TECHNIQUES),
        (PROTECTIONS, outline("tpl.methods.bank.protect").PROTECTIONS),
    ):
        assert {n: c.summary for n, c in module.items()} == {n: c.summary for n, c in registry.items()}
    assert outline("tpl.nets.weights").ENCODERS == ENCODERS


def test_an_outline_computes_nothing_and_leaves_the_package_alone() -> None:
    import tpl.methods.tpl as real

    found = outline("tpl.methods.tpl")
    assert isinstance(found.torch, StandIn) and found.TPL is not real.TPL
    assert sys.modules["tpl.methods.tpl"] is real and outline("tpl.methods.tpl") is found
    with pytest.raises(FileNotFoundError):
        outline("tpl.methods.absent")
    with pytest.raises(FileNotFoundError):  # no half-made outline is left behind
        outline("tpl.methods.absent")


def test_a_module_that_computes_at_once_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is read all the same, only later."""
    file = tmp_path / "odd.py"
    file.write_text("import torch\n\nROWS = list(range(int(torch.ones(3).sum())))\nsummary = 'odd'\n", encoding="utf-8")
    place = outline_module._file_of
    monkeypatch.setattr(outline_module, "_file_of", lambda name: file if name == "tpl.odd" else place(name))
    monkeypatch.setattr(tpl, "__path__", [*tpl.__path__, str(tmp_path)])
    found = outline("tpl.odd")
    assert found is sys.modules.pop("tpl.odd") and found.ROWS == [0, 1, 2] and found.summary == "odd"
    with pytest.raises(TypeError):
        list(StandIn())  # type: ignore[call-overload]


def test_outlines_leave_no_stand_in_among_the_filters_of_warnings() -> None:
    """Any later warning would fail there: `torch.compile` gives some."""
    program = (
        "import warnings; from tpl.outline import method_outlines, outline; method_outlines(); "
        "outline('tpl.stream.decoding'); warnings.warn('later'); "
        "assert all(isinstance(entry[2], type) for entry in warnings.filters), warnings.filters"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
