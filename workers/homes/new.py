"""New homes for a real deployment, their settings as text, and their keys: made, shown, replaced.

Each role makes its own home, and none holds anything of another but public keys. Decisions that only the site can make
are left open: the policy of a new agent refuses everything until it is filled in, and so do the settings of a new
coordinator. `api.coordinator.config` reads those settings back. Here they are only written, so that a federation can be
made without loading the coordinator. Access tokens of a coordinator that is stopped are made here too.

A tallier names the hospitals that it sums, `[agents]` of tallier.toml, from the files of public keys that they have
sent. No invitation fills this table: it is what bounds a coordinator that invents agents. So it is the tallier's own
word, given after comparing fingerprints with each hospital.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from feature_store.backbones.spec import DEFAULT_BACKBONE, DEFAULT_FINGERPRINT
from feature_store.shard import Shard, check_served
from labeler.errors import BadData, InvalidSetting, JournalInUse, NotThere, ProtocolViolation
from labeler.ledger.database import open_database
from labeler.ledger.tokens import TokenStore
from labeler.methods import DEFAULT_METHOD, METHODS
from labeler.setting import DEFAULT_DELTA
from labeler.system.files import replace_file
from labeler.system.keys import PartyKeys, PublicKeys
from labeler.untrusted import ENROLLED_NAME, check_party_id
from workers.agent.images import public_facts
from workers.agent.policy import toml_value
from workers.party.home import (
    AGENT_FILE,
    ANCHOR_FILE,
    COORDINATOR_FILE,
    EXAMPLE_URL,
    JOURNAL_FILE,
    KEYS_FILE,
    POLICY_FILE,
    RECORDS_FOLDER,
    TALLIER_FILE,
    AgentConfig,
    EmbedSettings,
    TallierConfig,
    make_home,
    read_agent_config,
    read_tallier_config,
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
"""The comment in the settings of a tallier that sums all agents that the coordinator names."""


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
        public_url=EXAMPLE_URL,
        redis_url="unix:///run/labeler-redis/redis.sock",
        delta=DEFAULT_DELTA,
        instance_epsilon=1.0,
        agent_epsilon="unlimited",
        classes=None,
        backbones={DEFAULT_FINGERPRINT: DEFAULT_BACKBONE},
    )
    document = make_keys(home, party_id="coordinator", role="coordinator")
    # The settings, which make a folder a home, come last: where the disk was full, the same command continues.
    replace_file(home / COORDINATOR_FILE, text.encode(), mode=0o600)
    return document


def make_agent_home(
    home: Path,
    *,
    agent_id: str,
    coordinator_url: str,
    shard: Path | None,
    images: Path | None = None,
    embedding: EmbedSettings | None = None,
    engine: str,
) -> dict[str, Any]:
    """Make an agent's home: keys, settings, and a policy that refuses everything until the site has filled it in.

    Args:
        shard, images, embedding: see `agent_config`.

    Returns:
        Its public keys, as in `public_document`.

    Raises:
        InvalidSetting: there is one already, the shard is public or declares no bound, or the coordinator's address is
            one to which no party would speak.
        BadData: the shard cannot be opened.
    """
    _check_name(agent_id)
    _refuse_second(home / AGENT_FILE)
    _check_coordinator(coordinator_url)
    config, fingerprint, _ = agent_config(
        home,
        agent_id=agent_id,
        coordinator_url=coordinator_url,
        shard=shard,
        images=images,
        embedding=embedding,
        engine=engine,
    )
    _private(home)
    told = b"# Who this agent is and what it answers from. What it is allowed to answer stands in policy.toml.\n"
    document = make_keys(home, party_id=agent_id, role="agent")
    replace_file(home / POLICY_FILE, commented_policy(fingerprint).encode(), mode=0o600)
    replace_file(home / AGENT_FILE, told + settings_toml(config), mode=0o600)
    return document


def agent_config(
    home: Path,
    *,
    agent_id: str,
    coordinator_url: str,
    shard: Path | None,
    images: Path | None,
    embedding: EmbedSettings | None,
    engine: str,
) -> tuple[AgentConfig, str, tuple[str, ...]]:
    """Return the settings of a new agent, the fingerprint of its backbone, and its class list.

    Args:
        shard: a private shard that is there; or
        images, embedding: a folder of images that the agent embeds into its home, and how.

    Raises:
        InvalidSetting: none or both of them are named, the shard is public or declares no bound, or the folder is not
            there or cannot be read.
        BadData: the shard cannot be opened, or images have no label of the class list, or no person.
    """
    if (shard is None) == (images is None):
        raise InvalidSetting(
            "name what the agent answers from: a folder of private images that it embeds by itself (--images FOLDER "
            "--max-records N), or a private shard that `labeler embed --max-records N` has made (--shard SHARD)"
        )
    if images is not None and home.resolve().is_relative_to(images.resolve()):
        raise InvalidSetting(
            "the home of the agent would lie in the folder of images, where its files pass for images: name another "
            "place (--home)"
        )
    config = AgentConfig(
        agent_id=agent_id,
        coordinator_url=coordinator_url,
        shard=RECORDS_FOLDER if shard is None else str(shard.resolve()),
        engine=engine,
        images=None if images is None else str(images.resolve()),
        embedding=embedding,
    )
    if shard is not None:
        check_served(Shard.open(shard))
    fingerprint, classes = public_facts(home, config)
    if embedding is not None:  # what is enrolled must not follow the names of folders
        config = config.model_copy(update={"embedding": embedding.model_copy(update={"classes": classes})})
    return config, fingerprint, classes


def make_tallier_home(
    home: Path,
    *,
    tallier_id: str,
    number: int,
    coordinator_url: str,
    coordinator: PublicKeys,
    listen: str | None = None,
) -> dict[str, Any]:
    """Make a tallier's home: keys and settings, and a certificate if it is to compute winners.

    Args:
        number: which tallier, from 0.
        coordinator: its public keys.
        listen: HOST:PORT at which the two other talliers reach this one; None: it adds up shares only.

    Returns:
        Its public keys, as in `public_document`, with address and certificate where it has them.

    Raises:
        InvalidSetting: there is one already, or the address is not valid.
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
    """Let an existing tallier compute winners too: an address, and a certificate where it has none.

    Returns:
        Its new file of public keys, with both.

    Raises:
        InvalidSetting: the address is not valid.
        BadData: its file of public keys is missing, or is not that of a tallier.
    """
    document = read_public(home / PUBLIC_FILE)
    if document["role"] != "tallier" or document.get("tallier") not in range(3):
        raise BadData(f"{PUBLIC_FILE} in {home.name!r} is not that of a tallier; is it the right home?")
    make_identity(home, tallier_id=document["party_id"], number=document["tallier"], listen=listen)
    return write_public(home, document)


