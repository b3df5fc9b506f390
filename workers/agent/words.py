"""What an agent says of trouble: to the coordinator nothing that depends on a record, to its own log what happened."""

from __future__ import annotations

import traceback
from pathlib import Path

from labeler.errors import (
    AwaitingApproval,
    BadData,
    BudgetExceeded,
    InvalidSetting,
    LabelerError,
    MixedShards,
    PrivacyRefusal,
    ProtocolViolation,
    SiteStopped,
    TryAgain,
    Unavailable,
)

PUBLIC_ERRORS = (PrivacyRefusal, InvalidSetting, MixedShards, ProtocolViolation, AwaitingApproval, SiteStopped)
"""Errors raised before a record is touched whose sentences follow from the ask, the policy and the ledger."""


def silent(error: Exception) -> LabelerError:
    """What the coordinator is told of trouble whose own words may depend on records."""
    if isinstance(error, TryAgain):
        return Unavailable("this agent cannot answer now; its operator finds the reason in its log")
    return BadData("this agent cannot answer this round; its operator finds the reason in its log")


def told(error: LabelerError) -> LabelerError:
    """What the coordinator is told: of a budget only that it does not cover the round, never how much there is."""
    if not isinstance(error, BudgetExceeded):
        return error
    account = f"account {error.account!r}, {error.level} level: " if error.account else ""
    return BudgetExceeded(
        f"{account}the site's budget does not cover this round; how much is left the site alone sees "
        "(labeler agent budget)"
    )


def said(error: LabelerError) -> dict[str, str]:
    """An error as fields of the site's own log."""
    return {"problem": error.problem_type, "sentence": str(error)}


def cause(error: Exception) -> dict[str, str]:
    """For the site's own log: a sentence of ours, or where somebody else's error came from, without its words."""
    if isinstance(error, LabelerError):
        return said(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"problem": type(error).__name__, "where": where}
