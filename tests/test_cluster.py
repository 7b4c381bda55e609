"""What a cluster needs before there is one: shares of machines, directories that travel, addresses that answer."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tpl import TplError
from tpl.bench.engines import create_engine
from tpl.cluster import ChangedFiles, Machine, Payload, Share, pack, share_out, unpack


@pytest.mark.parametrize(
    ("machines", "device", "jobs", "workers", "gpu_share", "share", "fits"),
    [
        ([Machine(4, 0)], "auto", 100, None, None, Share(1, 0, 1), 4),
        ([Machine(4, 0)], "auto", 2, None, None, Share(2, 0, 2), 2),
        ([Machine(64, 0), Machine(32, 0)], "cpu", 100, None, None, Share(5, 0, 5), 18),  # eight each, or more
        ([Machine(4, 0), Machine(12, 0)], "auto", 100, 2, None, Share(6, 0, 6), 2),  # both on the large one
        ([Machine(2, 0)], "auto", 9, 50, None, Share(1, 0, 1), 2),
        ([Machine(16, 2), Machine(8, 0)], "auto", 100, None, None, Share(0, 1, 8), 2),
        ([Machine(16, 2), Machine(8, 0)], "cuda", 100, None, 0.5, Share(0, 0.5, 4), 4),
        ([Machine(16, 2), Machine(2, 1)], "auto", 100, None, 1 / 3, Share(0, 1 / 3, 1), 9),
        ([Machine(16, 2)], "cpu", 100, None, None, Share(2, 0, 2), 8),
    ],
)
def test_machines_are_shared_out(
    machines: list[Machine],
    device: str,
    jobs: int,
    workers: int | None,
    gpu_share: float | None,
    share: Share,
    fits: int,
) -> None:
    found = share_out(machines, device, jobs, workers, gpu_share)
    assert found == share and found.fits(machines) == fits


@pytest.mark.parametrize(
    ("machines", "device", "gpu_share", "message"),
    [
        ([Machine(4, 0)], "cuda", None, "no machine of the cluster has a GPU"),
        ([Machine(4, 0)], "auto", 0.5, "no machine of the cluster has a GPU"),
        ([Machine(4, 1)], "cpu", 0.5, "--device cpu was given"),
        ([Machine(4, 1)], "auto", 0.0, "above 0 and at most 1"),
        ([Machine(4, 1)], "cuda:1", None, "auto, cpu or cuda; got 'cuda:1'"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    machines: list[Machine], device: str, gpu_share: float, message: str
) -> None:
    with pytest.raises(TplError, match=message):
        share_out(machines, device, 8, None, gpu_share)


def test_a_directory_travels_by_what_changed(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    unpack(Payload({"log": b"1\n", "model/tasks/000/a": b"old", "model/model.json": b"{}"}), here)
    (here / "model" / ".lock.json").write_text("mine")
    (here / "model" / "tasks" / ".001.partial").mkdir()
    (here / "model" / "tasks" / ".001.partial" / "b").write_text("half")
    whole = pack(here)
    assert set(whole.files) == {"log", "model/tasks/000/a", "model/model.json"}  # neither locks nor halves
    unpack(whole, there)
    changed = ChangedFiles(here)
    assert changed.take() == Payload()
    (here / "log").write_text("1\n2\n")
    (here / "model" / "tasks" / "001").mkdir()
    (here / "model" / "tasks" / "001" / "b").write_text("new")
    (here / "model" / "tasks" / "000" / "a").unlink()
    first = changed.take(only=["log"])
    assert first == Payload({"log": b"1\n2\n"})
    second = changed.take()
    assert second == Payload({"model/tasks/001/b": b"new"}, ("model/tasks/000/a",))
    for payload in (first, second):
        unpack(payload, there)
    assert pack(there) == pack(here) and not (there / "model" / "tasks" / "000").exists()


def test_what_tells_of_other_files_is_written_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["model/model.json", "results.json", "stages/000.json", "a"]
    order: list[str] = []
    replace = Path.replace

    def note(file: Path, target: Path) -> Path:
        order.append(target.relative_to(tmp_path).as_posix())
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", note)
    unpack(Payload(dict.fromkeys(names, b"")), tmp_path, last=["model/model.json", "results.json"])
    assert set(order[:2]) == {"stages/000.json", "a"} and order[2:] == ["model/model.json", "results.json"]


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TplError, match=r"pip install 'tpl-cil\[ray\]'"):
        create_engine("ray", "cpu", None)


def test_addresses_that_lead_nowhere_are_named_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # not listening
        closed = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(TplError, match=f"Ray cluster {closed} does not answer .*ray start --address"):
            create_engine("ray", "cpu", None, address=closed)
    for address, message in (("ray://head:10001", "Ray's client"), ("head", "HOST:PORT"), ("head:x", "HOST:PORT")):
        with pytest.raises(TplError, match=message):
            create_engine("ray", "cpu", None, address=address)
    with pytest.raises(TplError, match="above 0 and at most 1"):
        create_engine("ray", "auto", None, address="head:1", gpu_share=2.0)
    with pytest.raises(TplError, match="--gpu-share is not for --engine local"):
        create_engine("local", "cpu", None, gpu_share=0.5)
