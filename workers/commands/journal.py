"""`labeler journal`: verify, backup, write-off, accept-restored, trust-restored."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from workers.commands.console import Json, one_of, tell

Home = Annotated[Path, typer.Option(help="Home folder of a coordinator, an agent or a tallier.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the ledger.")]

journal_app = typer.Typer(
    help="Verify and back up a home's ledger; go on after it was lost.",
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
    """Treat all that is left of one account as spent, where nobody knows what was charged. Stop its owner first.

    Example: `labeler journal write-off --home coordinator --account agent:hospital-a --reason "disk lost"`
    """
    from workers.homes.journals import write_off_account

    found = write_off_account(home, account, one_of("level", level, ("instance", "agent")), reason=reason)
    tell(found, f"{found['written_off_nano']} nano-units of {account} ({level}) are written off.", as_json=as_json)


@journal_app.command("accept-restored")
def accept_restored(home: Home, reason: Reason, as_json: Json = False) -> None:
    """The last resort after an older journal was restored: go on with it, all that is left counted as spent.

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
        f"The journal goes on at entry {found['entries']}; nothing can be charged until a cap is raised.\n{told}"
        "If this is a coordinator's, every site that saw the newer one consents, with\n"
        f"  labeler journal trust-restored --home HOME --head {found['head']}"
    )
    tell(found, words, as_json=as_json)


@journal_app.command("trust-restored")
def trust_restored(
    home: Annotated[Path, typer.Option(help="Home folder of an agent or a tallier.")],
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
