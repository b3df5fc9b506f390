"""`labeler evidence`: what was asked of private records, signed, from a verified journal; `labeler evidence verify`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labeler.errors import InvalidSetting
from workers.commands.console import Json, escaped, print_json, tell
from workers.commands.places import check_file
from workers.commands.service import CaFile, MaybeToken, MaybeUrl, connect

if TYPE_CHECKING:
    from feature_store.evidence_file import SignedEvidence

MaybeHome = Annotated[Path | None, typer.Option(help="Home folder of a coordinator or of an agent; it may run.")]

evidence_app = typer.Typer(invoke_without_command=True, no_args_is_help=True, rich_markup_mode="markdown")


@evidence_app.callback()
def evidence(
    context: typer.Context,
    home: MaybeHome = None,
    url: MaybeUrl = None,
    token: MaybeToken = None,
    task: Annotated[str, typer.Option(help="Digest of one task.")] = "",
    since: Annotated[str, typer.Option(help="Jobs submitted from this day or time on, in UTC: 2027-03-01.")] = "",
    until: Annotated[str, typer.Option(help="And before this one.")] = "",
    out: Annotated[Path, typer.Option(help="File to write; a page to print comes beside it.")] = Path("evidence.json"),
    ca_file: CaFile = None,
    audit: Annotated[
        list[Path] | None, typer.Option(help="audit.json of `labeler audit`, of a task in it; with --home; repeat.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write signed evidence of what was asked and what it cost, from a verified journal; or verify it.

    The journal is read from its first entry; one that was cut or edited gives no evidence. Of an agent's home the
    document is that agent's own. Of a running service: `--url`, with an administrator's or a viewer's token.

    Example: `labeler evidence --home coordinator --task 3f9a... --out evidence.json`
    """
    if context.invoked_subcommand is not None:
        return
    from feature_store.durable import replace_file
    from feature_store.evidence_page import render_page

    check_file(out)
    page = out.with_suffix(".html")
    if page == out:
        raise InvalidSetting(f"--out names the signed file, beside which its page comes as {page}; name it otherwise")
    check_file(page)
    if home is not None:
        signed = _made(home, task, since, until, audit or [])
        replace_file(out, signed.to_bytes(), mode=0o600)
    elif audit:
        raise InvalidSetting("an audit goes into evidence that is made and signed here: name the home (--home)")
    elif url is not None and token is not None:
        signed = _asked(url, token, ca_file, out, task, since, until)
    else:
        raise InvalidSetting("evidence is made from a home (--home), or asked of a service (--url and --token)")
    shown = render_page(signed.evidence, verify_key=signed.verify_key, signature=signed.signature)
    replace_file(page, shown.encode(), mode=0o600)
    journal = signed.evidence.facts.journal
    remarks = list(signed.evidence.remarks)
    tell(
        {"out": str(out), "page": str(page), "entries": journal.entries, "head": journal.head, "remarks": remarks},
        f"{out} is signed; {page} is the same to print. The journal was verified to entry {journal.entries}.",
        *(f"Note: {escaped(remark)}" for remark in remarks),
        as_json=as_json,
    )


@evidence_app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The file that `labeler evidence` wrote.")],
    key: Annotated[str | None, typer.Option(help="The party's verify_key, 64 hexadecimal digits.")] = None,
    home: MaybeHome = None,
    as_json: Json = False,
) -> None:
    """Check a file of evidence: its signature, every price computed again, and with --home that the journal agrees.

    Without --key or --home the signature shows that nothing was changed since, and not who signed.

    Example: `labeler evidence verify evidence.json --key 9d61b19d...`
    """
    from feature_store.evidence_file import MAX_BYTES, read_signed
    from feature_store.named_files import read_named
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


def _made(home: Path, task: str, since: str, until: str, audits: list[Path]) -> SignedEvidence:
    from feature_store.journal.evidence import Wanted
    from feature_store.named_files import read_named
    from labeler.auditing import read_audit
    from workers.homes.evidence import make_evidence

    counted = [read_audit(read_named(path)) for path in audits]
    return make_evidence(home, Wanted(task, _moment("since", since), _moment("until", until)), counted)


def _asked(url: str, token: str, ca_file: Path | None, out: Path, task: str, since: str, until: str) -> SignedEvidence:
    from feature_store.evidence_file import read_signed

    with connect(url, token, ca_file) as service:
        service.evidence(out, task=task, since=_moment("since", since), until=_moment("until", until))
    return read_signed(out.read_bytes())


def _moment(name: str, text: str) -> datetime | None:
    """A day or a time of ISO 8601; without a zone it is UTC, without a time the day's beginning."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSetting(f"--{name} is a day or a time such as 2027-03-01 or 2027-03-01T12:00:00Z") from None
    if len(text) == len("2027-03-01"):
        found = datetime.combine(found.date(), time())
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
