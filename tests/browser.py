"""A headless Chromium, driven over its debugging pipe: the real engine, and no package but the browser's own.

python -m tests.browser PAGE.html FILE.png [dark] [print] [top]       a picture of a page, or of its top alone
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
PATIENCE_SECONDS = 60.0


def find_browser() -> str | None:
    """The program; None: this machine has none."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class Browser:
    """One page. `problems` collects what its console was told of errors."""

    def __init__(self, program: str, profile: str) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads commands from its file 3 and answers on its file 4.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        options = (*OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *options, "about:blank"],
            pass_fds=(to_read, to_write),
            env={**os.environ, "TMPDIR": profile},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._count, self._session = b"", 0, None
        self.events: list[Mapping[str, Any]] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the debugging protocol."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self, awaited: str) -> Mapping[str, Any]:
        """The next message; an event is noted too."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser did not answer {awaited} within {PATIENCE_SECONDS:.0f} s")
            part = os.read(self._read, 2**16)
            if not part:
                raise RuntimeError(f"the browser ended while it was asked for {awaited}")
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: Mapping[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
            told, values = message["method"], message["params"]
            if told == "Runtime.exceptionThrown":
                self.problems.append(str(values["exceptionDetails"]))
            elif told == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                self.problems.append(str(values["args"]))
            elif told == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(values["entry"]))
            elif told == "Page.javascriptDialogOpening":
                self.problems.append(f"a dialog: {values['message']}")
        return message

    def open(self, address: str, *, width: int = 1280, height: int = 900) -> float:
        """Loads a page; returns the seconds until it was drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        started = time.monotonic()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next("Page.loadEventFired")
        self.drawn()
        return time.monotonic() - started

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def drawn(self) -> None:
        """Waits until the browser has drawn what it was told."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """`kind`: mouseMoved, mousePressed, mouseReleased or mouseWheel; at a point of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.drawn()

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=1 if kind == "mousePressed" else 0, clickCount=1)

    def key(self, name: str) -> None:
        """Presses a key by its name, as in `ArrowRight` or `+`."""
        text = {"text": name} if len(name) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, **(text if kind == "keyDown" else {}))
        self.drawn()

    def media(self, *, scheme: str = "light", kind: str = "screen") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)
        self.drawn()

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG; what is in the window alone, if not the whole."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser with a profile of its own, ended on every way out."""
    program = find_browser()
    if program is None:
        raise RuntimeError(f"no browser: install one of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()


def main(words: Sequence[str]) -> int:
    page, target, *how = words
    with browsing() as browser:
        browser.open(
            Path(page).resolve().as_uri(), width=1100 if "top" in how else 1280, height=680 if "top" in how else 900
        )
        if not target.endswith(".pdf"):  # which has the media of a printer
            browser.media(scheme="dark" if "dark" in how else "light", kind="print" if "print" in how else "screen")
        Path(target).write_bytes(
            browser.printed() if target.endswith(".pdf") else browser.picture(whole="top" not in how)
        )
        for problem in browser.problems:
            print(problem, file=sys.stderr)
        return 1 if browser.problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
