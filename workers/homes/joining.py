"""Joining by an invitation: make home, keys and settings, enroll the keys, and try the connection.

    make the home -> enroll its keys -> poll once: signed by the new keys, answered under the coordinator's pinned ones.

Every step may be repeated: the same command after a crash, or after a lost answer, continues. If the home exists (a
rotation), its new keys lie next to the old ones until the coordinator has taken them. The process of the home must not
run meanwhile, because it would continue with the old keys.

An invitation is read first, checked, and shown in words. A file that is whole and signed proves nothing yet: an
attacker who exchanged it would have signed it too. So a person compares its phrase with the administrator by telephone
(labeler.invitation).
"""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from ssl import PEM_cert_to_DER_cert
from typing import Any

from labeler.errors import (
    BadData,
    Forged,
    Interrupted,
    InvalidSetting,
    JournalInUse,
    NotEnrolled,
    NotThere,
    Unavailable,
)
from labeler.invitation import MAX_INVITATION_BYTES, Invitation, Role, enrolment_statement, read_document, token_digest
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.system.clock import now_utc
from labeler.system.files import read_named, replace_file
from labeler.system.keys import PartyKeys, PublicKeys, verify_statement
from workers.agent.images import public_facts
from workers.agent.policy import Policy, policy_toml, read_policy, toml_value
from workers.homes.new import (
    CHOICES,
    UNNAMED_AGENTS,
    add_winner_identity,
    agent_config,
    commented_policy,
    exchange_keys,
    public_document,
    write_public,
)
from workers.party.coordinator import CoordinatorHttp, Unreachable
from workers.party.home import (
    AGENT_FILE,
    ANCHOR_FILE,
    CA_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    POLICY_FILE,
    TALLIER_FILE,
    AgentConfig,
    EmbedSettings,
    TallierConfig,
    make_home,
    path_in_home,
    read_agent_config,
    read_tallier_config,
    settings_toml,
)
from workers.party.link import PartyLink


