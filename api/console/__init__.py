"""The dashboard: static files for a person who has to answer for privacy, served at /dashboard.

It needs no internet (its one library is among its files) and no build step. It calls only what `api.schema` describes,
with the token its reader pastes. So the files are the same for everybody and hold no secret.

They must be served at exactly /dashboard/NAME (and `index.html` at /dashboard), next to the /v1 routes, with these
headers: only our own scripts and styles, no request to any other host, no frame around it. Pictures are our own files
or `blob:` URLs, which our scripts make from answers.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

STATIC: Final[Traversable] = files(__name__) / "static"
"""The folder of the files; `index.html` is the page."""

HEADERS: Final[dict[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Headers of every answer under /dashboard; the page is written to work under them."""
