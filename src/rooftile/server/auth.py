"""The API key: `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request

from rooftile.server.errors import ApiError


class KeyCheck:
    """A dependency that lets a request pass whose key is among `keys` (or any, where there are none)."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, request: Request) -> None:
        if not self._digests:
            return
        given = _bearer(request.scope["headers"])
        # Digests are of equal length and every one is compared, so the time tells nothing.
        matches = [hmac.compare_digest(_digest(given or b""), digest) for digest in self._digests]
        if given is None or not any(matches):
            said = "no API key was given" if given is None else "the API key is not valid"
            raise ApiError(
                401,
                f"{said}; send the header `Authorization: Bearer KEY`",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None
