"""Templates of the pages that people keep: every text escaped, and a name that is missing is an error, not a gap."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def page_templates(package: str, folder: str = "") -> Environment:
    """The templates in a folder of a package."""
    return Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