CHOICES: Final[Mapping[str, Any]] = {
    "instance_epsilon": 1.0,
    "agent_epsilon": "unlimited",
    "delta": DEFAULT_DELTA,
    "max_queries_per_day": 1000,
    "max_noise_contributors": 1,
}
"""The choices that a policy leaves to a site, with their defaults where a site joins by an invitation."""

_KEY = "64 hexadecimal digits"


def commented_policy(
    fingerprint: str,
    *,
    chosen: Mapping[str, Any] = CHOICES,
    pins: Mapping[str, str] | None = None,
    verify_key: str | None = None,
) -> str:
    """Return the commented policy file of a site.

    Without pins it is unfinished: its fields are commented out, so it is refused, and so allows nothing, until the site
    fills them in.

    Args:
        fingerprint: of the backbone of the agent's shard.
        chosen: the fields of CHOICES.
        pins: the talliers, id to public sealing key.
        verify_key: of the coordinator.
    """
    is_open = pins is None
    mark = "# " * is_open
    how = "# Remove the # in front of a line and fill it in. There are no defaults: what is not said is not allowed.\n"
    warning = (
        "# All of the federation's, and no others: every task is shared among exactly these. Compare fingerprints by\n"
        "# phone. Whoever holds the keys of all of them could read this agent's noised votes.\n"
    )
    named = (
        {f"tallier-{number}": _KEY for number in range(3)}
        if pins is None
        else {toml_value(name): key for name, key in pins.items()}
    )
    pinned = "\n".join(f"{mark}{name} = {toml_value(key)}" for name, key in named.items())
    # Only the way that costs least, until a person widens it.
    methods = (DEFAULT_METHOD,) if is_open else tuple(name for name, method in METHODS.items() if method.searched)
    return f"""# What this site allows its agent to answer. It belongs to the site alone; nobody else can widen it.
# It is read again at every ask, and as long as it cannot be read, everything is refused. Every field: docs/policy.md.
{how * is_open}
[budget]
# The most that all answers of this agent together may ever cost, at this delta. A number, or "unlimited".
{mark}instance_epsilon = {toml_value(chosen["instance_epsilon"])}    # about one private image
{mark}agent_epsilon = {toml_value(chosen["agent_epsilon"])}    # about this site as a whole
{mark}delta = {toml_value(chosen["delta"])}    # well below one over the number of private images

[allow]
backbones = [{toml_value(fingerprint)}]    # the backbone this agent's shard was made with
{mark}tasks = "any"    # or the digests of the tasks that may be answered
{mark}methods = {toml_value(methods)}    # of {", ".join(METHODS)}
{mark}releases = ["histogram"]    # "winner" shows ballots to all talliers together
{mark}max_queries_per_day = {toml_value(chosen["max_queries_per_day"])}
# Agents known to be real and honest, this one included.
{mark}max_noise_contributors = {toml_value(chosen["max_noise_contributors"])}
{mark}max_noise_talliers = 0    # 1 or 2: talliers below may add the noise instead, and so many of them are honest
{mark}approval = true    # a person approves each task: labeler agent desk, or labeler agent approve TASK

[talliers]
# Whom this site trusts with one share of its noised votes each: id = public sealing key (seal_key).
{warning * is_open}{pinned}

[coordinator]
# Whose questions are answered at all: its public signing key (verify_key).
{mark}verify_key = {toml_value(verify_key or _KEY)}
"""


