"""Commands that maintain homes: `journal`, `prune` and `evidence` for a ledger; `keys` and `invite` for parties."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, time
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from labeler.errors import InvalidSetting
from labeler.system.files import check_file
from workers.commands.console import (
    ROLES,
    CaFile,
    Home,
    Json,
    MaybeToken,
    MaybeUrl,
    Token,
    Url,
    connect,
    escaped,
    one_of,
    print_json,
    prune_service,
    tell,
    wrapped,
)

Reason = Annotated[str, typer.Option(help="Why; kept in the ledger.")]

journal_app = typer.Typer(
    help="Verify and back up a home's ledger; recover after its loss.\n\n"
    "Example: `labeler journal verify --home coordinator`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@journal_app.command()
def verify(home: Home, as_json: Json = False) -> None:
    """Read the whole ledger again: its chain, every step, every balance. Works while its owner runs.

    Example: `labeler journal verify --home coordinator`
    """
    from workers.homes.journals import verify_journal

    found = verify_journal(home)
    said = f"{found['entries']} entries, ending with {found['hash'][:16]}" if found["entries"] else "no entry yet"
    tell(found, f"The journal holds: {said}.", as_json=as_json)


@journal_app.command()
def backup(
    home: Home,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    as_json: Json = False,
) -> None:
    """Copy a home while its process runs: the journal as of one moment, its anchor, keys, settings and secrets.

    The copy holds secrets: keep it as safe as the home. Shards and uploaded images are not in it.

    Example: `labeler journal backup --home hospital-a --out backups/hospital-a-2027-03-01`
    """
    from workers.homes.journals import backup_home

    found = backup_home(home, out)
    said = f"{out} holds {', '.join(found['files'])}; the ledger ends with entry {found['entries']}."
    tell(found, said, as_json=as_json)


@journal_app.command("write-off")
def write_off(
    home: Home,
    account: Annotated[str, typer.Option(help="For example agent:hospital-a, or federation.")],
    reason: Reason,
    level: Annotated[str, typer.Option(help="instance or agent.")] = "instance",
    as_json: Json = False,
) -> None:
    """Treat the rest of an account as spent, when its charges are unknown. Stop its owner first.

    Example: `labeler journal write-off --home coordinator --account agent:hospital-a --reason "disk lost"`
    """
    from workers.homes.journals import write_off_account

    found = write_off_account(home, account, one_of("level", level, ("instance", "agent")), reason=reason)
    tell(found, f"{found['written_off_nano']} nano-units of {account} ({level}) are written off.", as_json=as_json)


@journal_app.command("accept-restored")
def accept_restored(home: Home, reason: Reason, as_json: Json = False) -> None:
    """Continue with an older journal that was restored, as a last resort; all that is left counts as spent.

    Example: `labeler journal accept-restored --home hospital-a --reason "disk lost, backup of March 1"`
    """
    from workers.homes.journals import accept_restored_journal

    found = accept_restored_journal(home, reason=reason)
    told = (
        ""
        if found["witness"] is None
        else "The witness outside this home has seen a newer one, and refuses this until it is told:\n"
        f"  cp {quote(str(home / 'journal.head'))} {quote(found['witness'])}\n"
    )
    words = (
        f"The journal goes on at entry {found['entries']}; nothing can be charged until a cap is raised.\n"
        + "".join(f"{line}\n" for line in found["next"])
        + f"{told}"
        "If this is a coordinator's, every site that saw the newer one consents, with\n"
        f"  labeler journal trust-restored --home HOME --head {found['head']}"
    )
    tell(found, words, as_json=as_json)


@journal_app.command("trust-restored")
def trust_restored(
    home: Home,
    head: Annotated[str, typer.Option(help="ENTRY:HASH, as `accept-restored` printed it at the coordinator.")],
    as_json: Json = False,
) -> None:
    """Consent, at a site, to a coordinator's journal that was restored from an older copy. Works while the party runs.

    Until then this party takes no part: it has seen charges that are missing now. Compare the head over the phone.

    Example: `labeler journal trust-restored --home hospital-a --head 118:3f9c...` (the whole hash)
    """
    from workers.homes.journals import trust_restored_journal

    found = trust_restored_journal(home, head)
    seen, accepted = found["seen"], found["accepted"]
    before = "what this party had seen cannot be read" if seen is None else f"had seen entry {_short(seen)}"
    tell(
        found,
        f"Before: {before}; kept in {Path(found['kept']).name}.\n"
        f"Accepted: entry {_short(accepted)}, and every journal that goes on from there.",
        as_json=as_json,
    )


def _short(head: dict[str, Any]) -> str:
    return f"{head['entries']} ({head['hash'][:16]})"


def prune(
    older_than: Annotated[str, typer.Option(help="Age since the end of a job: 30d, 12h, 45m.")],
    home: Annotated[Path | None, typer.Option(help="Home of a stopped coordinator, agent or tallier.")] = None,
    url: MaybeUrl = None,
    token: MaybeToken = None,
    ca_file: CaFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; list what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Delete images, questions and labels of ended jobs. Charges and digests stay; the journal still verifies.

    Use --url for a running service, --home for a stopped home.

    Examples:

    `labeler prune --older-than 30d --url https://labels.example.org --dry-run`

    `labeler prune --older-than 30d --home talliers/tallier-0`
    """
    from workers.homes.journals import parse_age, prune_home
    from workers.progress import progress_bars

    age = parse_age(older_than)
    with progress_bars(quiet=as_json) as progress:
        if home is not None:
            # A named home wins over an address in the environment.
            found = prune_home(home, age, dry_run=dry_run, progress=progress)
        elif url is not None and token is not None:
            found = prune_service(url, token, ca_file, age, dry_run=dry_run, progress=progress)
        else:
            raise InvalidSetting("name a home (--home), or a service and a token (--url, --token)")
    if as_json:
        print_json(found)
        return
    _tell_pruned(found)


