"""The built-in chat page: static files, the same for everybody."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

DIRECTORY = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        content = (DIRECTORY / name).read_bytes()

        async def serve(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers=HEADERS)

        router.add_api_route(path, serve, methods=["GET"])
    return router
