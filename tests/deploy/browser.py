"""A headless Chromium, driven over a pipe with its DevTools protocol; no package but Debian's."""

import base64
import json
import os
import select
import subprocess
import tempfile
import time

from tools import WAIT_S, need


class Browser:
    """One page. Every request that it makes, and everything that goes wrong in it, is kept."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="fp8kvd_chromium_",
                                                    ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def become_3_and_4():
            os.dup2(to_browser, 103)  # out of the way of each other
            os.dup2(from_browser, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            [need("chromium-headless-shell"), "--remote-debugging-pipe", "--disable-gpu",
             "--disable-dev-shm-usage", "--hide-scrollbars", *flags,
             f"--user-data-dir={self._profile.name}"],
            preexec_fn=become_3_and_4, close_fds=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last_id = 0
        self._session = None
        self.requests = []
        self.faults = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target,
                                   flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def _send(self, method, **parameters):
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            answer = self._receive(deadline)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)
        raise RuntimeError(f"Chromium did not answer {method} within {WAIT_S} s")

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            left = max(0, deadline - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                raise RuntimeError(f"Chromium said nothing for {WAIT_S} s")
            self._buffer += os.read(self._read, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(parameters["exceptionDetails"].get("exception", parameters))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.faults.append(parameters["entry"]["text"])

    def open(self, url, width=1280, height=900, scheme="light"):
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=width < 600)
        self._send("Emulation.setEmulatedMedia",
                   features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._send("Page.navigate", url=url)

    def value(self, expression):
        """What the page's script gives for an expression."""
        result = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def key(self, key, text=""):
        """A key pressed and released, as a person does."""
        codes = {"Tab": 9, "Escape": 27, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key, text=text if "D" in kind
                       else "", windowsVirtualKeyCode=codes.get(key, ord(key[0].upper())))

    def screenshot(self, path):
        shot = self._send("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
