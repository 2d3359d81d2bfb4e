"""A headless Chromium over its debugging pipe: pages at any width, dark or light, with every request they make."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_SECONDS = 60.0

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)


class Page:
    """One tab. requests: the URLs it has asked for; errors: its exceptions, console errors and CSP refusals."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._buffer, self._last = reader, writer, b"", 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int = 900, *, dark: bool = False, script: bool = True) -> None:
        """Loads a file as a screen of that many CSS pixels would."""
        self.requests.clear()
        self.errors.clear()
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._handle(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the screen, or of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._handle(answer)

    def _handle(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._reader, 1 << 20) if ready else b""
            if not chunk:
                raise AssertionError("the browser ended" if ready else "the browser does not answer")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Starts one with a new profile folder, and ends it."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    # It reads file descriptor 3 and writes 4, whatever the numbers are here.
    command = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *_FLAGS.split(" "), f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(from_browser[0], to_browser[1])
    finally:
        os.close(to_browser[1])  # the browser ends with its pipe
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
