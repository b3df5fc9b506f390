"""What commands ask of a running service, and the options that say where it is.

Commands of other rooms ask its client, which `connect` loads; what needs a model of the contract is a function here.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from labeler.errors import InvalidSetting

if TYPE_CHECKING:
    from api.client import Client
    from workers.progress import ProgressCallback

_ABSENT_PATIENCE_S = 1.0

Url = Annotated[str, typer.Option(envvar="LABELER_URL", help="Of the service, for example https://labels.example.org.")]
Token = Annotated[str, typer.Option(envvar="LABELER_TOKEN", help="Access token. Better in LABELER_TOKEN than here.")]
MaybeUrl = Annotated[
    str | None, typer.Option(envvar="LABELER_URL", help="Of the service, for example https://labels.example.org.")
]
MaybeToken = Annotated[
    str | None, typer.Option(envvar="LABELER_TOKEN", help="Access token. Better in LABELER_TOKEN than here.")
]
CaFile = Annotated[
    Path | None, typer.Option(envvar="LABELER_CA_FILE", help="PEM file of the authority behind its certificate.")
]

Role = Literal["admin", "requester", "viewer"]
ROLES: tuple[Role, ...] = ("admin", "requester", "viewer")


def connect(url: str, token: str, ca_file: Path | None) -> Client:
    """A client of a running service."""
    from api.client import Client

    # A person who waits is told at once that nothing is there; a job that is waited for is, through restarts.
    return Client(url, token, ca_file=ca_file, absent_patience_s=_ABSENT_PATIENCE_S)


def enrol_party(url: str, token: str, party: dict[str, Any], *, rotated: bool, ca_file: Path | None) -> dict[str, Any]:
    """Enrol a party, or give one that is enrolled new keys; for `labeler keys`."""
    from pydantic import ValidationError

    from api.schema import KeysRequest, PartyRequest
    from labeler.task import describe_validation

    keys = {"verify_key": party["verify_key"], "seal_key": party["seal_key"]}
    try:
        known = {"party_id": party["party_id"], "role": party.get("role"), "tallier": party.get("tallier")}
        request = PartyRequest.model_validate(keys | known)
    except ValidationError as error:
        raise InvalidSetting(describe_validation(error, "the file of public keys")) from None
    with connect(url, token, ca_file) as service:
        if rotated:
            return service.rotate(request.party_id, KeysRequest.model_validate(keys)).model_dump(mode="json")
        return service.enrol(request).model_dump(mode="json")


def make_invitation(url: str, token: str, fields: dict[str, Any], *, ca_file: Path | None) -> dict[str, Any]:
    """Invite a site; for `labeler invite`. The authority that this connection is checked against goes along."""
    from pydantic import ValidationError

    from api.schema import InvitationRequest
    from labeler.task import describe_validation

    try:
        certificates = "" if ca_file is None else ca_file.read_text(encoding="ascii")
        request = InvitationRequest.model_validate(fields | {"ca_certificates": certificates})
    except (OSError, UnicodeDecodeError):
        raise InvalidSetting(f"--ca-file {ca_file} cannot be read, or is no PEM file") from None
    except ValidationError as error:
        raise InvalidSetting(describe_validation(error, "the invitation")) from None
    with connect(url, token, ca_file) as service:
        return service.invite(request).model_dump(mode="json")


def prune_service(
    url: str, token: str, ca_file: Path | None, age: timedelta, *, dry_run: bool, progress: ProgressCallback
) -> dict[str, Any]:
    """Have a running service forget the jobs that ended longer ago than an age; what `labeler prune --url` does.

    Returns:
        {"url", "jobs": [id], "dry_run"}.
    """
    from api.schema import FINISHED

    before = datetime.now(UTC) - age
    with connect(url, token, ca_file) as service:
        ended = service.jobs(states=sorted(FINISHED))
        old = [job.job_id for job in ended if job.updated_at < before and job.forgotten_at is None]
        for number, job_id in enumerate([] if dry_run else old, 1):
            service.forget(job_id)
            progress("Jobs", number, len(old))
    return {"url": url, "jobs": old, "dry_run": dry_run}
