"""The dashboard: static files for a person who has to answer for privacy, served at /dashboard.

It works without internet (the one library it needs lies beside its files), without a build step, and only asks for what
`api.schema` describes, with the token its reader pastes. So the files are the same for everybody and hold no secret.

They expect to be served at exactly /dashboard/NAME (and `index.html` at /dashboard), beside the /v1 routes, with these
headers: no script or style but our own files, no request to any other host, no frame around it. Pictures are our own
files or `blob:`, which is what a script of ours has made of an answer that it was given.
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
"""What every answer under /dashboard has to carry; the page is written to work under it."""