def make_keys(home: Path, *, party_id: str, role: str, tallier: int | None = None) -> dict[str, Any]:
    """Make the keys of a home where there are none, and write the public ones to a file in it, to be sent around."""
    path = home / KEYS_FILE
    if not path.exists():
        PartyKeys.generate().save(path)
    return write_public(
        home, public_document(PartyKeys.load(path).public, party_id=party_id, role=role, tallier=tallier)
    )


def write_public(home: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Write HOME/keys.public.json, with address and certificate for a tallier that finds winners."""
    document = document | public_part(home)
    replace_file(home / PUBLIC_FILE, json.dumps(document, indent=1).encode() + b"\n")
    return document


def public_document(keys: PublicKeys, *, party_id: str, role: str, tallier: int | None = None) -> dict[str, Any]:
    """Return what others need of a party: its name, its public keys, and their fingerprint to compare by phone."""
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
        BadData: it is no such file, or its fingerprint is not that of its keys.
    """
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_PUBLIC_BYTES))
        keys = PublicKeys(document["verify_key"], document["seal_key"])
        # A person who compares the fingerprint sees both: nothing in them may rewrite other text on the screen.
        check_party_id(document["party_id"], "party_id")
        if document["role"] not in ("coordinator", "agent", "tallier"):
            raise KeyError("role")
        if document["fingerprint"] != keys.fingerprint:
            raise BadData(f"{path.name}: the fingerprint is not that of the keys; ask for the file again")
    except OSError as error:
        kind = NotThere if isinstance(error, FileNotFoundError) else BadData
        raise kind(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError, ProtocolViolation):
        raise BadData(f"{path.name} is not a file of public keys; `labeler keys show` writes one") from None
    return dict(document)


def _check_name(party_id: str) -> None:
    """Validate the name before generating keys: no coordinator would enroll a bad one."""
    if re.fullmatch(ENROLLED_NAME, party_id) is None:
        raise InvalidSetting(
            "--id must be 1 to 100 letters, digits, dots, hyphens and underscores of ASCII, the first a letter or a "
            f"digit; found {party_id[:100]!r}"
        )


def _check_coordinator(url: str) -> None:
    """Refuse a bad address when a home is made, not at first use: an address with a password in it would be kept."""
    from workers.party.coordinator import check_url  # loads the client, which other commands of homes do not need

    check_url(url)


def _refuse_second(path: Path) -> None:
    if path.exists():
        raise InvalidSetting(f"{path} is there already; a home is made once")


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
    """Return a commented `coordinator.toml`; every other field has its default, see docs/coordinator.md."""
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
        "# Only the coordinator and its embedder reach this server: a socket, or redis(s):// with a password.",
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
        "# Fingerprint of a backbone (labeler embed --json) = what loads it; a relative path is of this folder.",
        "[backbones]",
        *(f"{toml_value(fingerprint)} = {toml_value(path)}" for fingerprint, path in backbones.items()),
        "",
        "[timing]",
        f"ask_again_s = {toml_value(ask_again_s)}",
        "",
    ]
    return "\n".join(lines)


