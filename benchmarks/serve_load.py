"""How many requests a second does `tpl serve` answer, and are all answers right?

    python benchmarks/serve_load.py                      # 50 clients for 60 s
    python benchmarks/serve_load.py --clients 8 --seconds 10
    python benchmarks/serve_load.py --clients 1 --learning     # while it learns four more classes

Teaches a small model of digits, starts `tpl serve` on it as a process of its own, and lets clients, each with a
connection kept open, send single images one after the other. Every answer is compared with what the model says in
Python: the class must be the same, the probability to 0.0001. Prints one JSON object; exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from tpl import Learner
from tpl.stream import load_source

BOUNDARY = "a-line-between-the-parts"
TOKEN = "a-token-for-the-benchmark"
NEW_CLASSES, NEW_IMAGES = (6, 7, 8, 9), 120  # to learn meanwhile; images of each
TOLERANCE = 1e-4


@dataclass
class Tally:
    """What one client has seen."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    wrong: int = 0


def teach(path: Path, tasks: int) -> Learner:
    """A model of the digits, two a task."""
    source = load_source("digits", None, False)
    learner = Learner(latent=8, epochs=2, memory=100)
    for t in range(tasks):
        rows = np.flatnonzero(np.isin(source.train.labels, (2 * t, 2 * t + 1)))[:80]
        labels = [source.class_names[int(source.train.labels[i])] for i in rows]
        learner.learn([source.train.load(int(i)) for i in rows], labels, name=f"task {t + 1}")
    learner.save(path)
    return learner


def questions(learner: Learner, count: int) -> list[tuple[bytes, str, float]]:
    """Request bodies, each with the class and probability that must come back."""
    source = load_source("digits", None, False)
    assert source.test is not None
    images = [source.test.load(i) for i in range(count)]
    bodies = [form("files", f"{number}.png", png(image)) for number, image in enumerate(images)]
    answers = learner.answers(images)
    return [(body, answer.name, answer.probability) for body, answer in zip(bodies, answers, strict=True)]


def form(name: str, filename: str, content: bytes) -> bytes:
    """One file as the body of a request."""
    disposition = f'Content-Disposition: form-data; name="{name}"; filename="{filename}"'
    return f"--{BOUNDARY}\r\n{disposition}\r\n\r\n".encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def png(image: Image.Image) -> bytes:
    """An image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def more_digits() -> bytes:
    """New classes as a zip of class folders."""
    source = load_source("digits", None, False)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for c in NEW_CLASSES:
            for row in np.flatnonzero(source.train.labels == c)[:NEW_IMAGES].tolist():
                archive.writestr(f"{source.class_names[c]}/{row}.png", png(source.train.load(row)))
    return packed.getvalue()


def ask(url: str, method: str, path: str, body: bytes | None = None) -> Any:
    """What the server answers, as JSON."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Authorization": f"Bearer {TOKEN}"}
    connection.request(method, path, body, headers)
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def learn_meanwhile(url: str, asked: list[tuple[bytes, str, float]], clients: int) -> dict[str, Any]:
    """All clients at once, for as long as new classes are learned. In the last second the answers change."""
    begun = time.perf_counter()
    job = ask(url, "POST", "/tasks", form("file", "digits.zip", more_digits()))["id"]
    tallies, state = [], "queued"
    while state not in ("done", "failed"):
        tallies.append(measure(url, asked, clients, 1.0))
        state = ask(url, "GET", f"/tasks/{job}")["state"]
    assert state == "done"
    answers = sum(tally["requests"] for tally in tallies)
    return {
        "seconds_to_learn": round(time.perf_counter() - begun, 1),
        "requests": answers,
        "requests_per_second": round(answers / sum(tally["seconds"] for tally in tallies), 1),
        "p50_ms": sorted(tally["p50_ms"] for tally in tallies)[len(tallies) // 2],
        "p100_ms": max(tally["p100_ms"] for tally in tallies),
        "errors": sum(tally["errors"] for tally in tallies),
        "wrong_answers": sum(tally["wrong_answers"] for tally in tallies[:-1]),
    }


def client(host: str, port: int, asked: list[tuple[bytes, str, float]], number: int, end: float, tally: Tally) -> None:
    """Ask one question after the other until the time is over."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    while time.perf_counter() < end:
        body, name, probability = asked[number % len(asked)]
        number += 1
        begun = time.perf_counter()
        try:
            connection.request("POST", "/predict", body, headers)
            response = connection.getresponse()
            content = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException):
            tally.errors += 1
            connection.close()
            continue
        tally.seconds.append(time.perf_counter() - begun)
        if response.status != 200:
            tally.errors += 1
            continue
        answer = content["answers"][0]
        right = answer["class"] == name and abs(answer["probability"] - probability) < TOLERANCE
        tally.wrong += not right
    connection.close()


def measure(url: str, asked: list[tuple[bytes, str, float]], clients: int, seconds: float) -> dict[str, Any]:
    """All clients at once, for some time."""
    address = urlsplit(url)
    assert address.hostname and address.port
    tallies = [Tally() for _ in range(clients)]
    begun = time.perf_counter()
    threads = [
        threading.Thread(
            target=client, args=(address.hostname, address.port, asked, 7 * n, begun + seconds, tallies[n])
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    all_seconds = np.array([s for tally in tallies for s in tally.seconds])
    points = {f"p{p}_ms": round(1000 * float(np.percentile(all_seconds, p)), 1) for p in (50, 90, 95, 99, 100)}
    return {
        "clients": clients,
        "seconds": round(took, 1),
        "requests": len(all_seconds),
        "requests_per_second": round(len(all_seconds) / took, 1),
        **points,
        "errors": sum(tally.errors for tally in tallies),
        "wrong_answers": sum(tally.wrong for tally in tallies),
    }


def batch_size(url: str) -> float:
    """Images that shared a pass, on average."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    numbers = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tpl_batch_images_"))
    return float(numbers["tpl_batch_images_sum"]) / float(numbers["tpl_batch_images_count"])


def main() -> None:
    """Teach, serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--learning", action="store_true", help="ask while new classes are learned, however long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        teach(model, options.tasks)
        asked = questions(Learner.load(model, device=options.device), 200)
        command = [sys.executable, "-m", "tpl", "serve", str(model), "--port", "0", "--json"]
        server = subprocess.Popen(
            [*command, "--device", options.device],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TPL_TOKEN": TOKEN},
        )
        try:
            assert server.stdout is not None
            url = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")["url"]
            measure(url, asked, options.clients, 1.0)  # warm
            result = measure(url, asked, options.clients, options.seconds)
            if options.learning:
                result = {"before": result} | learn_meanwhile(url, asked, options.clients)
            result["images_per_pass"] = round(batch_size(url), 1)
        finally:
            server.terminate()
            server.wait()
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["errors"] or result["wrong_answers"] else 0)


if __name__ == "__main__":
    main()
