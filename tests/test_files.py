"""Files replaced in one step, and their sha256."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tpl.files import partial_path, replace_atomically, sha256_of


@pytest.mark.parametrize("data", ["grün\nand\r\nmore", b"\x00\xff", "", b""], ids=repr)
def test_a_file_holds_exactly_what_was_given(data: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("old and longer than what comes")
    replace_atomically(path, data)
    expected = data.encode() if isinstance(data, str) else data
    assert path.read_bytes() == expected
    assert sha256_of(path) == hashlib.sha256(expected).hexdigest()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("no luck")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="no luck"):
            replace_atomically(path, "new")
    assert path.read_text() == "old"
    replace_atomically(path, "new")
    assert path.read_text() == "new" and not partial_path(path).exists()
