"""Headless Chromium for tests: open a file, log every request it makes, run scripts in it."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

BINARY = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
MISSING = "no chromium, google-chrome or chromium-browser on PATH"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--disable-dev-shm-usage", "--mute-audio", "--remote-debugging-port=0", "--remote-allow-origins=*"),
)


class Tab:
    """An open page, spoken to by the DevTools protocol. `requests` and `errors` grow as it lives."""

    def __init__(self, address: str, width: int):
        import websocket

        self.socket = websocket.create_connection(address, timeout=3600, suppress_origin=True)
        self.number = 0
        self.requests: list[str] = []  # addresses, without data:
        self.errors: list[str] = []  # of scripts, and whatever the browser refused
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)

    def call(self, method: str, **params):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = self._next()
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")

    def run(self, script: str):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def slide(self, selector: str, value) -> None:
        """Give a control of an explorer a value as a hand would."""
        self.run(
            f"(x => {{ x.value = {json.dumps(value)}; x.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def press(self, key: str) -> None:
        """Press a key on the first canvas."""
        event = f"new KeyboardEvent('keydown', {{key: '{key}'}})"
        self.run(f"document.querySelector('canvas').dispatchEvent({event})")

    def _next(self) -> dict:
        message = json.loads(self.socket.recv())
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("data:"):
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(" ".join(str(arg.get("value")) for arg in params["args"]))
        return message


@contextlib.contextmanager
def tab(path: Path, width: int = 1200):
    """A fresh browser with the file open in it; the browser ends with the block."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as home:
        command = [BINARY, *FLAGS, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            page = Tab(_address(Path(home, "DevToolsActivePort")), width)
            page.open(path)
            yield page
            page.socket.close()
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def shown(html: str, width: int = 1200):
    """A page of this HTML, open; AssertionError if it raised an error meanwhile."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        path = Path(folder, "page.html")
        path.write_text(f"<!DOCTYPE html><meta charset=utf-8><meta name=viewport content='width=device-width'>{html}")
        with tab(path, width) as page:
            yield page
            assert not page.errors


def _address(port_file: Path) -> str:
    import urllib.request

    for _ in range(36_000):
        with contextlib.suppress(OSError, IndexError, StopIteration):
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as reply:
                return next(t["webSocketDebuggerUrl"] for t in json.load(reply) if t["type"] == "page")
        time.sleep(0.1)
    raise TimeoutError("the browser did not start in an hour")
