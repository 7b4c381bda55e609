"""A real browser for the tests: Chromium, driven over its DevTools pipe with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page in a headless Chromium. Messages are JSON, each ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--use-fake-device-for-media-stream",
            "--use-fake-ui-for-media-stream",
        ]
        command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # Chromium reads file 3 and writes file 4. Any shell can put the pipes there by path, whatever their numbers.
        script = f'exec "$@" 3</proc/self/fd/{to_child} 4>/proc/self/fd/{from_child}'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *command],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer, self._number, self._session = b"", 0, ""
        self.console: list[str] = []  # errors that the page's script or the browser's policy report
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise

    def _attach(self) -> None:
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], seconds)
            part = os.read(self._in, 1 << 16) if ready else b""
            assert part, "the browser does not answer"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(event["params"]["exceptionDetails"]["exception"].get("description", "exception"))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.console.append(event["params"]["entry"]["text"])

    def open(self, address: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page at some width, light or dark."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a script's expression, promises waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"!!({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def choose(self, selector: str, files: list[Path]) -> None:
        """Choose files in a file input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def press(self, key: str, code: int) -> None:
        """Press a key, as a person would."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, file: Path, size: tuple[int, int] | None = None) -> None:
        """The whole page as a PNG file, or its upper left part of some width and height."""
        clip = {} if size is None else {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png", **clip)
        file.write_bytes(base64.b64decode(shot["data"]))
