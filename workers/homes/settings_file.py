"""Settings files as text: the coordinator's, written with comments for the person who will change it.

What reads them back is `api.coordinator.config`; this module only writes, so that a federation can be made without
loading the coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from labeler.errors import BadData
from labeler.system.files import replace_file
from workers.agent.policy import toml_value

COORDINATOR_FILE: Final = "coordinator.toml"


def coordinator_toml(
    *,
    public_url: str,
    redis_url: str,
    delta: float,
    instance_epsilon: float | Literal["unlimited"],
    agent_epsilon: float | Literal["unlimited"],
    classes: Sequence[str] | None,
    backbones: Mapping[str, str],
    ask_again_s: float = 5.0,
    life_epsilon: float | None = None,
) -> str:
    """A commented `coordinator.toml`; every other field has its default, see docs/coordinator.md."""
    caps = [
        f"instance_epsilon = {toml_value(instance_epsilon)}    # about one private image",
        f"agent_epsilon = {toml_value(agent_epsilon)}    # about one agent's whole collection",
        *(
            []
            if life_epsilon is None
            else [f"life_epsilon = {toml_value(life_epsilon)}    # set aside for votes for life"]
        ),
    ]
    lines = [
        "# Settings of the coordinator. Every field is explained in docs/coordinator.md.",
        "",
        "# Where agents, talliers and people reach it.",
        f"public_url = {toml_value(public_url)}",
        "# Only the coordinator and its embedder talk to this server. May hold a password: keep this file at 0600.",
        f"redis_url = {toml_value(redis_url)}",
        "# A file in this folder, or postgresql://USER:PASSWORD@HOST/DATABASE.",
        'journal = "journal.db"',
        "# Every budget is stated at this delta.",
        f"delta = {toml_value(delta)}",
        *([] if classes is None else [f"classes = {toml_value(tuple(classes))}"]),
        "",
        '# The most that everything released may ever cost. A number, or "unlimited".',
        "[federation]",
        *caps,
        "",
        "# The same for each agent's account here; every agent has a ledger and a policy of its own besides.",
        "[agents]",
        *caps,
        "",
        "# Fingerprint of a backbone = what loads it; a relative path is looked for in this folder.",
        "[backbones]",
        *(f"{toml_value(fingerprint)} = {toml_value(path)}" for fingerprint, path in backbones.items()),
        "",
        "[timing]",
        f"ask_again_s = {toml_value(ask_again_s)}",
        "",
    ]
    return "\n".join(lines)


def set_line(path: Path, field: str, value: str) -> None:
    """Give one top-level field of a settings file another value; every other line stays as it is.

    Raises:
        BadData: the file has no such line.
    """
    text = path.read_text(encoding="utf-8")
    line = f"{field} = {toml_value(value)}"
    changed, count = re.subn(rf"^{re.escape(field)}\s*=.*$", lambda _: line, text, count=1, flags=re.MULTILINE)
    if not count:
        raise BadData(f"{path} has no line `{field} = ...`; add it before the first [table]")
    if changed != text:
        replace_file(path, changed.encode(), mode=0o600)
