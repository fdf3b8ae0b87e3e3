"""A real browser without a window, driven through the pipe of Chromium's DevTools protocol.

Messages are JSON ended by a zero byte: the browser reads them from descriptor 3 and answers on descriptor 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "browser_path", "needs_browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE_SECONDS = 60.0
_WITH_PIPES = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for place, each in zip((3, 4), ours):
    os.dup2(each, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Run in the child: puts the pipes where the browser looks for them."""


def browser_path() -> str | None:
    """The browser that is installed here, if any."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


needs_browser = pytest.mark.skipif(
    browser_path() is None, reason=f"needs a browser: none of {', '.join(_NAMES)} is installed"
)


class Browser:
    """One page of a browser; errors of its scripts fail the test."""

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        path = browser_path()
        assert path is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += [f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WITH_PIPES, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._count = 0
        self._buffer = b""
        self._page = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        [target] = [each for each in self._ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._page = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self.size(width, height)
        scheme = "dark" if dark else "light"
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    # -- the protocol -----------------------------------------------------------------------------------------

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._page:
            message["sessionId"] = self._page
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                found = answer["result"]
                assert isinstance(found, dict)
                return found
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case _:
                pass

    # -- what a reader does -------------------------------------------------------------------------------------

    def size(self, width: int, height: int) -> None:
        """Make the window so large, in CSS pixels."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, path: Path) -> float:
        """Open a file; the seconds until its script is done."""
        begin = time.monotonic()
        self._ask("Page.navigate", url=path.resolve().as_uri())
        while not self("location.protocol === 'file:' && document.documentElement?.dataset.ready === 'yes'"):
            assert time.monotonic() < begin + _PATIENCE_SECONDS, f"the page is not ready: {self.errors}"
            time.sleep(0.01)
        return time.monotonic() - begin

    def __call__(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def frame(self) -> None:
        """Wait until what was asked for is drawn."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click an element, at a share of its width and height."""
        left, top = self.point(selector, x, y)
        self._mouse("mousePressed", left, top)
        self._mouse("mouseReleased", left, top)
        self.frame()

    def drag(self, selector: str, from_x: float, to_x: float, y: float = 0.3) -> None:
        """Press in an element, move, and let go."""
        left, top = self.point(selector, from_x, y)
        right, _ = self.point(selector, to_x, y)
        self._mouse("mousePressed", left, top)
        for step in range(1, 5):
            self._mouse("mouseMoved", left + (right - left) * step / 4, top)
        self._mouse("mouseReleased", right, top)
        self.frame()

    def _mouse(self, kind: str, x: float, y: float) -> None:
        held = 0 if kind == "mouseReleased" else 1
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=held, clickCount=1)

    def point(self, selector: str, x: float, y: float) -> tuple[float, float]:
        """Where a share of an element is in the window, scrolled to if need be."""
        place = self(
            "(e => { e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect();"
            f"return [r.left + r.width * {x}, r.top + r.height * {y}] }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        return float(place[0]), float(place[1])

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, by their DOM names."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self._ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save what there is to see."""
        found = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