def read_invitation(path: Path, *, role: Role, now: datetime) -> Invitation:
    """Read an invitation and check all that can be checked without a telephone.

    Raises:
        BadData: it is no invitation, was changed after it was signed, or is for another role.
        InvalidSetting: it has expired.
    """
    try:
        invitation, signature = read_document(read_named(path, most_bytes=MAX_INVITATION_BYTES))
    except OSError as error:
        kind = NotThere if isinstance(error, FileNotFoundError) else BadData
        raise kind(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        verify_statement(invitation.statement, signature, invitation.verify_key)
    except (Forged, InvalidSetting):
        raise BadData(
            f"{path.name} was changed after the coordinator signed it; ask for the file again, by another way"
        ) from None
    if invitation.role != role:
        raise BadData(
            f"{path.name} invites {invitation.party_id!r} as {invitation.role}: labeler {invitation.role} join {path}"
        )
    if invitation.expires_at <= now.timestamp():
        until = datetime.fromtimestamp(invitation.expires_at, UTC)
        raise InvalidSetting(f"{path.name} expired at {until:%Y-%m-%d %H:%M} UTC; ask for a new invitation")
    return invitation


def write_invitation(path: Path, document: dict[str, Any]) -> None:
    """Write the file that is sent to a site; its token is a secret until it is used, so only its owner may read it."""
    replace_file(path, json.dumps(document, indent=1).encode() + b"\n", mode=0o600)


def terms_of(invitation: Invitation) -> list[tuple[str, str]]:
    """Return the terms that a site agrees to with an invitation: a subject and a statement for each line."""
    as_what = "an agent" if invitation.tallier is None else f"tallier {invitation.tallier}"
    until = datetime.fromtimestamp(invitation.expires_at, UTC)
    terms: list[tuple[str, str]] = [
        ("You would be", f"{invitation.party_id}, {as_what}" + (", with new keys" * invitation.is_rotation)),
        ("Coordinator", invitation.url),
        ("its keys", PublicKeys(invitation.verify_key, invitation.seal_key).fingerprint),
        ("its certificate", f"checked against {_authority(invitation.ca_certificates)}"),
    ]
    for one in invitation.talliers:
        keys = PublicKeys(one.verify_key, one.seal_key).fingerprint
        terms.append((f"Tallier {one.number}", f"{one.party_id}, keys {keys}"))
    return [
        *terms,
        ("Roster", invitation.roster_digest[:16]),
        ("Valid until", f"{until:%Y-%m-%d %H:%M} UTC"),
    ]


def keep_certificates(home: Path, invitation: Invitation) -> str | None:
    """Keep the authority of an invitation in a home; return the `ca_file` for its settings, None for the system's."""
    if not invitation.ca_certificates:
        return None
    replace_file(home / CA_FILE, invitation.ca_certificates.encode(), mode=0o600)
    return CA_FILE


def _authority(certificates: str) -> str:
    if not certificates:
        return "the authorities of this machine"
    begin = "-----BEGIN CERTIFICATE-----"
    try:
        prints = [
            sha256(PEM_cert_to_DER_cert((begin + one).strip())).hexdigest()[:16]
            for one in certificates.split(begin)[1:]
        ]
    except ValueError:
        raise BadData("the certificates in the invitation cannot be read; ask for the file again") from None
    return f"an authority of its own, {', '.join(prints)}"


NEXT_KEYS_FILE = "keys.next.json"
JOINED_FILE = "invitation.used"
"""The digest of the token of the invitation with which the keys of a home were enrolled."""

CHECK_S = 30.0
"""Seconds that the coordinator may take to answer, all attempts together."""

Home = AgentConfig | TallierConfig


@dataclass(frozen=True)
class Joined:
    """A site that has joined.

    Attributes:
        public: its public keys, as in keys.public.json, for those who pin them.
        roster_changed: the talliers have changed since the invitation.
        backbone_known: whether the coordinator embeds images with the backbone of the agent's shard; True of a tallier.
    """

    public: Mapping[str, Any]
    roster_changed: bool
    backbone_known: bool = True


def join_agent(
    home: Path,
    invitation: Invitation,
    *,
    shard: Path | None,
    images: Path | None = None,
    embedding: EmbedSettings | None = None,
    engine: str,
    wanted: Mapping[str, Any],
) -> Joined:
    """Make an agent's home from an invitation, or renew its keys and pins, and enroll it.

    Args:
        invitation: read, and its phrase compared.
        shard, images, embedding: what it answers from (workers.homes.new.agent_config); absent where the home is there.
        wanted: what the site's policy says of `CHOICES`; the defaults elsewhere.

    Raises:
        InvalidSetting: there is another home, no shard or folder was named, or it cannot be used.
        JournalInUse: keys are to be renewed, and the agent runs.
        NotEnrolled, ProtocolViolation: the coordinator refuses.
        Unavailable: it cannot be reached; the same command continues later.
    """
    if (home / AGENT_FILE).exists():
        config = read_agent_config(home)
        _check_same(config.agent_id, config.coordinator_url, invitation, home)
        fingerprint, classes = public_facts(home, config)
    else:
        _refuse_rotation(invitation, home)
        config, fingerprint, classes = agent_config(
            home,
            agent_id=invitation.party_id,
            coordinator_url=invitation.url,
            shard=shard,
            images=images,
            embedding=embedding,
            engine=engine,
        )
    make_home(home)
    policy = joined_policy(invitation, fingerprint, wanted) if not (home / POLICY_FILE).exists() else ""
    facts = {"backbone_fingerprint": fingerprint, "classes": list(classes)}
    with closing(_open(home)) as database:
        _make_keys(home, invitation)
        if policy:
            replace_file(home / POLICY_FILE, policy.encode(), mode=0o600)
        elif invitation.is_rotation:
            replace_file(home / POLICY_FILE, repinned_policy(home / POLICY_FILE, invitation).encode(), mode=0o600)
        ca_file = keep_certificates(home, invitation)
        config = config.model_copy(update={"coordinator_url": invitation.url, "ca_file": ca_file or config.ca_file})
        replace_file(home / AGENT_FILE, settings_toml(config), mode=0o600)
        joined = _enrol(home, invitation, config, database, facts)
    known = not invitation.backbones or fingerprint in invitation.backbones
    return Joined(joined.public, joined.roster_changed, known)


def join_tallier(home: Path, invitation: Invitation, *, listen: str | None) -> Joined:
    """Make a tallier's home from an invitation, or renew its keys and pins, and enroll it; see `join_agent`.

    Args:
        invitation: read, and its phrase compared.
        listen: HOST:PORT at which the two other talliers reach this one, to find winners; None: it adds up only.
    """
    if (home / TALLIER_FILE).exists():
        config = read_tallier_config(home)
        _check_same(config.tallier_id, config.coordinator_url, invitation, home)
    else:
        _refuse_rotation(invitation, home)
        config = TallierConfig(
            tallier_id=invitation.party_id,
            coordinator_url=invitation.url,
            coordinator_verify_key=invitation.verify_key,
            coordinator_seal_key=invitation.seal_key,
        )
    make_home(home)
    with closing(_open(home)) as database:
        _make_keys(home, invitation)
        ca_file = keep_certificates(home, invitation)
        config = config.model_copy(
            update={
                "coordinator_url": invitation.url,
                "coordinator_verify_key": invitation.verify_key,
                "coordinator_seal_key": invitation.seal_key,
                "ca_file": ca_file or config.ca_file,
            }
        )
        hint = "" if config.agents is not None else UNNAMED_AGENTS
        replace_file(home / TALLIER_FILE, settings_toml(config) + hint.encode(), mode=0o600)
        joined = _enrol(home, invitation, config, database, {})
    if listen is None:
        return joined
    return Joined(add_winner_identity(home, listen=listen), joined.roster_changed)


def pinned_changes(home: Path, invitation: Invitation) -> list[str]:
    """Return what a renewal would change of what an agent's home pins now, in words; nothing where there is no home
    yet.
    """
    if not (home / AGENT_FILE).exists() or not (home / POLICY_FILE).exists():
        return []
    policy: Policy = read_policy(home / POLICY_FILE)
    new = {one.party_id: one.seal_key for one in invitation.talliers}
    changes = [f"{name} is no longer trusted with a share" for name in sorted(policy.talliers.keys() - new.keys())]
    changes += [f"{name} is trusted with a share from now on" for name in sorted(new.keys() - policy.talliers.keys())]
    both = sorted(policy.talliers.keys() & new.keys())
    changes += [f"{name} has another key" for name in both if policy.talliers[name] != new[name]]
    if policy.coordinator.verify_key != invitation.verify_key:
        changes.append("the coordinator has another key")
    return changes


def _check_same(party_id: str, url: str, invitation: Invitation, home: Path) -> None:
    if party_id != invitation.party_id or (url != invitation.url and not invitation.is_rotation):
        raise InvalidSetting(
            f"{home} is the home of {party_id!r} at {url}, and the invitation is for {invitation.party_id!r} at "
            f"{invitation.url}; name another folder with --home"
        )


def _refuse_rotation(invitation: Invitation, home: Path) -> None:
    if invitation.is_rotation:
        raise InvalidSetting(
            f"the invitation is for new keys of {invitation.party_id!r}, and {home} is not its home; give it as --home"
        )


def _make_keys(home: Path, invitation: Invitation) -> None:
    """Make the keys to enroll: a new home's own, or for an existing home new ones next to the old."""
    used = home / JOINED_FILE
    is_enrolled = used.exists() and used.read_text().strip() == token_digest(invitation.token)
    if not (home / KEYS_FILE).exists():
        PartyKeys.generate().save(home / KEYS_FILE)
    elif invitation.is_rotation and not is_enrolled and not (home / NEXT_KEYS_FILE).exists():
        PartyKeys.generate().save(home / NEXT_KEYS_FILE)


def _enrol(home: Path, invitation: Invitation, config: Home, database: Database, facts: Mapping[str, Any]) -> Joined:
    """Enrol the keys of a home, put them into use, and try the connection."""
    next_keys = home / NEXT_KEYS_FILE
    keys = PartyKeys.load(next_keys if next_keys.exists() else home / KEYS_FILE)
    ca_file = path_in_home(home, config.ca_file)
    stop = threading.Event()
    http = CoordinatorHttp(config.coordinator_url, ca_file=ca_file, read_timeout_s=CHECK_S, stop=stop)
    with closing(http):
        try:
            said = http.post("/v1/enrolments", _request(invitation, keys), media_type="application/json")
            roster = str(json.loads(said)["roster_digest"])
        except Unreachable as error:
            raise Unavailable(
                f"the home {home} was made, but the coordinator could not be reached to enrol it ({error}). Run the "
                "same command again to go on"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise BadData("the server at the coordinator's URL is not a coordinator; check the URL") from None
    replace_file(home / JOINED_FILE, token_digest(invitation.token).encode() + b"\n", mode=0o600)
    if next_keys.exists():
        exchange_keys(home, keys)
        next_keys.unlink()
    public = write_public(
        home,
        public_document(keys.public, party_id=invitation.party_id, role=invitation.role, tallier=invitation.tallier),
    )
    _try_connection(home, invitation, keys, ca_file, database, facts)
    return Joined(public, roster != invitation.roster_digest)


def _request(invitation: Invitation, keys: PartyKeys) -> bytes:
    public: PublicKeys = keys.public
    who: dict[str, Any] = {
        "role": invitation.role,
        "party_id": invitation.party_id,
        "tallier": invitation.tallier,
        "verify_key": public.verify_key,
        "seal_key": public.seal_key,
        "token": invitation.token,
    }
    statement = enrolment_statement(coordinator_key=invitation.verify_key, **who)
    return json.dumps(who | {"signature": keys.sign_statement(statement)}).encode()


def _try_connection(
    home: Path,
    invitation: Invitation,
    keys: PartyKeys,
    ca_file: str | None,
    database: Database,
    facts: Mapping[str, Any],
) -> None:
    """Poll once, as the process of this home would: signed by it, sealed to it, answered by the pinned keys."""
    stop = threading.Event()
    limit = threading.Timer(CHECK_S, stop.set)
    limit.daemon = True
    limit.start()
    link = PartyLink(
        url=invitation.url,
        party_id=invitation.party_id,
        keys=keys,
        coordinator_key=invitation.verify_key,
        home=home,
        ledger=Ledger(database, clock=now_utc),
        facts=lambda: facts,
        stop=stop,
        ca_file=ca_file,
        wait_s=0.0,
    )
    try:
        with closing(link):
            link.poll()
            link.mail.settle()
    except (Interrupted, NotEnrolled) as error:
        raise Unavailable(
            f"{invitation.party_id!r} is enrolled, but the coordinator did not answer its first poll ({error}). "
            "Run the same command again"
        ) from None
    finally:
        limit.cancel()


def _open(home: Path) -> Database:
    try:
        return open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE)
    except JournalInUse:
        raise JournalInUse(
            f"the process of {home} runs, and would go on with what it has read; stop it first, and start it again "
            "afterwards"
        ) from None


def joined_policy(invitation: Invitation, fingerprint: str, wanted: Mapping[str, Any]) -> str:
    """Return the commented policy file of a site that joins; `read_policy` reads it back. The site can answer with it
    at once.

    Every field is filled in, and none relies on another party's word. What a coordinator could widen stays narrow. The
    policy relies on no noise but the agent's own. It opens no winners (whose rounds show ballots to all talliers
    together). A person sees every task before the agent answers.

    Args:
        fingerprint: of the backbone of the agent's shard.
        wanted: some of CHOICES, otherwise.

    Raises:
        InvalidSetting: a wish is outside its bounds.
    """
    chosen = {name: value if wanted.get(name) is None else wanted[name] for name, value in CHOICES.items()}
    text = commented_policy(
        fingerprint,
        chosen=chosen,
        pins={one.party_id: one.seal_key for one in invitation.talliers},
        verify_key=invitation.verify_key,
    )
    _checked(text)
    return text


def repinned_policy(path: Path, invitation: Invitation) -> str:
    """Return a policy with the talliers and the coordinator of an invitation; comments stay where they can.

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
    pins = "\n".join(f"{toml_value(one.party_id)} = {toml_value(one.seal_key)}" for one in invitation.talliers)
    text = _replaced(path.read_text(), "talliers", pins)
    text = _replaced(text, "coordinator", f"verify_key = {toml_value(invitation.verify_key)}")
    try:
        is_meant = _checked(text) == wanted
    except InvalidSetting:
        is_meant = False
    # A file that says the same in some other way, such as dotted names, loses its words but keeps its meaning.
    return text if is_meant else policy_toml(wanted)


def _replaced(text: str, table: str, lines: str) -> str:
    """Return a TOML text with these lines in its table instead of the old ones; its comments stay."""
    head, found, rest = _parted(rf"\[{table}\]", text)
    own, next_table, tail = _parted(r"\[", rest)
    kept = [line for line in own.splitlines() if not line.strip() or line.lstrip().startswith("#")]
    while kept and not kept[-1].strip():
        kept.pop()
    return (
        head + found + "\n".join([*kept, *lines.splitlines()]) + "\n" + ("\n" + next_table + tail if next_table else "")
    )


def _parted(begin: str, text: str) -> list[str]:
    """Return the text before the first line that begins so, that line, and the text after it."""
    return [*re.split(rf"(?m)(^{begin}[^\n]*\n)", text, maxsplit=1), "", ""][:3]


def _checked(text: str) -> Policy:
    try:
        return Policy.model_validate(tomllib.loads(text))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InvalidSetting(
            f"the policy cannot be made: {reason}; see docs/policy.md for what each field takes"
        ) from None
