"""A small HTTP client for streams of events: it takes little of the cores that the server needs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LONGEST_LINE = 2**24  # bytes; a chunk of a stream may hold many log-probabilities


class RequestFailed(Exception):
    """The server refused a request, or broke off its answer; the message says how."""


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server. url: up to, without, /v1."""

    host: str
    port: int
    secure: bool
    prefix: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Raises: ValueError for anything but http://host[:port][/prefix] or https."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ValueError(f"url is {url!r}; give one such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, prefix, api_key)

    async def get(self, path: str) -> Any:
        """The JSON at `path`. Raises: RequestFailed."""
        async with self._request("GET", path, None) as (status, body):
            content = b"".join([part async for part in body])
        if status != 200:
            raise RequestFailed(_reason(status, content))
        return json.loads(content)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of an answer, parsed. Raises: RequestFailed."""
        async with self._request("POST", path, body) as (status, parts):
            if status != 200:
                raise RequestFailed(_reason(status, b"".join([part async for part in parts])))
            pending = b""
            async for part in parts:
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("error"):
                        raise RequestFailed(str(event["error"].get("message", event["error"])))
                    yield event

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """The status, and the body in the parts in which it comes."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Accept: */*",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        context = ssl.create_default_context() if self.secure else None
        try:
            reader, writer = await asyncio.open_connection(
                self.host, self.port, ssl=context, limit=LONGEST_LINE
            )
        except OSError as error:
            raise RequestFailed(f"cannot connect: {error}") from None
        try:
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            yield int(head.split(" ", 2)[1]), _body(reader, head)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise RequestFailed(f"the answer broke off: {type(error).__name__}: {error}") from None
        finally:
            writer.close()


async def _body(reader: asyncio.StreamReader, head: str) -> AsyncIterator[bytes]:
    if "\r\ntransfer-encoding: chunked" in head:
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    _, found, rest = head.partition("\r\ncontent-length:")
    if found:
        yield await reader.readexactly(int(rest.split("\r\n")[0]))
        return
    while part := await reader.read(65536):
        yield part


def _reason(status: int, content: bytes) -> str:
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {content[:200].decode(errors='replace')}"
