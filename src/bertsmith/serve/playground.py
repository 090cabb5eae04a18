"""The playground: a folder of files, held in memory, that load nothing from other servers."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from bertsmith.serve.api_errors import ApiError

PAGE = Path(__file__).parent / "page"
START = "page.html"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}

POLICY = (
    "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
"""Scripts, styles, pictures and requests only from this server; nothing inline; no use in frames.

A picture may also be one that the page itself has drawn (blob:), to save it as PNG.
"""
CACHING = "no-cache"
"""Browsers ask for a file each time, and get it only if it has changed."""


def playground_routes(folder: Path = PAGE) -> APIRouter:
    """Return the routes that serve the files of the page, and no others."""
    files = {file.name: file.read_bytes() for file in folder.glob("*") if file.suffix in TYPES}
    assert START in files, f"{folder} lacks {START}: the installation is incomplete"
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def start(request: Request) -> Response:
        return _response(files, START, request)

    @router.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        return _response(files, name, request)

    return router


def _response(files: dict[str, bytes], name: str, request: Request) -> Response:
    if name not in files:
        raise ApiError(404, "the page does not have this file")
    tag = f'"{hashlib.sha256(files[name]).hexdigest()[:32]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": CACHING,
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(files[name], media_type=TYPES[Path(name).suffix], headers=headers)
