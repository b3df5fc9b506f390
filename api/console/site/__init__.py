"""The desk of a hospital: a page in the browser of the machine its agent runs on, and the server behind it.

It shows what is public of what was asked, and the site's own accounting; it decides through the same functions as the
shell. Look and colours are the dashboard's. What keeps others out: `api.console.site.server`.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from api import console as dashboard

STATIC: Final[Traversable] = files(__name__) / "static"
"""The folder of the page's own files."""

SHARED: Final = ("dashboard.css", "theme.js", "dom.js", "icon.svg")
"""Files of the dashboard that the page uses as they are."""

HEADERS: Final[dict[str, str]] = dashboard.HEADERS | {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""What every answer carries: no script or style but our own files, no other host, no frame, nothing kept."""
