"""The file that `tpl predict --out` writes: a line an image, and a second call goes on after the last one.

FILE            one JSON object a line, in the order of the images
FILE.job.json   what they were made with: a file of another model or other options is not gone on with
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.stream import Found


class AnswerFile:
    """Answers that are kept: `earlier` of them, `failed` of which are errors, by calls before this one."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path, self.job = path, job
        self.job_file = path.with_name(path.name + ".job.json")
        self.earlier = self.failed = 0
        self.stream: BinaryIO

    @contextmanager
    def open(self) -> Iterator[AnswerFile]:
        """Hold the file for writing; a second writer is refused."""
        from filelock import FileLock, Timeout

        file = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file, timeout=0):
                self._check()
                with self.path.open("ab+") as self.stream:
                    yield self
                file.unlink(missing_ok=True)
        except Timeout:
            raise TplError(f"{self.path} is being written by another process; wait for it to finish.") from None
        except OSError as error:
            raise TplError(f"{self.path} cannot be written: {error}.") from error

    def _check(self) -> None:
        if not self.path.exists() or not self.path.stat().st_size:
            self.job_file.write_text(json.dumps(self.job, indent=2) + "\n", encoding="utf-8")
            return
        other = f"choose another --out, or remove {self.path}."
        try:
            before = json.loads(self.job_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise TplError(f"{self.path} is there, and nothing says what it was made with; {other}") from None
        differing = [name for name in self.job if before.get(name) != self.job[name]]
        if differing:
            raise TplError(f"{self.path} was made with another {', '.join(differing)}; {other}")

    def rest(self, found: Iterator[Found]) -> Iterator[Found]:
        """The images that have no line yet. Those that have must be the same, in the same order."""
        self.stream.seek(0)
        end = 0
        for number, line in enumerate(self.stream, start=1):
            if not line.endswith(b"\n"):
                break  # cut off in the middle: written anew
            item = next(found, None)
            try:
                content = json.loads(line)
                path = content["path"]
            except (ValueError, KeyError, TypeError):
                path = None
            if item is None or path != item.name:
                raise TplError(
                    f"{self.path} was made from other images: line {number} is of {path}, and now that one would be "
                    f"{item.name if item else 'too many'}; choose another --out, or remove {self.path}."
                )
            end += len(line)
            self.earlier, self.failed = number, self.failed + ("error" in content)
        self.stream.truncate(end)
        yield from found

    def write(self, text: str) -> None:
        """Add lines."""
        self.stream.write(text.encode("utf-8"))
        self.stream.flush()
