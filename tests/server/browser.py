# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium driven over its debugging pipe, without a driver program or package."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
POLL_S = 0.05
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "k": 75, "o": 79, "/": 191}
# Roles that a screen reader reads with a name.
NAMED = {"button", "link", "textbox", "combobox", "checkbox", "spinbutton", "slider", "dialog"}
NAMED |= {"article", "math", "img", "navigation", "region"}


class PageError(AssertionError):
    """The page did not reach an expected state, or one of its scripts failed."""


class Browser:
    """One tab of a browser with its own profile.

    Args:
        profile: folder for the files of the browser.

    Attributes:
        errors: exceptions of scripts, violations of a policy, and failed loads.
        requested: addresses that the page requested.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads from descriptor 3 and writes to descriptor 4.
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', CHROMIUM),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update"),
                *("--no-proxy-server", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._rest = b""
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._session: str | None = None
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.show()

    def show(
        self, width: int = 1280, height: int = 800, *, dark: bool = False, still: bool = True
    ) -> None:
        """Set the size in pixels and the system's preferences: dark colours, reduced motion."""
        size = {"width": width, "height": height, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1)
        preferred = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        features = [{"name": name, "value": value} for name, value in preferred.items()]
        self._call("Emulation.setEmulatedMedia", features=features)

    def disconnect(self, is_cut: bool = True) -> None:
        """Disconnect the network, or connect it again."""
        speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._call("Network.emulateNetworkConditions", offline=is_cut, **speed)

    def forget(self, origin: str) -> None:
        """Delete what pages of an origin have stored in the browser; their tabs keep theirs."""
        self._call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")

    def open(self, url: str) -> None:
        answer = self._call("Page.navigate", url=url)
        if "errorText" in answer:
            raise PageError(f"{url}: {answer['errorText']}")
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; wait for a promise."""
        actual = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in actual:
            raise PageError(f"{script}: {actual['exceptionDetails']}")
        return actual["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise PageError(f"not within {timeout_s:g} s: {condition}; {self.errors}")
            time.sleep(POLL_S)

    def key(self, name: str, *, control: bool = False, shift: bool = False) -> None:
        """Press and release a key, named as in `KeyboardEvent.key`."""
        text = "\r" if name == "Enter" else ""
        report = {"key": name, "windowsVirtualKeyCode": KEYS[name], "text": text}
        report["modifiers"] = 2 * control + 8 * shift
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **report)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def nameless(self) -> list[str]:
        """Return the roles of elements that a screen reader cannot name."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            node["role"]["value"]
            for node in nodes
            if node["role"]["value"] in NAMED
            and not node["ignored"]
            and not node.get("name", {}).get("value", "").strip()
        ]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            call["sessionId"] = self._session
        os.write(self._write, json.dumps(call).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']}")
                return message["result"]
            self._hear(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise PageError("the browser has ended")
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
