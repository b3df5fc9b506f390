"""The Python client: price, submit, wait, download, and look at budgets.

with Client("https://labels.example.org", token) as service:
    job = service.submit(task_id, images=Path("photos"))
    service.wait(job.job_id)
    service.labels(job.job_id, Path("labels.parquet"))

More than 600 lines: one class, whose methods mirror the routes one by one.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from api.client_http import (
    MAX_ANSWER_BYTES,
    FormBody,
    Part,
    ServiceBusy,
    ServiceConnection,
    ServiceProblem,
    image_parts,
    is_shard,
    lines,
    not_sent,
    parquet_of,
    public_shard,
    vectors_of,
)
from api.schema import (
    FINISHED,
    KEY,
    MAX_SYNCHRONOUS_QUERIES,
    MAX_THUMBNAILS,
    BudgetView,
    EstimateRequest,
    EstimateView,
    InvitationRequest,
    InvitationView,
    JobPage,
    JobRequest,
    JobState,
    JobView,
    KeysRequest,
    LabelFormat,
    LabelsOf,
    LabelsRequest,
    LabelsView,
    LedgerEntryView,
    LedgerPage,
    PartiesView,
    PartyRequest,
    PartyView,
    QueryBudgetPage,
    QueryBudgetView,
    ReadinessView,
    Role,
    Selection,
    ShareRequest,
    TaskPage,
    TaskRequest,
    TaskView,
    ThumbnailsRequest,
    ThumbnailsView,
    TokenPage,
    TokenRequest,
    TokenView,
    WithdrawnView,
)
from feature_store.image_files import in_words
from feature_store.results import current_format
from labeler.errors import InvalidSetting, TooLarge
from labeler.expectation import RECORDS_EACH
from labeler.methods.evaluate import DEFAULT_EPSILON, Layout
from labeler.setting import DEFAULT_DELTA
from labeler.settings import describe_validation, given

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "Client",
    "ServiceBusy",
    "ServiceProblem",
    "image_parts",
    "is_shard",
    "not_sent",
    "public_shard",
]

log = logging.getLogger(__name__)

MAX_NUMBERS_AS_JSON = 200_000
"""As JSON text a number takes up to 25 bytes, and the service accepts 16 MiB of JSON. Above this count, Parquet is also
faster on both sides."""

MAX_MODEL_BYTES = 2**30
MAX_FILE_BYTES = 4 * 2**30
"""Largest model, and largest file of labels or evidence, that is downloaded: labels of a million images take less."""
MAX_STREAM_BYTES = 2**40
"""Of a stream of events, of which one at a time is held."""

_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_STREAM_HEADERS = {"Accept": "text/event-stream"}

View = TypeVar("View", bound=BaseModel)
Model = TypeVar("Model", bound=BaseModel)


class Client:
    """A typed client of one service; close it, or use it as a context manager.

    Args:
        url: the service's: https://..., or http:// on this machine.
        token: access token.
        timeout_s: longest silence within one request.
        patience_s: how long a repeatable request is retried.
        absent_patience_s: the same while nothing answers at all, except in `wait`. When None, an address that never
            answered is given up within 10 s, and a service that did is waited for as long as `patience_s`.
        ca_file: PEM file of the authority behind the service's certificate; the system's when None.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 60.0,
        patience_s: float = 60.0,
        absent_patience_s: float | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._connection = ServiceConnection(
            url,
            token,
            timeout_s=timeout_s,
            patience_s=patience_s,
            absent_patience_s=absent_patience_s,
            ca_file=ca_file,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._connection.url!r})"

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()

    # Tasks and prices

    def create_task(self, request: TaskRequest) -> TaskView:
        """Make a task. A retry after a lost answer makes a second task; neither costs anything."""
        return self._post(TaskView, "/v1/tasks", request)

    def task(self, task_id: str) -> TaskView:
        """Read a task."""
        return self._get(TaskView, f"/v1/tasks/{quote(task_id, safe='')}")

    def tasks(self) -> Iterator[TaskView]:
        """All tasks, newest first."""
        for page in self._pages(TaskPage, "/v1/tasks"):
            yield from page.items

    def share_task(self, task_id: str, token_id: str) -> TaskView:
        """Let another requester's token submit jobs into a task of yours; its jobs are its own."""
        body = ShareRequest(token_id=token_id)
        return self._post(TaskView, f"/v1/tasks/{quote(task_id, safe='')}/shares", body)

    def unshare_task(self, task_id: str, token_id: str) -> TaskView:
        """Stop a token from submitting more jobs into a task of yours."""
        path = f"/v1/tasks/{quote(task_id, safe='')}/shares/{quote(token_id, safe='')}"
        return self._delete(TaskView, path)

    def estimate(self, request: EstimateRequest) -> EstimateView:
        """Price a job and tell whether the budgets cover it. Charges nothing."""
        return self._post(EstimateView, "/v1/jobs:estimate", request)

    # Jobs

    def submit(
        self,
        task_id: str,
        *,
        images: Path | Sequence[Path] | None = None,
        features: ArrayLike | None = None,
        query_ids: Sequence[str] | None = None,
        backbone_fingerprint: str | None = None,
        probe: str | None = None,
        selection: Selection | None = None,
        name: str = "",
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        leave_out: Collection[str] = (),
    ) -> JobView:
        """Submit a job. A retry after a lost answer makes no second job.

        Args:
            task_id: the task that sets the job's price and noise.
            images: a folder, a zip, a Parquet file, or image files. Names in a folder are relative to it. For a public
                shard, its features and their names, fingerprint and probe are sent.
            features: instead of images, float vectors of shape (queries, dimension), with `backbone_fingerprint`. Many
                vectors travel as Parquet, which changes no number.
            query_ids: names of the vectors.
            backbone_fingerprint: of the backbone that made the vectors.
            probe: your own backbone's features of the published probe (`Shard.probe`).
            selection: which images are asked about; all when None.
            name: for people.
            deadline_s: seconds until the job expires; the service's default when None.
            idempotency_key: give one to make a script safe to run twice; a random one when None.
            leave_out: names of images in the folder that are not sent. What is no image is not sent either, and the
                log names it (feature_store.image_files).

        Raises:
            InvalidSetting: not exactly one of images and features was given; there is no image; the vectors are not
                finite numbers; or another argument is out of bounds.
            ServiceProblem: the service refused, for example because the budget does not cover it.
        """
        if (images is None) == (features is None):
            raise InvalidSetting("give exactly one of images (files) and features (vectors)")
        if isinstance(images, Path) and is_shard(images):
            shard = public_shard(images)
            images, features, backbone_fingerprint = None, shard.features[shard.rows], shard.fingerprint
            query_ids, probe = [shard.sources[row] for row in shard.rows.tolist()], shard.probe
        vectors = vectors_of([[]] if features is None else features)
        as_json = (
            vectors.size <= MAX_NUMBERS_AS_JSON and sum(len(str(one)) for one in query_ids or ()) <= MAX_NUMBERS_AS_JSON
        )
        request = made(
            JobRequest,
            task_id=task_id,
            name=name,
            selection=selection or Selection(),
            deadline_s=deadline_s,
            features=vectors.tolist() if images is None and as_json else None,
            query_ids=list(query_ids) if query_ids is not None and as_json else None,
            backbone_fingerprint=backbone_fingerprint,
            probe=probe,
        )
        key = _key(idempotency_key)
        if images is not None:
            beside = _parts_of(images, leave_out)
        elif as_json:
            return self._post(JobView, "/v1/jobs", request, headers=key)
        else:
            beside = [Part("parquet", parquet_of(vectors, query_ids), "features.parquet")]
        return self._post_form(JobView, "/v1/jobs", request, beside, headers=key)

    def label(
        self, task_id: str, images: Path | Sequence[Path], *, wait_s: float = 30.0, idempotency_key: str | None = None
    ) -> LabelsView:
        """Label up to 64 images in one call; more of them go to `submit`.

        Args:
            task_id: the task that sets the price and the noise.
            images: a folder, an image file, or several.
            wait_s: how long the service may take, at most 60. After that only the job's id and state come back: call
                again with the same key, or `wait` for the job and fetch its `labels`.
            idempotency_key: see `submit`.

        Raises:
            InvalidSetting: there is no image, or more than 64, or an archive.
            ServiceProblem: the service refused, for example because an image cannot be read. Nothing was charged.
        """
        parts = _parts_of(images, ())
        if len(parts) > MAX_SYNCHRONOUS_QUERIES or {part.field for part in parts} != {"images"}:
            raise InvalidSetting(
                f"label takes up to {MAX_SYNCHRONOUS_QUERIES} image files in one call; found {len(parts)}, of kind "
                f"{parts[0].field!r}. Send more of them, a zip or Parquet by submit"
            )
        request = made(LabelsRequest, task_id=task_id, wait_s=wait_s)
        key = _key(idempotency_key)
        return self._post_form(LabelsView, "/v1/labels", request, parts, headers=key, timeout_s=wait_s + 30)

    def ask(self, request: LabelsRequest, *, idempotency_key: str | None = None) -> LabelsView:
        """Get labels of up to 64 vectors, or images in base64, if ready within `request.wait_s`; else the job's id."""
        key = _key(idempotency_key)
        return self._post(LabelsView, "/v1/labels", request, headers=key, timeout_s=request.wait_s + 30)

    def job(self, job_id: str) -> JobView:
        """Read a job."""
        return self._get(JobView, _job_path(job_id))

    def jobs(self, *, states: Sequence[JobState] = ()) -> Iterator[JobView]:
        """All jobs, newest first, or those in some states."""
        for page in self._pages(JobPage, "/v1/jobs", state=list(states) or None):
            yield from page.items

    def cancel(self, job_id: str) -> JobView:
        """Cancel a job; rounds that no agent was asked about are refunded."""
        return self._delete(JobView, _job_path(job_id))

    def forget(self, job_id: str) -> JobView:
        """Delete an ended job's images, questions and labels for good. Its charge stays."""
        return self._delete(JobView, f"{_job_path(job_id)}/data")

    def wait(self, job_id: str, on_change: Callable[[JobView], None] | None = None) -> JobView:
        """Wait until a job is finished, through lost connections and restarts of the service.

        Args:
            job_id: the job.
            on_change: called with the job at once and at every change.

        Returns:
            The finished job, whatever its state: completed, failed, refused, cancelled or expired.
        """
        seen = ""

        def watch() -> JobView | None:
            nonlocal seen
            before = seen
            try:
                for identity, job in self._events(job_id, seen):
                    seen = identity
                    if on_change is not None:
                        on_change(job)
                    if job.state in FINISHED:
                        return job
            except ServiceBusy:
                if seen == before:
                    raise
                return None  # there was progress, so the patience starts again
            # The stream ended early without an error: the service is restarting, or nothing was new.
            return self.job(job_id)

        while True:
            job = self._connection.repeated(watch, is_waiting=True)
            if job is not None and job.state in FINISHED:
                return job
            time.sleep(_PAUSE_S)

    def labels(
        self,
        job_id: str,
        path: Path,
        *,
        format: LabelFormat = "parquet",
        of: LabelsOf = "images",
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Path:
        """Download the labels of a completed job; the file appears under its name once it is whole.

        Args:
            job_id: the job.
            path: the file to write.
            format: of the file, as `labeler export --format` names it; formats that are folders are made by that.
            of: "images": the label of every image, asked about or not; waits until they are made. "questions": the
                questions and what was released for each.
            on_wait: called with a sentence that says how much is done, while they are made.

        Raises:
            InvalidSetting: there is no folder to put it in.
            ServiceProblem: the job is not completed.
        """
        if (now := current_format(format)) != format:
            warnings.warn(f"the format {format!r} is now {now!r}", DeprecationWarning, stacklevel=2)
        wanted: dict[str, str] = {"format": now, "of": of}
        place = f"{_job_path(job_id)}/labels"
        return self._download(place, path, params=wanted, most_bytes=MAX_FILE_BYTES, on_wait=on_wait)

    def student(self, job_id: str, path: Path, *, on_wait: Callable[[str], None] = lambda _: None) -> Path:
        """Download the student that labeled a job's images; waits until it is trained. As `labels`."""
        return self._download(f"{_job_path(job_id)}/student", path, most_bytes=MAX_MODEL_BYTES, on_wait=on_wait)

    def evaluation(self, job_id: str) -> dict[str, Any]:
        """Read the result of a completed job that evaluates a model; waits until it is made.

        Raises:
            ServiceProblem: the job is not completed, or it labels images.
        """
        found: dict[str, Any] = json.loads(self._connection.call("GET", f"{_job_path(job_id)}/evaluation", repeat=True))
        return found

    def evaluate(
        self,
        job_id: str,
        *,
        epsilon: float = DEFAULT_EPSILON,
        delta: float = DEFAULT_DELTA,
        layout: Layout | None = None,
        bands: int | None = None,
        records: int | None = None,
        **task: Any,
    ) -> JobView:
        """Have a job's student scored on the agents' records, by a new task with one job.

        The cells to count are chosen here from public facts: the noise of that price, and what the student says about
        the job's images.

        Args:
            job_id: a completed job.
            epsilon, delta: the price per private image.
            layout, bands, records: see `[evaluation]` in docs/task-file.md.
            **task: any other field of POST /v1/tasks, for example colluding_agents or records_per_person.

        Returns:
            The job as submitted. Once it is completed, read its `evaluation` and its `student`: the same model with
            measured confidence.

        Raises:
            InvalidSetting: a field is unknown or outside its bounds.
            ServiceProblem: the service refused, for example because the budget does not cover it.
        """
        # Imported here: other calls read no models.
        from feature_store.results.evaluations import question_of, released_model, stated_beside

        asked = self.task(self.job(job_id).task_id)
        classes, agents = asked.task["classes"], len(asked.participants)
        fields = {"name": f"evaluate {job_id}", "agents": list(asked.participants)} | given(task)
        fields |= {"method": "evaluate", "epsilon": epsilon, "delta": delta, "classes": classes}
        one = made(TaskRequest, **fields, max_queries=1)
        noise = self.estimate(EstimateRequest(task=one)).total_sigma_votes
        with tempfile.TemporaryDirectory() as folder:
            path = self.student(job_id, Path(folder) / "student.safetensors")
            self.labels(job_id, Path(folder) / "student_labels.parquet")
            model, stated = path.read_bytes(), stated_beside(path)
        stored = released_model(model, name="the job's student")
        question = question_of(
            model,
            num_classes=len(classes),
            sigma=noise,
            records=records or RECORDS_EACH * agents,
            layout=layout,
            bands=bands,
            stated=stated,
        )
        rows = question.rows(stored.dimension, num_classes=len(classes))
        own = self.create_task(made(TaskRequest, **fields, max_queries=len(rows)))
        return self.submit(
            own.task_id,
            features=rows,
            backbone_fingerprint=stored.fingerprint,
            name=f"evaluation of {job_id}"[:200],
        )

    def model(self, job_id: str, path: Path) -> Path:
        """Download the model that a completed job released; raises as `labels`, also where it asked for labels."""
        return self._download(f"{_job_path(job_id)}/model", path, most_bytes=MAX_MODEL_BYTES)

    def thumbnails(self, job_id: str, sources: Sequence[str]) -> dict[str, bytes | None]:
        """Return small JPEGs of some of a job's own images, by name; None where one cannot be shown.

        Raises:
            ServiceProblem: the job was sent as vectors, or its images were deleted.
        """
        found: dict[str, bytes | None] = {}
        for start in range(0, len(sources), MAX_THUMBNAILS):
            request = ThumbnailsRequest(sources=tuple(sources[start : start + MAX_THUMBNAILS]))
            view = self._post(ThumbnailsView, f"{_job_path(job_id)}:thumbnails", request)
            found |= {one.source: None if one.jpeg is None else base64.b64decode(one.jpeg) for one in view.items}
        return found

    # Budgets

    def budget(self) -> BudgetView:
        """All accounts."""
        return self._get(BudgetView, "/v1/budget")

    def agent_budget(self, agent_id: str) -> BudgetView:
        """The accounts of one agent."""
        return self._get(BudgetView, f"/v1/budget/agents/{quote(agent_id, safe='')}")

    def query_budgets(self, *, job_id: str | None = None) -> Iterator[QueryBudgetView]:
        """Return what each query took of the budget, newest first, of one job or of all jobs of this token.

        Of all jobs, those whose prices are being computed come last.

        Raises:
            ServiceProblem: there is no such job, or its prices take longer than this client is patient.
        """
        waiting: list[str] = []
        for page in self._pages(QueryBudgetPage, "/v1/budget/queries", job_id=job_id):
            yield from page.items
            waiting += page.waiting
        for one in dict.fromkeys(waiting):
            yield from self.query_budgets(job_id=one)

    def ledger(
        self, *, after: int = 0, account: str | None = None, search: str | None = None
    ) -> Iterator[LedgerEntryView]:
        """Iterate over ledger entries after a sequence number, in order."""
        for page in self._pages(LedgerPage, "/v1/ledger", start=str(after), account=account, search=search):
            yield from page.items

    def evidence(
        self, path: Path, *, task: str = "", since: datetime | None = None, until: datetime | None = None
    ) -> Path:
        """Download signed evidence of a task or a period; for an auditor's (viewer's) or an administrator's token.

        Raises:
            InvalidSetting: there is no folder to put it in.
            ServiceProblem: there is no such task, or the journal fails verification and so proves nothing.
        """
        period = {name: at.isoformat() for name, at in (("since", since), ("until", until)) if at is not None}
        wanted = period | ({"task": task} if task else {})
        return self._download("/v1/evidence", path, params=wanted, most_bytes=MAX_FILE_BYTES)

    # Administration

    def parties(self) -> PartiesView:
        """Agents and talliers."""
        return self._get(PartiesView, "/v1/parties")

    def enrol(self, request: PartyRequest) -> PartyView:
        """Enrol an agent or a tallier; a repeated call changes nothing."""
        return self._post(PartyView, "/v1/parties", request)

    def rotate(self, party_id: str, keys: KeysRequest) -> PartyView:
        """Give a party new keys."""
        return self._post(PartyView, f"/v1/parties/{quote(party_id, safe='')}:rotate", keys)

    def revoke_party(self, party_id: str) -> PartyView:
        """Revoke a party: nothing more is accepted from it."""
        return self._delete(PartyView, f"/v1/parties/{quote(party_id, safe='')}")

    def invite(self, request: InvitationRequest) -> InvitationView:
        """Invite a site. Not retried after a lost answer, because a second invitation voids the first."""
        return self._post(InvitationView, "/v1/invitations", request, repeat=False)

    def withdraw_invitation(self, party_id: str) -> WithdrawnView:
        """Withdraw the unused invitations for a name."""
        return self._delete(WithdrawnView, f"/v1/invitations/{quote(party_id, safe='')}")

    def whoami(self) -> TokenView:
        """Name and role of this client's token."""
        return self._get(TokenView, "/v1/whoami")

    def tokens(self) -> Iterator[TokenView]:
        """All tokens, without their secrets."""
        for page in self._pages(TokenPage, "/v1/tokens"):
            yield from page.items

    def create_token(self, name: str, role: Role) -> TokenView:
        """Make a token; its secret is in the answer and nowhere else. Not retried after a lost answer."""
        return self._post(TokenView, "/v1/tokens", TokenRequest(name=name, role=role), repeat=False)

    def revoke_token(self, token_id: str) -> TokenView:
        """Refuse a token from now on."""
        return self._delete(TokenView, f"/v1/tokens/{quote(token_id, safe='')}")

    def readiness(self) -> ReadinessView:
        """Tell whether jobs can be taken, and what is missing."""
        return ReadinessView.model_validate_json(self._connection.readiness())

    def _download(
        self,
        place: str,
        path: Path,
        *,
        params: dict[str, str] | None = None,
        most_bytes: int,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Path:
        if not path.parent.is_dir():
            # Checked before any request: labels may be large, and an answer that waits holds up others.
            raise InvalidSetting(
                f"there is no folder {str(path.parent)!r} to put {path.name!r} in; make it, or name another. "
                "Nothing was downloaded, and the service still has it"
            )
        if path.is_dir():
            raise InvalidSetting(f"{str(path)!r} is a folder; name a file in it")
        part = path.with_name(path.name + ".part")

        heard = ""

        def fetch() -> bool:
            nonlocal heard
            try:
                with (
                    self._connection.stream(place, params=params, most_bytes=most_bytes) as chunks,
                    part.open("wb") as file,
                ):
                    for chunk in chunks:
                        file.write(chunk)
            except TooLarge:
                part.unlink(missing_ok=True)
                raise
            except ServiceProblem as error:
                part.unlink(missing_ok=True)
                if not isinstance(error, ServiceBusy) or error.status != 503 or error.detail == heard:
                    raise
                heard = error.detail
                on_wait(heard)
                time.sleep(min(max(error.retry_after_s, _PAUSE_S), _LONGEST_PAUSE_S))
                return False  # it gets on, so the patience starts again
            return True

        while not self._connection.repeated(fetch):
            pass
        part.replace(path)
        return path

    def _get(self, view: type[View], path: str, **params: Any) -> View:
        return view.model_validate_json(self._connection.call("GET", path, params=params, repeat=True))

    def _delete(self, view: type[View], path: str) -> View:
        return view.model_validate_json(self._connection.call("DELETE", path, repeat=True))

    def _post(
        self,
        view: type[View],
        path: str,
        request: BaseModel,
        *,
        headers: dict[str, str] | None = None,
        repeat: bool = True,
        timeout_s: float | None = None,
    ) -> View:
        written = request.model_dump(mode="json", exclude_none=True)
        answer = self._connection.call("POST", path, json=written, headers=headers, repeat=repeat, timeout_s=timeout_s)
        return view.model_validate_json(answer)

    def _post_form(
        self,
        view: type[View],
        path: str,
        request: BaseModel,
        parts: Sequence[Part],
        *,
        headers: dict[str, str],
        timeout_s: float | None = None,
    ) -> View:
        form = FormBody([Part("request", request.model_dump_json(exclude_none=True).encode()), *parts])
        answer = self._connection.call(
            "POST", path, content=form, headers=form.headers | headers, repeat=True, timeout_s=timeout_s
        )
        return view.model_validate_json(answer)

    def _pages(self, view: type[View], path: str, *, start: str | None = None, **params: Any) -> Iterator[View]:
        after = start
        while True:
            page = self._get(view, path, after=after, **params)
            yield page
            after = page.next  # type: ignore[attr-defined]  # every page has it
            if after is None:
                return

    def _events(self, job_id: str, seen: str) -> Iterator[tuple[str, JobView]]:
        headers = _STREAM_HEADERS | ({"Last-Event-ID": seen} if seen else {})
        identity, data = "", ""
        path = f"{_job_path(job_id)}/events"
        with self._connection.stream(path, headers=headers, most_bytes=MAX_STREAM_BYTES) as parts:
            for line in lines(parts):
                if line.startswith("id:"):
                    identity = line[3:].strip()
                elif line.startswith("data:"):
                    data += line[5:]
                    if len(data) > MAX_ANSWER_BYTES:
                        raise TooLarge(f"an event has more than {MAX_ANSWER_BYTES} bytes. Is the URL right?")
                elif not line and data:
                    yield identity, JobView.model_validate_json(data)
                    data = ""


def _parts_of(images: Path | Sequence[Path], leave_out: Collection[str]) -> list[Part]:
    """Make the parts of a form, and name what is no image before anything is sent; `leave_out` needs no naming."""
    if files := [one for one in not_sent(images) if one.source not in leave_out]:
        log.warning("%d files are no images, and are not labeled: %s", len(files), in_words(files))
    return image_parts(images, leave_out)


def made(model: type[Model], **fields: Any) -> Model:
    """Build a request, validated as the service would.

    Raises:
        InvalidSetting: a field is missing, unknown or outside its bounds; the message names it.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidSetting(describe_validation(error, "the request", model=model)) from None


def _key(given: str | None) -> dict[str, str]:
    if given is not None and not re.fullmatch(KEY, given):
        raise InvalidSetting("an idempotency key has 1 to 200 visible ASCII characters and no spaces; take another")
    return {"Idempotency-Key": given or secrets.token_urlsafe(24)}


def _job_path(job_id: str) -> str:
    if not isinstance(job_id, str):
        raise InvalidSetting(f"a job's id is a text, such as job-0123456789abcdef0123; found {type(job_id).__name__}")
    return f"/v1/jobs/{quote(job_id, safe='')}"
