"""The console: a page at ``/`` and its files below ``/console/``, for any store.

They are what lies in the folder ``static``, as it lies there: modules for browsers, a style sheet, and uPlot, which
draws the charts. Nothing has to be built. The page asks nothing that any other client could not: it reads ``/v1/...``
under the token that its user types, which stays in the tab (``sessionStorage``).

**Invariants.**

1. *The files are the same for everybody, and tell nothing of the store*: they ask for no token. What they ask for does.
2. *The page asks nobody else*: the Content-Security-Policy allows scripts, styles and requests of its own origin alone,
   none of them inline, and no page may frame it.
3. *Every view is of one snapshot, which it names* (``static/view.js``): a stream says which, everything else is read as
   of that one, and nothing is drawn before all of it is there.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from kivi.errors import NotFound

__all__ = ["Console"]

_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class Console:
    """The files, in memory: they are few, and small."""

    def __init__(self) -> None:
        folder = files("kivi_server.http").joinpath("static")
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        self._tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, body in self._files.items()}

    def answer(self, request: Request, name: str) -> Response:
        """Raises NotFound."""
        body = self._files.get(name)
        if body is None:
            raise NotFound(f"the console has no file {name!r}")
        headers = {
            "ETag": (tag := self._tags[name]),
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "no-referrer",
        }
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        media = _MEDIA[PurePath(name).suffix]
        return Response(body, headers={**headers, "Content-Type": media})
