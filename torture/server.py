"""A server that learns while clients ask, and is killed and started again meanwhile.

Well-behaved clients ask all the time; others send nothing, send slowly, send rubbish or far too much. Every answer must
be that of exactly one committed version, and for each client never of an older one than before. The only error of the
server's own is 503 with Retry-After. Every version has more classes than the one before, so the number of classes in an
answer names it; its probabilities must be those of the stored model.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torture.small_models import ROOT, kill
from torture.tally import Tally
from tpl import Learner

TOKEN = "a-token-for-the-torture"
CLOSE = 0.002  # a batch of another size rounds differently
ROUNDS = 100  # tasks sent, at most


def png(pixels: Any) -> bytes:
    """An image as a file."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(buffer, format="PNG")
    return buffer.getvalue()


def form(name: str, content: bytes) -> tuple[bytes, dict[str, str]]:
    """A form with one file, and the headers that go with it."""
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'.encode()
    headers = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": f"Bearer {TOKEN}"}
    return head + content + b"\r\n--b--\r\n", headers


class Server:
    """`tpl serve` in a process of its own, which can be killed and started again at the same port."""

    def __init__(self, model: Path, log: Path) -> None:
        self.model, self.log, self.port = model, log, 0
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """Start, and wait until it answers."""
        with socket.create_server(("127.0.0.1", self.port)) as free:
            self.port = free.getsockname()[1]
        environment = os.environ | {"TPL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
        command = [sys.executable, "-m", "tpl", "serve", str(self.model), "--port", str(self.port), "--device", "cpu"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--epochs", "1", "--json"], stdout=log, stderr=log, env=environment
            )
        self.starts += 1
        for _ in range(600):
            with suppress(OSError):
                if self.ask("GET", "/health")[0] == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server does not start: {self.log.read_text(errors='replace')[-2000:]}")

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Status, content and headers of an answer; OSError if the server is gone."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        return answer.status, json.loads(content) if content[:1] in b"{[" else content, answer.headers

    def kill(self) -> None:
        """End it at once, without its knowing."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def memory(self) -> float:
        """MiB in use."""
        assert self.process is not None
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
            return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
        return 0.0


class Client(threading.Thread):
    """Asks about one image again and again."""

    def __init__(self, server: Server, probe: bytes, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.stop = server, stop
        self.body, self.headers = form("files", probe)
        self.answers: list[dict[str, Any]] = []
        self.others: list[str] = []
        self.slowest = 0.0  # seconds

    def run(self) -> None:
        """Ask until told to stop."""
        while not self.stop.is_set():
            asked = time.monotonic()
            try:
                status, content, headers = self.server.ask("POST", "/predict?top=1000", self.body, self.headers)
            except OSError:
                self.others.append("no connection")  # the server was killed
                time.sleep(0.2)
                continue
            self.slowest = max(self.slowest, time.monotonic() - asked)
            time.sleep(0.05)
            if status == 200:
                self.answers.append(content["answers"][0])
            else:
                self.others.append("503" if status == 503 and headers["Retry-After"] else f"status {status}: {content}")


class Nuisance(threading.Thread):
    """Sends what no client should."""

    def __init__(self, server: Server, seed: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.draw, self.stop = server, random.Random(seed), stop
        self.sent = 0

    def run(self) -> None:
        """Disturb until told to stop."""
        held: list[socket.socket] = []
        while not self.stop.is_set():
            with suppress(OSError):
                client = socket.create_connection(("127.0.0.1", self.server.port), timeout=5)
                start = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=b\r\n"
                client.sendall(
                    self.draw.choice(
                        (
                            b"",
                            b"GET /model",
                            bytes(self.draw.randrange(256) for _ in range(50)),
                            start + b"Content-Length: 99999999999\r\n\r\n",
                            start + b"Content-Length: 1000000\r\n\r\n--b\r\n",
                            b"GET /model?pictures=true HTTP/1.1\r\nHost: a\r\n\r\n" * 50,
                        )
                    )
                )
                held.append(client)
                self.sent += 1
            while len(held) > 40:
                held.pop(self.draw.randrange(len(held))).close()
            time.sleep(0.02)
        for client in held:
            client.close()


def run(seed: int, cases: int, place: Path, seconds: float = 60.0, clients: int = 8) -> Tally:
    """Serve, learn, kill and ask for some seconds; `cases` is not used: each answer is one.

    In the last third the server itself is not killed, only those who learn, and in the last sixth nobody learns: its
    memory is measured over these times.
    """
    tally, draw = Tally("a server that learns", seed), random.Random(seed)
    images = kill._digits()
    model, probe = place / "model", images[0][0]
    learner = Learner(latent=8, epochs=1, memory=16, batch_size=8, device="cpu")
    learner.learn(images[0] + images[1], ["zero"] * 6 + ["one"] * 6).save(model)
    server, stop = Server(model, place / "log"), threading.Event()
    server.start()
    versions, slope, rest = {2: Path(shutil.copytree(model, place / "version-2"))}, [], []
    askers = [Client(server, png(probe), stop) for _ in range(clients)]
    nuisances = [Nuisance(server, f"{seed} {n}", stop) for n in range(2)]
    began, rounds, kills = time.monotonic(), 0, 0
    for thread in (*askers, *nuisances):
        thread.start()
    try:
        while (now := time.monotonic() - began) < seconds * 5 / 6:
            rounds += 1
            slope += [(now, server.memory(), server.starts)]
            begun = time.monotonic()
            classes = {f"r{rounds}a": images[2 + rounds % 4], f"r{rounds}b": images[3 + rounds % 4]}
            fate = ("finish", "kill server", "finish", "kill worker")[rounds % 4 - 1]
            steady = begun - began > seconds * 2 / 3
            kills += _learn(server, classes, "kill worker" if steady and fate == "kill server" else fate, draw)
            _keep_version(model, place, versions)
            time.sleep(max(0.0, seconds / ROUNDS - (time.monotonic() - begun)))
        while (now := time.monotonic() - began) < seconds:
            rest += [(now, server.memory())]
            time.sleep(1)
    finally:
        stop.set()
        for thread in (*askers, *nuisances):
            thread.join(70)
        server.kill()
    _judge(tally, askers, versions, probe)
    tally.notes |= {"clients": clients, "versions": len(versions), "kills": kills}
    tally.notes |= {"bad requests": sum(n.sent for n in nuisances), "starts": server.starts}
    tally.notes["slowest answer in s"] = round(max(asker.slowest for asker in askers), 1)
    tally.notes["bytes of log"] = server.log.stat().st_size
    same = [(at, mib) for at, mib, starts in slope if starts == server.starts]
    for when, measured in (("learning", same), ("at rest", rest)):
        if len(measured) > 2:
            times, sizes = (np.array(column) for column in zip(*measured, strict=True))
            rate = float(np.polyfit(times, sizes, 1)[0]) * 60
            text = f"{sizes[0]:.0f} to {sizes[-1]:.0f} MiB in {(times[-1] - times[0]) / 60:.1f} min, {rate:+.2f} a min"
            tally.notes[f"memory {when}"] = text
    return tally


def _learn(server: Server, classes: dict[str, Any], fate: str, draw: random.Random) -> int:
    """Send a task; let it be learned, or kill the server or the worker on the way. Returns the number of kills."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, pictures in classes.items():
            for number, pixels in enumerate(pictures):
                archive.writestr(f"{name}/{number}.png", png(pixels))
    body, headers = form("file", buffer.getvalue())
    try:
        status, job, _ = server.ask("POST", "/tasks", body, headers)
    except OSError:
        return 0
    if status != 202:
        return 0
    if fate != "finish":
        time.sleep(draw.random() * 8)
        if fate == "kill server":
            server.kill()
            server.start()
        else:
            for worker in _children(server):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        return 1
    for _ in range(600):
        with suppress(OSError):
            if server.ask("GET", f"/tasks/{job['id']}")[1].get("state") in ("done", "failed"):
                break
        time.sleep(0.1)
    return 0


def _children(server: Server) -> list[int]:
    assert server.process is not None
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            text = status.read_text(encoding="ascii", errors="replace")
            if f"PPid:\t{server.process.pid}\n" in text:
                found.append(int(status.parent.name))
    return found


def _keep_version(model: Path, place: Path, versions: dict[int, Path]) -> None:
    """Copy the committed model, if it is new. Nobody writes now, unless a killed server's worker still ends."""
    count = len(Learner.load(model, device="cpu").classes_)
    if count not in versions:
        versions[count] = Path(shutil.copytree(model, place / f"version-{count}"))


def _judge(tally: Tally, clients: list[Client], versions: dict[int, Path], probe: Any) -> None:
    wanted = {}
    for count, path in versions.items():
        learner = Learner.load(path, device="cpu")
        wanted[count] = dict(zip(learner.classes_, learner.predict_proba([probe])[0].tolist(), strict=True))
    for client in clients:
        last = 0
        for answer in client.answers:
            found = {entry["class"]: entry["probability"] for entry in answer["top"]}
            right = wanted.get(len(found))
            if right is None or found.keys() != right.keys():
                tally.fail(f"an answer with {len(found)} classes is of no version")
            elif any(abs(found[name] - right[name]) > CLOSE for name in right):
                tally.fail(f"an answer with {len(found)} classes has other probabilities than that version")
            elif len(found) < last:
                tally.fail(f"an answer with {len(found)} classes after one with {last}")
            else:
                tally.counts["answers of one version"] += 1
            last = max(last, len(found))
        for other in client.others:
            if other.startswith("status"):
                tally.fail(other)
            else:
                tally.counts[other] += 1