def set_line(path: Path, field: str, value: str) -> None:
    """Set one top-level field of a settings file; every other line stays as it is.

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


def make_missing_keys(home: Path) -> dict[str, Any]:
    """Make keys where there are none, and write the public ones to the home's public file.

    Raises:
        InvalidSetting: the folder is no home.
    """
    return make_keys(home, **_who(home))


def show_keys(home: Path) -> dict[str, Any]:
    """Return the public keys of a home, and write its public file again.

    Raises:
        InvalidSetting: there are none, or the folder is no home.
    """
    who = _who(home)
    PartyKeys.load(home / KEYS_FILE)
    return make_keys(home, **who)


def rotate_keys(home: Path) -> dict[str, Any]:
    """Replace the keys of a home; the old ones are kept in a file named by the time.

    Raises:
        InvalidSetting: there are none to replace, or the folder is no home.
        JournalInUse: the party's process runs; it would continue with the old keys.
    """
    who = _who(home)
    PartyKeys.load(home / KEYS_FILE)
    with ExitStack() as held:
        if isinstance(journal := journal_of(home), Path) and journal.exists():
            # While this holds the journal, no other process runs in this home.
            held.enter_context(closing(open_database(journal, anchor=home / ANCHOR_FILE)))
        exchange_keys(home, PartyKeys.generate())
    return make_keys(home, **who)


def make_token_offline(home: Path, *, name: str, role: Literal["admin", "requester", "viewer"]) -> dict[str, Any]:
    """Make an access token in the journal of a coordinator that does not run.

    Raises:
        JournalInUse: it runs; ask it instead.
    """
    if not (home / COORDINATOR_FILE).exists():
        raise InvalidSetting(f"{home} is not a coordinator's home: it has no {COORDINATOR_FILE}")
    try:
        database = open_database(journal_of(home), anchor=home / ANCHOR_FILE)
    except JournalInUse:
        raise JournalInUse(
            "the coordinator of this home is running; make the token through it (--url and --token), or stop it first"
        ) from None
    with closing(database):
        record, secret = TokenStore(database).create(name, role)
    return {"token_id": record.token_id, "name": record.name, "role": record.role, "token": secret}


def journal_of(home: Path) -> str | Path:
    """Return the journal of a home: a file, or for a coordinator perhaps the URL of a PostgreSQL database."""
    if not (home / COORDINATOR_FILE).exists():
        return home / JOURNAL_FILE
    from workers.serve import read_settings

    return read_settings(home).journal_target


def existing_journal(home: Path) -> str | Path:
    """Return `journal_of` a home, for a caller that only reads it.

    Raises:
        InvalidSetting: the file is not there.
    """
    target = journal_of(home)
    if isinstance(target, Path) and not target.is_file():
        raise InvalidSetting(f"there is no journal in {home}; is it the right home?")
    return target


def exchange_keys(home: Path, new: PartyKeys) -> None:
    """Put new keys into use; the old ones are kept in a file named by the time."""
    moment = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    replace_file(home / f"{KEYS_FILE}.{moment}", (home / KEYS_FILE).read_bytes(), mode=0o600)
    new.save(home / KEYS_FILE)


def _who(home: Path) -> dict[str, Any]:
    """Return name and role of a home, and the number of a tallier where it is known, as `make_keys` takes them."""
    if (home / AGENT_FILE).exists():
        return {"party_id": read_agent_config(home).agent_id, "role": "agent"}
    if (home / TALLIER_FILE).exists():
        # Settings do not hold its number, the file that is sent around does.
        party_id, path = read_tallier_config(home).tallier_id, home / PUBLIC_FILE
        number = read_public(path).get("tallier") if path.exists() else None
        return {"party_id": party_id, "role": "tallier", "tallier": number if isinstance(number, int) else None}
    if (home / COORDINATOR_FILE).exists():
        return {"party_id": "coordinator", "role": "coordinator"}
    raise InvalidSetting(f"{home} is not a home: it has no {AGENT_FILE}, {TALLIER_FILE} or {COORDINATOR_FILE}")


def name_agents(home: Path, documents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Add agents to those a tallier sums, or give named ones their new keys; restart it afterwards.

    Returns:
        All agents named now, with their public signing keys.

    Raises:
        InvalidSetting: a file is not an agent's, or two agents have one key.
    """
    config = read_tallier_config(home)
    named = dict(config.agents or {})
    for document in documents:
        if document["role"] != "agent":
            raise InvalidSetting(
                f"the file of {document['party_id']!r} is that of a {document['role']}, not an agent's"
            )
        named[document["party_id"]] = document["verify_key"]
    if len(set(named.values())) != len(named):
        raise InvalidSetting("two agents have one key, so one party would be counted twice")
    changed = config.model_copy(update={"agents": dict(sorted(named.items()))})
    replace_file(home / TALLIER_FILE, settings_toml(changed), mode=0o600)
    return dict(sorted(named.items()))


def _private(home: Path) -> None:
    """Create a home's folder if there is none, and close it to others; a folder that was mounted may be open."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.chmod(0o700)
