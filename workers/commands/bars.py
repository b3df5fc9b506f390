"""Budgets as a table with bars: what is spent of what, per account and level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from workers.commands.console import cell

_WIDTH: Final = 20


def budget_table(accounts: Sequence[Mapping[str, Any]]) -> Table:
    """A table of accounts.

    Args:
        accounts: mappings with account, level, delta, cap_nano, left_nano, cap_epsilon and spent_epsilon; a cap that
            is None is not limited, a spent epsilon that is None has no finite bound.
    """
    table = Table(show_edge=False)
    table.add_column("account", overflow="fold")
    table.add_column("level")
    for heading in ("spent", "of", "left"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for one in accounts:
        spent, cap = one["spent_epsilon"], one["cap_epsilon"]
        table.add_row(
            cell(one["account"]),
            "per image" if one["level"] == "instance" else "per agent",
            "no bound" if spent is None else f"{spent:.3f}",
            "unlimited" if cap is None else f"{cap:g}",
            "" if one["cap_nano"] is None else f"{left_fraction(one):.1%}",
            _bar(one),
        )
    table.caption = "epsilon; what is left is counted in mu^2, which adds up over jobs"
    if any(one.get("life_nano") for one in accounts):
        table.caption += (
            "; what is set aside for votes for life is counted as spent from the beginning, and no such job adds to it"
        )
    return table


def left_fraction(account: Mapping[str, Any]) -> float:
    """Which part of a limited account is left, between 0 and 1."""
    cap, left = account["cap_nano"], account["left_nano"]
    return left / cap if cap else 0.0


def _bar(account: Mapping[str, Any]) -> str:
    if account["cap_nano"] is None:
        return ""
    # Rounded up, so that a full bar is never shown while something is left, nor an empty one after a charge.
    spent = 1 - left_fraction(account)
    full = min(_WIDTH, int(spent * _WIDTH) + (0 < spent < 1))
    return "#" * full + "." * (_WIDTH - full)
