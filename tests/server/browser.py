"""Just enough of the DevTools protocol to press buttons and read text in a headless Chromium."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--no-proxy-server", "--remote-debugging-port=0",
                f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._socket = _connect(self._find_page())
        self._ids = itertools.count(1)
        self.problems: list[str] = []  # uncaught exceptions, and what the page's policy blocked
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _find_page(self) -> str:
        import httpx

        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"ws://127.0.0.1:(\d+)/", line):
                pages = httpx.get(f"http://127.0.0.1:{found[1]}/json/list").json()
                return next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
        raise RuntimeError("Chromium did not start")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition}\n{self.text('body')}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def fill(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({selector!r}).value = {json.dumps(text)}")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({selector!r}).click()")

    def screenshot(self, path: Path) -> None:
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        _send(self._socket, json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(_receive(self._socket))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]))
            elif message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.problems.append(entry["text"])


def _connect(url: str) -> socket.socket:
    found = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", url)
    assert found is not None
    connection = socket.create_connection((found[1], int(found[2])), timeout=60)
    key = base64.b64encode(os.urandom(16)).decode()
    connection.sendall(
        f"GET {found[3]} HTTP/1.1\r\nHost: {found[1]}:{found[2]}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += connection.recv(1)
    assert b" 101 " in answer.split(b"\r\n")[0]
    return connection


def _send(connection: socket.socket, text: str) -> None:
    data = text.encode()
    mask = os.urandom(4)
    size = (
        struct.pack("!B", 0x80 | len(data))
        if len(data) < 126
        else struct.pack("!BH", 0xFE, len(data))
    )
    masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
    connection.sendall(b"\x81" + size + mask + masked)


def _receive(connection: socket.socket) -> bytes:
    data = b""
    while True:
        first, size = _exactly(connection, 2)
        if size == 126:
            (size,) = struct.unpack("!H", _exactly(connection, 2))
        elif size == 127:
            (size,) = struct.unpack("!Q", _exactly(connection, 8))
        data += _exactly(connection, size)
        if first & 0x80:
            return data


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "Chromium closed the connection"
        data += part
    return data
