"""Templates of the pages that people keep: every text escaped, and a name that is missing is an error, not a gap."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def figure_card(name: str, figure: str, unit: str) -> dict[str, str]:
    """Return what a page shows as a card: a figure below its name, and what it is a figure of."""
    return {"name": name, "figure": figure, "unit": unit}


def count(number: int, one: str) -> str:
    """Return a number with its noun: `1 agent`, `5 agents`."""
    return f"{number:,} {one if number == 1 else one + 's'}"


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
