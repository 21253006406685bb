"""A headless Chromium, driven over a pipe by its DevTools protocol: pages, what is in them, and screenshots."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = "chromium"
_BINARY = "/usr/bin/chromium"
_CALL_SECONDS = 60.0
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # the tests run as root, and the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
)


def binary() -> str | None:
    """Returns the program, or None where there is none."""
    return shutil.which(PACKAGE) or (_BINARY if Path(_BINARY).exists() else None)


class Browser:
    """One Chromium process; its pages share nothing."""

    def __init__(self, profile: Path) -> None:
        program = binary()
        assert program is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def pipes() -> None:
            """The browser reads from descriptor 3 and writes to 4."""
            low, high = os.dup(to_read), os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=pipes,  # noqa: PLW1509 -- no thread of this process holds a lock that the two calls take
            close_fds=False,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._numbers = itertools.count(1)
        self.events: list[Mapping[str, Any]] = []

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result; events that come meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _CALL_SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """A page of its own, with its own storage, that has loaded this address."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.size(width, height)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            page.call("Page.navigate", url=url)
            page.until("location.protocol !== 'about:' && document.readyState === 'complete'")
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self.session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol for this page."""
        return self._browser.call(method, self.session, **params)

    def size(self, width: int, height: int) -> None:
        """Gives the page another size, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true in the page, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"not true in {seconds} s: {script}\n{self.text()}"
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """Returns the visible text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses a key and releases it."""
        codes = {"Tab": 9, "Enter": 13, "Space": 32}
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        down = {"key": " " if key == "Space" else key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **down)

    def screenshot(self, path: Path) -> Path:
        """Writes a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[str]:
        """Returns what the browser found wrong in this page: errors, refused resources."""
        found = []
        for each in self._browser.events:
            params = each.get("params", {})
            if each.get("sessionId") != self.session:
                continue
            if each["method"] == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
                found.append(params["entry"]["text"])
            if each["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
        return found

    def requested(self) -> set[str]:
        """Returns the addresses that the page has asked for."""
        return {
            each["params"]["request"]["url"]
            for each in self._browser.events
            if each.get("sessionId") == self.session and each["method"] == "Network.requestWillBeSent"
        }


def install() -> None:
    """Installs Debian's package where the program is missing. Raises CalledProcessError."""
    if binary() is not None:
        return
    print(f"installing {PACKAGE} (once) ...", file=sys.stderr, flush=True)  # noqa: T201 -- it takes a minute
    subprocess.run(["apt-get", "--quiet", "update"], capture_output=True, check=False)
    install = ["apt-get", "--quiet", "--yes", "--no-install-recommends", "install", PACKAGE, "fonts-dejavu-core"]
    subprocess.run(install, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, check=True)


if __name__ == "__main__":
    install()
