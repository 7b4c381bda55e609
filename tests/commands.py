"""Commands of the command line, called in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from tpl import TplError, cli


def call(*arguments: str | Path) -> Result:
    """The result of a command, whatever it is."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def ask(*arguments: str | Path) -> Any:
    """What a command that succeeds prints with --json."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    """The message of a command that is refused."""
    result = call(*arguments)
    assert isinstance(result.exception, TplError), (result.output, result.exception)
    return str(result.exception)
