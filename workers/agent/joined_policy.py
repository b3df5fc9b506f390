"""The policy of a site that joins by invitation: careful defaults that allow little, a person's approval, and the pins.

Unlike `workers.homes.new.unfinished_policy` it can be answered with at once: every field is filled in, and none counts
on anybody's word but the site's own. What a coordinator could widen stays narrow: it counts on no noise but its own,
opens no winners (whose rounds show ballots to all talliers together), and a person sees every task before it answers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from labeler.errors import InvalidSetting
from labeler.invitation import Invitation
from labeler.methods import METHODS
from workers.agent.policy import Policy, policy_toml, read_policy, toml_value

CHOICES: Final[Mapping[str, Any]] = {
    "instance_epsilon": 1.0,
    "agent_epsilon": "unlimited",
    "delta": 1e-5,
    "max_queries_per_day": 1000,
    "max_noise_contributors": 1,
}
"""What `labeler agent join` lets a site choose, with what it is where it does not."""

RELEASES: Final = ("histogram",)


def joined_policy(invitation: Invitation, fingerprint: str, wanted: Mapping[str, Any]) -> str:
    """The policy file of a site that joins, commented; `read_policy` reads it back.

    Args:
        fingerprint: of the backbone of the agent's shard.
        wanted: some of CHOICES, otherwise.

    Raises:
        InvalidSetting: a wish is outside its bounds.
    """
    chosen = {name: value if wanted.get(name) is None else wanted[name] for name, value in CHOICES.items()}
    text = f"""# What this site allows its agent to answer. It belongs to the site alone; nobody else can widen it.
# It is read again at every ask, and as long as it cannot be read, everything is refused. Every field: docs/policy.md.

[budget]
# The most that all answers of this agent together may ever cost, at this delta. A number, or "unlimited".
instance_epsilon = {toml_value(chosen["instance_epsilon"])}    # about one private image
agent_epsilon = {toml_value(chosen["agent_epsilon"])}    # about this site as a whole
delta = {toml_value(chosen["delta"])}    # well below one over the number of private images

[allow]
backbones = [{toml_value(fingerprint)}]    # the backbone this agent's shard was made with
tasks = "any"    # or the digests of the tasks that may be answered
methods = {_list(tuple(name for name, method in METHODS.items() if method.has_k))}
releases = {_list(RELEASES)}    # "winner" shows ballots to all talliers together
max_queries_per_day = {toml_value(chosen["max_queries_per_day"])}
# Agents known to be real and honest, this one included.
max_noise_contributors = {toml_value(chosen["max_noise_contributors"])}
approval = true    # a person approves each task: labeler agent desk, or agent approve TASK

[talliers]
# Whom this site trusts with one share of its noised votes each, from the invitation: id = public sealing key.
{_pins(invitation)}

[coordinator]
# Whose questions are answered at all: its public signing key, from the invitation.
verify_key = {toml_value(invitation.verify_key)}
"""
    _checked(text)
    return text


def repinned_policy(path: Path, invitation: Invitation) -> str:
    """A policy as it is, with the talliers and the coordinator of an invitation; comments stay where they can.

    Raises:
        PolicyRefusal: the policy cannot be read.
    """
    known = read_policy(path)
    wanted = known.model_copy(
        update={
            "talliers": {one.party_id: one.seal_key for one in invitation.talliers},
            "coordinator": known.coordinator.model_copy(update={"verify_key": invitation.verify_key}),
        }
    )
    text = _replaced(path.read_text(), "talliers", _pins(invitation))
    text = _replaced(text, "coordinator", f"verify_key = {toml_value(invitation.verify_key)}")
    try:
        is_meant = _checked(text) == wanted
    except InvalidSetting:
        is_meant = False
    # A file that says the same in some other way, such as dotted names: its words are lost, its meaning is not.
    return text if is_meant else policy_toml(wanted)


def _pins(invitation: Invitation) -> str:
    return "\n".join(f"{toml_value(one.party_id)} = {toml_value(one.seal_key)}" for one in invitation.talliers)


def _list(words: tuple[str, ...]) -> str:
    return f"[{', '.join(map(toml_value, words))}]"


def _replaced(text: str, table: str, lines: str) -> str:
    """A TOML text whose table holds these lines instead of its own; its comments stay."""
    head, found, rest = (
        re.split(rf"(?m)(^\[{table}\][^\n]*\n)", text, maxsplit=1) if f"[{table}]" in text else (text, "", "")
    )
    own, next_table, tail = _until_next_table(rest)
    kept = [line for line in own.splitlines() if not line.strip() or line.lstrip().startswith("#")]
    while kept and not kept[-1].strip():
        kept.pop()
    return (
        head + found + "\n".join([*kept, *lines.splitlines()]) + "\n" + ("\n" + next_table + tail if next_table else "")
    )


def _until_next_table(text: str) -> tuple[str, str, str]:
    parts = re.split(r"(?m)(^\[[^\n]*\n)", text, maxsplit=1)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else (text, "", "")


def _checked(text: str) -> Policy:
    try:
        return Policy.model_validate(tomllib.loads(text))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InvalidSetting(
            f"the policy cannot be made: {reason}; see docs/policy.md for what each field takes"
        ) from None
