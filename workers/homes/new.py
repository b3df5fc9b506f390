"""New homes for a real deployment: each role makes its own, and none holds anything of another but public keys.

What only people at the site can decide is left for them: the policy of a new agent refuses everything until it is
filled in, and so do the settings of a new coordinator.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from feature_store.shard import Shard, check_served
from labeler.errors import BadData, InvalidSetting, ProtocolViolation
from labeler.methods import METHODS
from labeler.system.files import replace_file
from labeler.system.keys import PartyKeys, PublicKeys
from labeler.untrusted import ENROLLED_NAME, check_party_id
from workers.agent.policy import toml_value
from workers.homes.settings_file import COORDINATOR_FILE, coordinator_toml
from workers.party.home import (
    AGENT_FILE,
    KEYS_FILE,
    POLICY_FILE,
    TALLIER_FILE,
    AgentConfig,
    TallierConfig,
    make_home,
    settings_toml,
)
from workers.tallier.peers import address_of, make_identity, public_part

PUBLIC_FILE = "keys.public.json"
_MAX_PUBLIC_BYTES = 64 * 1024

UNNAMED_AGENTS = """
# The agents whose ballots this tallier adds up: id = public signing key (verify_key). Compare fingerprints over the
# phone. With this table a coordinator cannot pass off agents of its own as sources of noise; without it, it can.
# Restart after a change. `labeler tallier agents FILES --home HOME` writes it from the files that sites have sent.
# [agents]
# hospital-a = "64 hexadecimal digits"
"""
"""What stands in the settings of a tallier that sums whomever the coordinator names."""


def make_coordinator_home(home: Path) -> dict[str, Any]:
    """Make a coordinator's home: keys, and settings to fill in.

    Returns:
        Its public keys, as in `public_document`.

    Raises:
        InvalidSetting: there is one already.
    """
    _refuse_second(home / COORDINATOR_FILE)
    _private(home)
    text = coordinator_toml(
        public_url="https://labels.example.org",
        redis_url="redis://redis:6379/0",
        delta=1e-5,
        instance_epsilon=1.0,
        agent_epsilon="unlimited",
        classes=None,
        backbones={},
    )
    document = make_keys(home, party_id="coordinator", role="coordinator")
    # The settings last, which make a folder a home: where the disk was full, the same command goes on.
    replace_file(home / COORDINATOR_FILE, text.encode(), mode=0o600)
    return document


def make_agent_home(home: Path, *, agent_id: str, coordinator_url: str, shard: Path, engine: str) -> dict[str, Any]:
    """Make an agent's home: keys, settings, and a policy that refuses everything until the site has filled it in.

    Returns:
        Its public keys, as in `public_document`.

    Raises:
        InvalidSetting: there is one already, the shard is public or declares no bound, or no party would speak to such
            a coordinator.
        BadData: the shard cannot be opened.
    """
    _check_name(agent_id)
    _refuse_second(home / AGENT_FILE)
    _check_coordinator(coordinator_url)
    records = Shard.open(shard)
    check_served(records)
    config = AgentConfig(agent_id=agent_id, coordinator_url=coordinator_url, shard=str(shard.resolve()), engine=engine)
    _private(home)
    lines = [
        "# Who this agent is and what it answers from. What it is allowed to answer stands in policy.toml.",
        *(f"{name} = {toml_value(value)}" for name, value in config.model_dump(exclude_none=True).items()),
    ]
    document = make_keys(home, party_id=agent_id, role="agent")
    replace_file(home / POLICY_FILE, unfinished_policy(records.fingerprint).encode(), mode=0o600)
    replace_file(home / AGENT_FILE, ("\n".join(lines) + "\n").encode(), mode=0o600)
    return document


def make_tallier_home(
    home: Path,
    *,
    tallier_id: str,
    number: int,
    coordinator_url: str,
    coordinator: PublicKeys,
    listen: str | None = None,
) -> dict[str, Any]:
    """Make a tallier's home: keys and settings, and a certificate where it is to compute winners.

    Args:
        number: which tallier, from 0.
        coordinator: its public keys.
        listen: HOST:PORT at which the two other talliers reach this one; None: it adds up shares only.

    Returns:
        Its public keys, as in `public_document`, with address and certificate where it has them.

    Raises:
        InvalidSetting: there is one already, or the address is none.
    """
    _check_name(tallier_id)
    if listen is not None:
        address_of(listen)
    _refuse_second(home / TALLIER_FILE)
    _check_coordinator(coordinator_url)
    config = TallierConfig(
        tallier_id=tallier_id,
        coordinator_url=coordinator_url,
        coordinator_verify_key=coordinator.verify_key,
        coordinator_seal_key=coordinator.seal_key,
    )
    make_home(home)
    document = make_keys(home, party_id=tallier_id, role="tallier", tallier=number)
    if listen is not None:
        document = add_winner_identity(home, listen=listen)
    replace_file(home / TALLIER_FILE, settings_toml(config) + UNNAMED_AGENTS.encode(), mode=0o600)
    return document


def add_winner_identity(home: Path, *, listen: str) -> dict[str, Any]:
    """Let a tallier that is there compute winners too: an address, and a certificate where it has none.

    Returns:
        Its file of public keys with both, as it is written anew.

    Raises:
        InvalidSetting: the address is none.
        BadData: its file of public keys is missing, or is not that of a tallier.
    """
    document = read_public(home / PUBLIC_FILE)
    if document["role"] != "tallier" or document.get("tallier") not in range(3):
        raise BadData(f"{PUBLIC_FILE} in {home.name!r} is not that of a tallier; is it the right home?")
    make_identity(home, tallier_id=document["party_id"], number=document["tallier"], listen=listen)
    return write_public(home, document)


def unfinished_policy(fingerprint: str) -> str:
    """A commented policy that is refused, and so allows nothing, until the site has filled in what is left open."""
    return f"""# What this site allows its agent to answer. It belongs to the site alone; nobody else can widen it.
