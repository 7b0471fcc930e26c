# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests, driven over its debugging pipe: no driver, no websocket, no further package.

The protocol: one JSON object per message, ended by a zero byte, on the browser's file descriptors 3 and 4
(`--remote-debugging-pipe`). https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 120.0
"""Seconds for one answer; generous, for machines that are busy with something else."""


def find_browser() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with one tab."""

    def __init__(self, path: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer, self._number = b"", 0
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, to_write = os.pipe(), os.pipe()
        # Numbers from 10 up, so that putting them to 3 and 4 overwrites neither.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_write[0], to_read[1])]
        for fd in (to_write[0], to_read[1]):
            os.close(fd)
        self._in, self._out = to_read[0], to_write[1]
        command = [
            path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--force-prefers-reduced-motion",
            f"--user-data-dir={self._home.name}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "browser", *command], pass_fds=ends,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for fd in ends:
            os.close(fd)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come in between are kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        answer = self._wait(lambda: self._answers.pop(self._number, None), method)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, *, width: int, height: int, dark: bool) -> None:
        """Load a file at a size of the window, in a colour scheme; events of earlier pages are forgotten."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.visit("about:blank")
        self.visit(page.resolve().as_uri())
        self.call("Page.bringToFront")

    def visit(self, url: str) -> None:
        """Load a page; events of earlier ones are forgotten."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self._wait(lambda: self.seen("Page.loadEventFired") or None, "loading")

    def seen(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of that name since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def until(self, expression: str, expected: Any = True) -> None:
        """Wait until a JavaScript expression gives the expected value."""
        end = time.monotonic() + TIMEOUT
        while (value := self.value(expression)) != expected:
            assert time.monotonic() < end, (expression, value, self.value("document.body.innerText"))
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        """Press and release a key such as ("Tab", 9) or ("Enter", 13)."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def image(self, path: Path) -> None:
        """A screenshot of the whole page as PNG."""
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.call("Browser.close")
        except (OSError, RuntimeError, TimeoutError):
            self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)
        self._home.cleanup()

    def _wait(self, ready: Any, what: str) -> Any:
        end = time.monotonic() + TIMEOUT
        while (reply := ready()) is None:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError(f"The browser did not answer to {what} within {TIMEOUT:.0f} s.")
            content = os.read(self._in, 1 << 20)
            if not content:
                raise RuntimeError(f"The browser ended during {what}.")
            *messages, self._buffer = (self._buffer + content).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self.events.append(message)
        return reply
