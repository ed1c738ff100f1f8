"""A headless Chromium, controlled over its DevTools pipe: load a page and read its console."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from helpers.waiting import deadline_in

_LIMIT_S = 30.0
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """One page in its own browser. Use as a context manager."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.console: list[str] = []
        """Messages on the page's console, errors and refused requests."""
        self.requests: list[str] = []
        """Addresses that the page requested."""

    def __enter__(self) -> Self:
        our_read, its_write = os.pipe()
        its_read, our_write = os.pipe()
        # The browser reads commands from descriptor 3 and answers on descriptor 4.
        shell = f'exec 4>&{its_write} 3<&{its_read}; exec "$@"'
        program = find()
        assert program is not None
        self._process = subprocess.Popen(
            [
                *("bash", "-c", shell, "bash", program, "--headless", "--no-sandbox", "--disable-gpu"),
                *("--remote-debugging-pipe", "--hide-scrollbars", "--no-first-run"),
                *("--disable-dev-shm-usage", f"--user-data-dir={self._profile}"),
            ],
            pass_fds=(its_read, its_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_read)
        os.close(its_write)
        self._in, self._out = our_read, our_write
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = deadline_in(_LIMIT_S)
        while (answer := self._read(deadline)).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, page: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        deadline = deadline_in(_LIMIT_S)
        ready = "document.readyState == 'complete' && document.documentElement.dataset.ready == 'yes'"
        while not self.evaluate(ready):
            assert time.monotonic() < deadline, f"the page is not ready after {_LIMIT_S} s: {self.console}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def drag(self, x: float, y: float, to_x: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        self.mouse("mouseMoved", to_x, y, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
        code = {"Tab": 9, "Enter": 13, "Space": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        event = {"key": " " if key == "Space" else key, "windowsVirtualKeyCode": code.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def focus_with_tab(self, text: str) -> None:
        """Press Tab until the element with this text, label or id has the focus."""
        name = "(e => [e.id, e.ariaLabel, e.textContent.trim()])(document.activeElement)"
        for _ in range(100):
            self.press("Tab")
            if text in self.evaluate(name):
                return
        raise AssertionError(f"Tab never reaches {text!r}")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has not answered within {_LIMIT_S} s"
            if not (new := os.read(self._in, 1 << 20)):
                raise OSError("Chromium has ended")
            self._rest += new
        line, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(str([argument.get("value") for argument in params["args"]]))
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(params["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.console.append(f"dialog: {params['message']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
