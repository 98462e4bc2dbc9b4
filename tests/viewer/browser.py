"""A page in Chromium without a window, over the pipe of its DevTools protocol: no package is needed for it."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.05
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe"),
)


def chromium() -> str | None:
    """The program, if it is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page. `problems`: errors of its console, of scripts, and of the Content-Security-Policy."""

    def __init__(self, asking: BinaryIO, answers: BinaryIO) -> None:
        self.problems: list[str] = []
        self._asking, self._answers = asking, answers
        self._number, self._session = 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a method of the protocol. What happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._asking.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        answer = json.loads(found)
        method, params = answer.get("method"), answer.get("params", {})
        level = params.get("entry", {}).get("level") if method == "Log.entryAdded" else params.get("type")
        reported = method in ("Log.entryAdded", "Runtime.consoleAPICalled") and level == "error"
        if reported or method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params)[:500])
        return answer

    def size(self, width: int, height: int, phone: bool = False, dark: bool = False) -> None:
        """Show the page at this size, as a phone does or not."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + phone, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of JavaScript, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until JavaScript is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.value(expression):
            assert time.monotonic() < deadline, (expression, self.problems)
            time.sleep(LOOK_SECONDS)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """A page of a new browser, whose files are in a folder."""
    program = chromium()
    assert program is not None
    (asked, asking), (answering, answered) = os.pipe(), os.pipe()
    # The protocol is spoken by file descriptors 3 and 4.
    shell = f'exec 3<&{asked} 4>&{answered}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(asked, answered),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(asked)
    os.close(answered)
    try:
        with os.fdopen(asking, "wb", 0) as to, os.fdopen(answering, "rb") as back:
            yield Page(to, back)
    finally:
        process.terminate()
        process.wait()