# It is read again at every ask, and as long as it cannot be read, everything is refused. Every field: docs/policy.md.
# Remove the # in front of a line and fill it in. There are no defaults: what is not said is not allowed.

[budget]
# The most that all answers of this agent together may ever cost, at this delta. A number, or "unlimited".
# instance_epsilon = 1.0          # about one private image
# agent_epsilon = "unlimited"     # about this site as a whole
# delta = 1e-5                    # well below one over the number of private images

[allow]
backbones = [{toml_value(fingerprint)}]    # the backbone this agent's shard was made with
# tasks = "any"                   # or the digests of the tasks that may be answered
# methods = ["reverse-knn"]       # or several of {", ".join(METHODS)}
# releases = ["histogram"]        # and, or or, "winner"
# max_queries_per_day = 1000
# max_noise_contributors = 1      # agents known to be real and honest, this one included
# max_noise_talliers = 0          # 1 or 2: talliers below may add the noise in their place, so many of them are honest
# approval = true                 # a person approves each task: labeler agent approve DIGEST --home HOME

[talliers]
# Whom this site trusts with one share of its noised votes each: id = public sealing key (seal_key). All of the
# federation's, and no others: every task is shared among exactly these.
# Compare fingerprints over the phone. Whoever holds the keys of all of them could read this agent's noised votes.
# tallier-0 = "64 hexadecimal digits"
# tallier-1 = "64 hexadecimal digits"
# tallier-2 = "64 hexadecimal digits"

[coordinator]
# Whose questions are answered at all: the coordinator's public signing key (verify_key).
# verify_key = "64 hexadecimal digits"
"""


def make_keys(home: Path, *, party_id: str, role: str, tallier: int | None = None) -> dict[str, Any]:
    """Make the keys of a home where there are none, and write the public ones beside them, to be sent around."""
    path = home / KEYS_FILE
    if not path.exists():
        PartyKeys.generate().save(path)
    return write_public(
        home, public_document(PartyKeys.load(path).public, party_id=party_id, role=role, tallier=tallier)
    )


def write_public(home: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Write HOME/keys.public.json, of a tallier that finds winners with its address and certificate."""
    document = document | public_part(home)
    replace_file(home / PUBLIC_FILE, json.dumps(document, indent=1).encode() + b"\n")
    return document


def public_document(keys: PublicKeys, *, party_id: str, role: str, tallier: int | None = None) -> dict[str, Any]:
    """What others need of a party: who it is, its public keys, and their fingerprint to compare over the phone."""
    document: dict[str, Any] = {
        "party_id": party_id,
        "role": role,
        "verify_key": keys.verify_key,
        "seal_key": keys.seal_key,
        "fingerprint": keys.fingerprint,
    }
    return document if tallier is None else document | {"tallier": tallier}


def read_public(path: Path) -> dict[str, Any]:
    """Read a file of public keys that somebody sent.

    Raises:
        BadData: it is none, or its fingerprint is not that of its keys.
    """
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_PUBLIC_BYTES))
        keys = PublicKeys(document["verify_key"], document["seal_key"])
        # Both are shown to whoever compares the fingerprint: nothing in them may rewrite what stands on the screen.
        check_party_id(document["party_id"], "party_id")
        if document["role"] not in ("coordinator", "agent", "tallier"):
            raise KeyError("role")
        if document["fingerprint"] != keys.fingerprint:
            raise BadData(f"{path.name}: the fingerprint is not that of the keys; ask for the file again")
    except OSError as error:
        raise BadData(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError, ProtocolViolation):
        raise BadData(f"{path.name} is no file of public keys; `labeler keys show` writes one") from None
    return dict(document)


def _check_name(party_id: str) -> None:
    """Refused before keys are made that no coordinator would enrol."""
    if re.fullmatch(ENROLLED_NAME, party_id) is None:
        raise InvalidSetting(
            "--id must be 1 to 100 letters, digits, dots, hyphens and underscores of ASCII, the first a letter or a "
            f"digit; found {party_id[:100]!r}"
        )


def _check_coordinator(url: str) -> None:
    """Refused when a home is made and not when it is first used: an address with a password in it would be kept."""
    from workers.party.coordinator import check_url  # loads the client, which other commands of homes do not need

    check_url(url)


def _refuse_second(path: Path) -> None:
    if path.exists():
        raise InvalidSetting(f"{path} is there already; a home is made once")


def _private(home: Path) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.chmod(0o700)
