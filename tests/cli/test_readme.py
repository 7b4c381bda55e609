"""The README and other pages promise commands, options, targets, files and numbers: all exist, and its code runs."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from pictures import photos
from tpl.bench.results import RunResult
from tpl.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALL_COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
RUNS = ROOT / "results" / "c100"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def text_of(page: Path) -> str:
    """A page of Markdown, or the cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def check_command(line: str) -> None:
    """The command exists, and has the options that a page gives it."""
    _, name, *words = line.split()
    command = COMMANDS.get(name)
    assert command is not None or name.startswith("-"), line
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    parameters = getattr(command, "params", ())
    known = {option for parameter in parameters for option in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}
    given = {word.split("=")[0].rstrip(",;.)") for word in words if word.startswith("--")}
    assert given <= known, (line, given - known)


def test_every_command_and_option_on_any_page_exists() -> None:
    found = 0
    for pattern in ("*.md", "docs/*.md", "*/README.md", "notebooks/*.ipynb"):
        for page in ROOT.glob(pattern):
            text = text_of(page).replace("\\\n", " ")
            lines = re.findall(r"`(tpl [^`]+)`", text) + re.findall(r"^\$? ?!?(tpl [^#\n]+)", text, flags=re.MULTILINE)
            found += len(lines)
            for line in lines:
                check_command(line)
    assert found > 200
    with pytest.raises(AssertionError):
        check_command("tpl learn model photos --no-such-option")


def test_the_page_of_commands_has_them_all() -> None:
    assert set(COMMANDS) <= set(re.findall(r"`tpl ([\w-]+)", ALL_COMMANDS))


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_link_leads_somewhere() -> None:
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        for link in re.findall(r"\]\((?!https:)([^)#]+)", page):
            assert (ROOT / link).exists(), link


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in README


def last(name: str, orders: tuple[str, ...] = ("natural", "random-1", "random-2")) -> float:
    """The mean of Last over runs on C100-10T with ViT-tiny, in percent."""
    runs = [RunResult.read(RUNS / f"c100-10t-vit-tiny-{name}-{order}") for order in orders]
    return 100 * statistics.mean(run.summary["last"] for run in runs)


def test_the_first_sentence_says_what_the_runs_say() -> None:
    sentence = README.split("\n\n")[1].replace("\n", " ")
    assert f"**{last('tpl-plus-grown'):.1f} %**" in sentence
    assert f"{last('joint'):.1f} to {last('joint-ridge'):.1f} %" in sentence
    assert f"fine-tuning ends at {last('finetune', ('natural',)):.1f} %" in sentence


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders and the photo that the code of the README is about."""
    photos(tmp_path / "photos", ["cat", "dog"], suffix="jpg")
    photos(tmp_path / "birds", ["hen", "owl"], suffix="jpg")
    (photos(tmp_path / "new", ["cat"], count=1, seed=3, suffix="jpg") / "cat" / "0.jpg").rename(tmp_path / "new.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(language: str) -> str:
    """The first code of a language in the README."""
    return README.partition(f"```{language}\n")[2].partition("```")[0]


def test_the_python_of_the_readme_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python")
    assert len([line for line in code.splitlines() if line]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    assert re.match(r"\['(cat|dog|hen|owl)'\] \[0\.\d+\]", capsys.readouterr().out) and (home / "model").is_dir()


def test_the_commands_of_the_readme_run(home: Path) -> None:
    lines = [shlex.split(line, comments=True) for line in block("bash").splitlines()]
    assert [words[1] for words in lines] == ["learn", "learn", "predict", "serve"]
    for _, *words in lines[:-1]:  # tests/serve are about the last one
        fast = ["--epochs", "2", "--device", "cpu"] if words[0] == "learn" else []
        done = CliRunner().invoke(app, [*words, *fast])
        assert done.exit_code == 0, (words, done.output)
    assert done.stdout.startswith("new.jpg: ")