def _tell_pruned(found: dict[str, Any]) -> None:
    would = "would go" if found["dry_run"] else "went"
    typer.echo(f"Jobs    {len(found['jobs'])} {would}: what they sent, asked and got; their charges stay")
    if found.get("rounds"):
        typer.echo(f"Rounds  {found['rounds']} {would}: shares and sums that expired")
    if found.get("files"):
        typer.echo(f"Files   {', '.join(found['files'])} {would}")
    if not found["dry_run"] and "bytes" in found:
        typer.echo(f"Room    {found['bytes']} bytes")


JournalHome = Annotated[Path | None, typer.Option(help="Home folder of a coordinator or of an agent; it may run.")]

evidence_app = typer.Typer(invoke_without_command=True, no_args_is_help=True, rich_markup_mode="markdown")


@evidence_app.callback()
def evidence(
    context: typer.Context,
    home: JournalHome = None,
    url: MaybeUrl = None,
    token: MaybeToken = None,
    task: Annotated[str, typer.Option(help="Digest of one task.")] = "",
    since: Annotated[str, typer.Option(help="Jobs submitted from this day or time on, in UTC: 2027-03-01.")] = "",
    until: Annotated[str, typer.Option(help="And before this one.")] = "",
    out: Annotated[Path, typer.Option(help="File to write; a page to print comes beside it.")] = Path("evidence.json"),
    kind: Annotated[
        str,
        typer.Option("--format", help="signed; or dp-registry: also a record for the registry of DP deployments."),
    ] = "signed",
    ca_file: CaFile = None,
    audit: Annotated[
        list[Path] | None, typer.Option(help="audit.json of `labeler audit`, of a task in it; with --home; repeat.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write signed evidence of what was asked and what it cost, from a verified journal; or verify it.

    The journal is read from its first entry; one that was cut or edited gives no evidence. From an agent's home, the
    document is that agent's own. For a running service use `--url`, with an administrator's or a viewer's token.

    A record for the registry (dp-registry) is about one task. It is written as an extra YAML file: a draft without
    names.

    Examples:

    `labeler evidence --home coordinator --out evidence.json
    --task 3f9a0c51d27be846a1f3c09e5d7b82640e1c9f3a5b7d2468ace013579bdf2468`

    `labeler evidence --home coordinator --format dp-registry
    --task 3f9a0c51d27be846a1f3c09e5d7b82640e1c9f3a5b7d2468ace013579bdf2468`
    """
    if context.invoked_subcommand is not None:
        return
    chosen = one_of("format", kind, ("signed", "dp-registry"))
    from feature_store.results.evidence import read_signed, render_page
    from labeler.evidence.registry import as_yaml, registry_record
    from labeler.system.files import read_named, replace_file

    begins, ends = _moment("since", since), _moment("until", until)
    check_file(out)
    page = out.with_suffix(".html")
    if page == out:
        raise InvalidSetting(f"--out names the signed file, and {page} is the page written next to it; choose another")
    check_file(page)
    record = out.with_suffix(".yaml") if chosen == "dp-registry" else None
    check_file(record)
    if home is not None:
        from labeler.auditing import read_audit
        from labeler.ledger.evidence import EvidenceScope
        from workers.homes.evidence import make_evidence

        counted = [read_audit(read_named(path)) for path in audit or []]
        signed = make_evidence(home, EvidenceScope(task, begins, ends), counted)
        replace_file(out, signed.to_bytes(), mode=0o600)
    elif audit:
        raise InvalidSetting("an audit goes into evidence that is made and signed here: name the home (--home)")
    elif url is not None and token is not None:
        with connect(url, token, ca_file) as service:
            service.evidence(out, task=task, since=begins, until=ends)
        signed = read_signed(out.read_bytes())
    else:
        raise InvalidSetting("name a home to make evidence from (--home), or a service (--url and --token)")
    shown = render_page(signed.evidence, verify_key=signed.verify_key, signature=signed.signature)
    replace_file(page, shown.encode(), mode=0o600)
    if record is not None:
        replace_file(record, as_yaml(registry_record(signed.evidence)).encode(), mode=0o600)
    journal = signed.evidence.facts.journal
    remarks = list(signed.evidence.remarks)
    tell(
        {"out": str(out), "page": str(page), "entries": journal.entries, "head": journal.head, "remarks": remarks}
        | ({} if record is None else {"record": str(record)}),
        f"{out} is signed; {page} is the same to print. The journal was verified to entry {journal.entries}.",
        *([] if record is None else [f"{record} is a draft for the registry of deployments; it says what to fill in."]),
        *(f"Note: {escaped(remark)}" for remark in remarks),
        as_json=as_json,
    )


@evidence_app.command("verify")
def verify_evidence(
    file: Annotated[Path, typer.Argument(help="The file that `labeler evidence` wrote.")],
    key: Annotated[str | None, typer.Option(help="The party's verify_key, 64 hexadecimal digits.")] = None,
    home: JournalHome = None,
    as_json: Json = False,
) -> None:
    """Check a file of evidence: its signature, every price by a new computation, and with --home the journal.

    Without --key or --home the signature shows that nothing was changed since, but not who signed.

    Example: `labeler evidence verify evidence.json --key 9d61b19d...`
    """
    from feature_store.results.evidence import MAX_BYTES, read_signed
    from labeler.system.files import read_named
    from workers.homes.evidence import check_evidence

    signed = read_signed(read_named(file, most_bytes=MAX_BYTES + 1))
    checked = check_evidence(signed, verify_key=key, home=home)
    if as_json:
        print_json({"holds": not checked.wrong, "wrong": list(checked.wrong), "confirmed": list(checked.confirmed)})
    else:
        for line in checked.confirmed:
            typer.echo(f"Holds: {line}.")
        for remark in signed.evidence.remarks:
            typer.echo(f"It says of itself: {escaped(remark)}")
        for line in checked.wrong:
            typer.echo(f"Does not hold: {escaped(line)}")
    if checked.wrong:
        sys.exit(1)


def _moment(name: str, text: str) -> datetime | None:
    """Parse a day or a time of ISO 8601. The default zone is UTC; a day alone means its start."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSetting(f"--{name} is a day or a time such as 2027-03-01 or 2027-03-01T12:00:00Z") from None
    if len(text) == len("2027-03-01"):
        found = datetime.combine(found.date(), time())
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


keys_app = typer.Typer(
    help="Make, show, enrol, rotate and revoke keys; make access tokens.\n\n"
    'Example: `labeler keys token --home coordinator --name "data team" --role requester`',
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@keys_app.command()
def make(home: Home, as_json: Json = False) -> None:
    """Make keys for a home that has none, and write its public ones to keys.public.json.

    Example: `labeler keys make --home coordinator`
    """
    from workers.homes.new import make_missing_keys

    _tell_public(make_missing_keys(home), home, as_json=as_json)


@keys_app.command()
def show(home: Home, as_json: Json = False) -> None:
    """Show the public keys of a home and their fingerprint, and write them to keys.public.json.

    Example: `labeler keys show --home hospital-a`
    """
    from workers.homes.new import show_keys

    _tell_public(show_keys(home), home, as_json=as_json)


@keys_app.command()
def rotate(home: Home, as_json: Json = False) -> None:
    """Replace the keys of a home; stop its process first, then have the new ones enrolled with --rotate.

    The old keys stay in the same folder, as keys.json.SOME_DATE, until you delete them.

    Example: `labeler keys rotate --home hospital-a`
    """
    from workers.homes.new import rotate_keys

    _tell_public(rotate_keys(home), home, as_json=as_json)


@keys_app.command()
def enrol(
    public: Annotated[Path, typer.Argument(help="The party's keys.public.json.")],
    url: Url,
    token: Token,
    rotated: Annotated[bool, typer.Option("--rotate", help="The party is enrolled; give it these new keys.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="The fingerprint was compared already; do not ask.")] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Enrol an agent or a tallier at a running service, after comparing its fingerprint over the phone.

    Example: `labeler keys enrol hospital-a.public.json --url https://labels.example.org`
    """
    from api.schema import KeysRequest, PartyRequest
    from workers.homes.new import read_public

    party = read_public(public)
    keys = {name: party[name] for name in ("verify_key", "seal_key")}
    known = {name: party.get(name) for name in ("party_id", "role", "tallier")}
    request = PartyRequest.model_validate(keys | known)
    if not yes:
        question = f"Does {party['party_id']} ({party.get('role')}) read out the fingerprint {party['fingerprint']}?"
        typer.confirm(question, abort=True, err=True)
    with connect(url, token, ca_file) as service:
        new_keys = KeysRequest.model_validate(keys) if rotated else None
        view = service.enrol(request) if new_keys is None else service.rotate(request.party_id, new_keys)
    said = f"{view.party_id} is enrolled as {view.role} with fingerprint {view.fingerprint}."
    tell(view.model_dump(mode="json"), said, as_json=as_json)


@keys_app.command()
def revoke(
    party_id: Annotated[str, typer.Argument(help="Name the party is enrolled under.")],
    url: Url,
    token: Token,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Revoke a party's keys, at once and for good.

    Example: `labeler keys revoke hospital-a --url https://labels.example.org`
    """
    with connect(url, token, ca_file) as client:
        view = client.revoke_party(party_id)
    tell(view.model_dump(mode="json"), f"{view.party_id} is revoked.", as_json=as_json)


@keys_app.command()
def token(
    name: Annotated[str, typer.Option(help="Whose token it is.")],
    role: Annotated[str, typer.Option(help="admin, requester or viewer.")],
    home: Annotated[
        Path | None, typer.Option(help="The coordinator's home, while the coordinator is stopped: for the first token.")
    ] = None,
    url: MaybeUrl = None,
    access: Annotated[
        str | None, typer.Option("--token", envvar="LABELER_TOKEN", help="An administrator's token, with --url.")
    ] = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Make an access token. It is shown only now, because only its hash is stored.

    Example: `labeler keys token --home coordinator --name "data team" --role requester`
    """
    wanted = one_of("role", role, ROLES)
    if home is not None:
        from workers.homes.new import make_token_offline

        made: dict[str, Any] = make_token_offline(home, name=name, role=wanted)
    elif url is not None and access is not None:
        with connect(url, access, ca_file) as client:
            made = client.create_token(name, wanted).model_dump(mode="json")
    else:
        raise InvalidSetting("name the coordinator's home (--home), or a running service (--url and --token)")
    said = f"Token of {made['name']} ({made['role']}), shown now and never again:"
    tell(made, said, made["token"], as_json=as_json)


def _tell_public(document: dict[str, Any], home: Path, *, as_json: bool) -> None:
    tell(
        document,
        f"{document['party_id']} ({document['role']})",
        f"fingerprint  {document['fingerprint']}",
        f"verify_key   {document['verify_key']}",
        f"seal_key     {document['seal_key']}",
        f"Both keys are in {home / 'keys.public.json'}, to be sent to others.",
        as_json=as_json,
    )


def invite(
    name: Annotated[str, typer.Argument(help="Name the site is to be enrolled under, for example hospital-a.")],
    url: Url,
    token: Token,
    role: Annotated[str, typer.Option(help="agent (a hospital) or tallier.")] = "agent",
    number: Annotated[
        int | None, typer.Option(min=0, max=2, help="Which tallier; the lowest that is free otherwise.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="It is enrolled: new keys for it, and the talliers as they are now.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=30, help="How long the invitation can be used.")] = 7,
    out: Annotated[Path | None, typer.Option(help="File to write; NAME.invitation.json otherwise.")] = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Withdraw the unused invitation for this name.")] = False,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Invite a site: make one signed file with all it needs, and a phrase to compare by phone.

    The file includes the certificate of your own authority (--ca-file). Invite the talliers first: a hospital pins all
    of them when it joins.

    Example: `labeler invite hospital-a --url https://labels.example.org`
    """
    from api.schema import InvitationRequest
    from workers.homes.joining import write_invitation

    if withdraw:
        with connect(url, token, ca_file) as client:
            gone = client.withdraw_invitation(name)
        many = "The invitation" if gone.withdrawn == 1 else f"{gone.withdrawn} invitations"
        said = f"{many} of {escaped(name)} {'is' if gone.withdrawn == 1 else 'are'} withdrawn."
        tell(gone.model_dump(mode="json"), said, as_json=as_json)
        return
    chosen = one_of("role", role, ("agent", "tallier"))
    path = out or Path(f"{name}.invitation.json")
    check_file(path)
    try:
        certificates = "" if ca_file is None else ca_file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        raise InvalidSetting(f"--ca-file {ca_file} cannot be read, or is not a PEM file") from None
    request = InvitationRequest(
        party_id=name, role=chosen, tallier=number, rotate=rotate, valid_days=days, ca_certificates=certificates
    )
    with connect(url, token, ca_file) as client:
        made = client.invite(request).model_dump(mode="json")
    write_invitation(path, made["document"])
    if as_json:
        told = {key: made[key] for key in ("invitation_id", "party_id", "role", "expires_at", "phrase")}
        print_json(told | {"file": str(path)})
        return
    what = "--shard SHARD --home HOME" if chosen == "agent" else "--home HOME"
    wrapped(f"Send {path} to {name}, and to nobody else. Its people run")
    typer.echo(f"  labeler {chosen} join {path.name} {what}")
    typer.echo("and ask you by telephone for this phrase, which they type in:")
    typer.echo(f"  {made['phrase']}")
    typer.echo(f"It can be used once, until {made['expires_at'][:16].replace('T', ' ')} UTC.")
