"""Submission of a job: everything is checked, claimed and reserved in one transaction, before any agent is asked.

Either the job exists with its queries claimed and its worst case reserved in every account, or it is stored as
"refused" with nothing claimed or reserved. The idempotency key is stored in the same transaction. So a request that is
sent twice, even concurrently, makes one job or gets the same refusal twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from api.coordinator.budgets import refusal
from api.coordinator.config import CoordinatorConfig
from api.coordinator.estimates import Prices
from api.coordinator.ownership import Owners, Reader, own_spenders
from api.coordinator.pricing import charge_at, price_view, worst_case
from api.coordinator.roster import facts_of
from api.coordinator.stores import INCOMING, Stores
from api.coordinator.uploads import Upload, upload_of_features
from api.coordinator.views import read_view, read_views
from api.limits import TooManyRequests
from api.problems import KeptRefusal, problem_of
from api.schema import FINISHED, JobRequest, JobView, PassedOver, Selection
from feature_store.image_files import SHOWN
from feature_store.results.evaluations import released_model
from feature_store.results.job_process import given_features
from feature_store.rows import refuse_other_probes
from labeler.accounting.losses import NotCertified, only_certified
from labeler.batching import batch_queries_of, check_round_fits, round_sizes
from labeler.errors import (
    BadData,
    BudgetExceeded,
    IdempotencyMismatch,
    InvalidSetting,
    InvalidTask,
    MixedShards,
    NotFound,
    NotReady,
)
from labeler.ledger.database import Connection
from labeler.ledger.jobs import Idempotency, JobRecord, RoundRecord
from labeler.ledger.ledger import Charge
from labeler.ledger.parties import PartyStore
from labeler.ledger.rounds import FEDERATION, proposed_id
from labeler.ledger.tasks import TaskRecord
from labeler.methods.evaluate import Scored
from labeler.task import Task

log = logging.getLogger("labeler.coordinator")

MAX_KEY_LENGTH = 255


@dataclass(frozen=True)
class _Order:
    """A request that was checked and priced, ready to be written."""

    job: JobRecord
    task: TaskRecord
    sizes: tuple[int, ...]
    idempotency: Idempotency | None


@dataclass(frozen=True)
class Submissions:
    """Takes jobs, or refuses them.

    Attributes:
        config: home, limits, deadlines, backbones.
        owners: looks up the tasks that a reader may use.
        prices: queue for prices that take seconds; without it they are computed here.
        on_taken: called with the ids of a new and durable job and of its token; not called for a repeated request.
    """

    config: CoordinatorConfig
    stores: Stores
    owners: Owners
    prices: Prices | None = None
    on_taken: Callable[[str, str], None] = lambda _, __: None

    def submit(
        self, request: JobRequest, upload: Upload | None, *, reader: Reader, idempotency_key: str | None = None
    ) -> JobView:
        """Accept a job, or refuse it.

        Args:
            upload: images or vectors sent with the request; None if the vectors are in the request itself.
            reader: the requester; the job will belong to its token.
            idempotency_key: the same key with the same request gives the same job.

        Returns:
            The job, which may be an earlier one made under this key.

        Raises:
            NotFound: there is no such task, or this reader may not use it.
            InvalidSetting, InvalidTask, TooLarge, BadData: the request does not fit the task.
            IdempotencyMismatch: the key was used for another request.
            BudgetExceeded: an account does not cover it. The job is stored as "refused", and `problem_of` gives its id.
            TooManyRequests: too many jobs of this token ended before any agent was asked.
            TooManyRequests, PricesWait: or its price takes seconds, and others are before it.
        """
        try:
            upload = _only_upload(request, upload, self.config)
            record = self.owners.task(reader, request.task_id)
            order = self._order(request, upload, record, by=reader.token_id, key=idempotency_key)
            # A known key is looked up before the upload is moved.
            taken = _known(order, self.stores) or self._take(order, upload)
            if isinstance(taken, Idempotency):
                return _with_passed_over(_again(taken, self.stores), upload)
            self.on_taken(taken.job_id, reader.token_id)
            return _with_passed_over(taken, upload)
        finally:
            if upload is not None:
                upload.discard()

    def _order(self, request: JobRequest, upload: Upload, record: TaskRecord, *, by: str, key: str | None) -> _Order:
        task = record.task
        axes, chosen = task.training.axes if task.training else None, request.selection
        if chosen != Selection() and (why := task.traits.no_choice):
            raise InvalidSetting(f"leave selection out for method {task.method}: {why}")
        strategy, count = task.traits.selection(chosen.strategy, chosen.count, axes=axes)
        num_queries = task.max_queries if strategy == "weights" else _num_queries(chosen, upload)
        _check_backbone(request, upload, record, self.config)
        _check_dimension(upload, record, self.stores.parties)
        if evaluates := task.traits.labels is None:
            _check_model(upload, task)
        # An evaluation asks about a model, which each agent compares with its own.
        _check_probe(request, upload, record, self.stores.parties, is_needed=not evaluates)
        if num_queries > task.max_queries:
            raise InvalidSetting(
                f"{num_queries} queries are more than the {task.max_queries} of the task; send fewer images, "
                "ask about some of them (selection.count of POST /v1/jobs), or make a larger task"
            )
        if num_queries < task.traits.least_asked(task):
            most = task.max_queries
            ways = f"choose {most} (selection.count)" if upload.count >= most else f"send {most} images or vectors"
            if task.method == "reverse-knn":
                ways += ", or make a task of method knn, which is asked any number at a time"
            raise InvalidTask(
                f"a {task.method} task is asked all its {most} queries at once, because its price is for all of them "
                f"together; this job has {num_queries}. Make a task with max_queries = {num_queries}, or {ways}"
            )
        now = self.stores.clock()
        deadline_s = self.config.timing.job_deadline_s if request.deadline_s is None else request.deadline_s
        job = JobRecord(
            job_id=f"job-{secrets.token_hex(10)}",
            task_digest=record.digest,
            name=request.name,
            state="queued",
            images=upload.count,
            num_queries=num_queries,
            first_query=0,
            strategy=strategy,
            count=count,
            seed=chosen.seed,
            source=upload.source,
            created_at=now,
            updated_at=now,
            expires_at=now + timedelta(seconds=deadline_s),
            created_by=by,
        )
        check_round_fits(task, num_queries)
        sizes = round_sizes(task, num_queries, batch_queries=batch_queries_of(task, upload.dimension))
        idempotency = None
        if key is not None:
            if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
                raise InvalidSetting(f"an idempotency key is a printable text of 1 to {MAX_KEY_LENGTH} characters")
            idempotency = Idempotency(
                token_id=by, key=key, body_digest=request_digest(request, upload), job_id=job.job_id
            )
        return _Order(job, record, sizes, idempotency)

    def _take(self, order: _Order, upload: Upload) -> JobView | Idempotency:
        """Move the upload to its place and write the job.

        Returns:
            The job, or the key's stored outcome if another request was faster.
        """
        target = self.config.home / "jobs" / order.job.job_id / "upload.parquet"
        accepted = False
        # Moved first, so that an existing job always has its upload.
        upload.move_to(target)
        try:
            taken = _accept(order, self.stores, most=self.config.limits.max_unasked_jobs_per_day, prices=self.prices)
            accepted = isinstance(taken, JobView)
            return taken
        except BudgetExceeded as error:
            if not error.account:
                raise
            error.last_spenders = own_spenders(error.last_spenders, order.job.created_by, self.stores.jobs.creators)
            return self._refuse(order, error)
        finally:
            if not accepted and not _is_kept(order, self.stores):
                target.unlink(missing_ok=True)
                with suppress(OSError):
                    target.parent.rmdir()

    def _refuse(self, order: _Order, error: BudgetExceeded) -> Idempotency:
        """Store the refused job with its reason and its key, and raise the reason.

        Returns:
            The key's stored outcome if another request was faster.

        Raises:
            BudgetExceeded: the refusal.
        """
        job = order.job
        # As the estimate states it: without the rounding of single rounds, 0 for a level without a finite price.
        error.asked = charge_at(price_view(order.task.task, job.num_queries), error.level) or 0
        worded = refusal(error, order.task.task, queries=job.num_queries, delta=self.config.delta)
        problem = problem_of(worded, delta=self.config.delta, job_id=job.job_id)
        with self.stores.database.write() as connection:
            known = _known(order, self.stores, connection=connection)
            if known is not None:
                return known
            refused = replace(job, state="refused", problem=problem)
            self.stores.jobs.add(refused, [], idempotency=order.idempotency, connection=connection)
        raise KeptRefusal(problem)


def cancel(job_id: str, *, stores: Stores) -> JobView:
    """Stop a job. Rounds in which no agent was asked are given back; asked ones stay charged.

    Raises:
        NotFound: there is no such job.
        NotReady: it has ended in another way.
    """
    job = stores.jobs.get(job_id)
    if job.state not in FINISHED:
        job = stores.settlement.end(job, "cancelled", None)
    if job.state != "cancelled":
        raise NotReady(f"job {job_id} has ended ({job.state}), so it cannot be cancelled")
    return read_view(job_id, stores)


def request_digest(request: JobRequest, upload: Upload) -> str:
    """Return the digest that identifies a request: of every field, and of names and content of the upload."""
    fields = request.model_dump(mode="json", exclude={"features", "query_ids"})
    text = json.dumps({"request": fields, "upload": upload.digest}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"labeler-job-request/1\n" + text.encode()).hexdigest()


def _with_passed_over(view: JobView, upload: Upload) -> JobView:
    files = tuple(PassedOver(source=one.source, reason=one.reason) for one in upload.passed_over[:SHOWN])
    return view.model_copy(update={"passed_over": len(upload.passed_over), "passed_over_files": files})


def _only_upload(request: JobRequest, upload: Upload | None, config: CoordinatorConfig) -> Upload:
    if request.features is None:
        if upload is None:
            raise InvalidSetting("the job came without images: send files, a zip, a Parquet file, or feature vectors")
        if request.query_ids is not None:
            raise InvalidSetting("query_ids go with feature vectors in the request; files have their own names")
        return upload
    if upload is not None:
        raise InvalidSetting("the request holds feature vectors and also came with files; send one of the two")
    return upload_of_features(request.features, request.query_ids, folder=config.home / INCOMING, limits=config.limits)


def _num_queries(selection: Selection, upload: Upload) -> int:
    if selection.strategy == "all":
        if selection.count not in (None, upload.count):
            raise InvalidSetting(
                f"selection: strategy all asks about all {upload.count} images, so count {selection.count} contradicts "
                "it; leave count out, or choose random, clustered or spectral"
            )
        return upload.count
    count = selection.count or 0
    if not 1 <= count <= upload.count:
        raise InvalidSetting(
            f"selection.count is {count}, and {upload.count} images were sent; ask about 1 to {upload.count} of them"
        )
    return count


def _check_backbone(request: JobRequest, upload: Upload, record: TaskRecord, config: CoordinatorConfig) -> None:
    wanted = record.task.backbone_fingerprint
    if upload.source == "features" and request.backbone_fingerprint is None:
        raise InvalidSetting(
            f"feature vectors need backbone_fingerprint, of the backbone that made them; the task's is {wanted}"
        )
    if request.backbone_fingerprint not in (None, wanted):
        raise InvalidSetting(
            f"backbone_fingerprint: the request is about {(request.backbone_fingerprint or '')[:64]}, the task "
            f"about {wanted}; similarities between two backbones mean nothing. Embed with the task's backbone"
        )
    if upload.source == "images" and wanted not in config.backbones:
        raise InvalidSetting(
            f"the service has no backbone with fingerprint {wanted} to embed images with; send feature vectors, or "
            "ask the operator to add it to [backbones]"
        )


def _check_model(upload: Upload, task: Task) -> None:
    """Refuse an upload without a model that can be evaluated. Each agent checks it again, before its charge.

    Raises:
        BadData: the vectors carry no model of classes with a privacy card.
        InvalidSetting: images were sent, or the histogram or the model does not fit the task.
    """
    if upload.source != "features":
        raise InvalidSetting(
            "an evaluation asks about a released model, but images were sent; `labeler evaluate` sends a model"
        )
    asked = Scored.of_rows(given_features(upload.path))
    if math.prod(asked.shape(task.num_classes)) > task.max_queries * task.num_classes:
        raise InvalidSetting("the evaluation has more cells than its task has counts; make the task for its question")
    model = released_model(asked.model, name="the model that was sent")
    try:
        model.check_fits(task.classes, fingerprint=task.backbone_fingerprint, dimension=upload.dimension or 0)
    except MixedShards as error:
        raise InvalidSetting(f"features: {error}") from None


def _check_dimension(upload: Upload, record: TaskRecord, parties: PartyStore) -> None:
    """Refuse vectors whose dimension differs from that of every agent that reported one.

    So one agent with a wrong report cannot block others' jobs. If no agent has reported, agents refuse when they are
    asked, and the charge is given back.

    Raises:
        InvalidSetting: every agent that reported has features of another dimension.
    """
    if upload.dimension is None:
        return
    wanted = record.task.backbone_fingerprint
    facts = [facts_of(one.facts) for one in parties.all() if one.party_id in record.participants]
    told = {one.dimension for one in facts if one.dimension and one.backbone_fingerprint == wanted}
    if told and upload.dimension not in told:
        raise InvalidSetting(
            f"features: the vectors have {upload.dimension} entries, but those of the task's agents (backbone "
            f"{wanted[:20]}) have {' or '.join(map(str, sorted(told)))}. Embed with the task's backbone, and send "
            "complete vectors"
        )


def _check_probe(
    request: JobRequest, upload: Upload, record: TaskRecord, parties: PartyStore, *, is_needed: bool
) -> None:
    """Compare the probe features of the requester and of all agents, each with each, if any of them sent some.

    Raises:
        InvalidSetting: one sent none, or used a different backbone of the same name.
    """
    wanted = record.task.backbone_fingerprint
    told = {one.party_id: facts_of(one.facts) for one in parties.all() if one.party_id in record.participants}
    told = {name: facts for name, facts in told.items() if facts.backbone_fingerprint in (None, wanted)}
    if request.probe is None and all(facts.probe is None for facts in told.values()):
        return
    dimension = upload.dimension or next((facts.dimension for facts in told.values() if facts.dimension), 1)
    probes = [(f"agent {name!r}", facts.probe or "") for name, facts in told.items()]
    if request.probe is not None or is_needed:
        probes.insert(0, ("the request", request.probe or ""))
    try:
        refuse_other_probes(probes, dimension)
    except BadData as error:
        raise InvalidSetting(f"probe: {error}") from None


def _known(order: _Order, stores: Stores, *, connection: Connection | None = None) -> Idempotency | None:
    """Return the stored outcome of an earlier request with this key, if any.

    Raises:
        IdempotencyMismatch: the key belongs to another request.
    """
    asked = order.idempotency
    if asked is None:
        return None
    known = stores.jobs.known(asked.token_id, asked.key, connection=connection)
    if known is not None and known.body_digest != asked.body_digest:
        raise IdempotencyMismatch(
            f"this idempotency key belongs to another request (job {known.job_id}); use a new key for a new request, "
            "and send the same fields and the same files again for the same one"
        )
    return known


def _again(known: Idempotency, stores: Stores) -> JobView:
    """Repeat the answer to an earlier request: its job, or its refusal."""
    job = stores.jobs.get(known.job_id)
    if job.state == "refused" and job.problem is not None and not stores.jobs.rounds(job.job_id):
        # Refused at submission. A job refused later is returned instead, because the first answer was the job.
        raise KeptRefusal(job.problem)
    return read_view(known.job_id, stores)


def _is_kept(order: _Order, stores: Stores) -> bool:
    """Return whether the job is in the journal although its submission failed, in a step after the commit.

    An unreadable journal counts as yes: an upload without a job is swept later, but a job without its upload is lost.
    """
    try:
        return stores.jobs.get(order.job.job_id).state not in FINISHED
    except NotFound:
        return False
    except Exception:  # whatever the error is, the upload stays
        log.warning("whether a job was kept could not be read", extra={"job": order.job.job_id})
    return True


def _accept(order: _Order, stores: Stores, *, most: int, prices: Prices | None = None) -> JobView | Idempotency:
    """Claim the queries, reserve the worst case in every account, and store the job: all or nothing."""
    job, record = order.job, order.task
    worst = _worst_case(order, prices)
    with stores.database.write() as connection:
        known = _known(order, stores, connection=connection)
        if known is not None:
            return known
        _check_unasked(job, most, stores, connection)
        first_query = stores.tasks.claim_queries(record.digest, job.num_queries, connection=connection)
        rounds: list[RoundRecord] = []
        following = first_query
        for number, size in enumerate(order.sizes):
            rounds.append(RoundRecord(job.job_id, number, following, size))
            following += size
        stores.ledger.reserve(
            proposed_id(job.job_id),
            [charge for charge in worst if charge.account == FEDERATION],
            held_back=[charge for charge in worst if charge.account != FEDERATION],
            detail={"job": job.job_id, "task": record.digest, "queries": job.num_queries, "by": job.created_by},
            connection=connection,
        )
        kept = replace(job, first_query=first_query)
        stores.jobs.add(kept, rounds, idempotency=order.idempotency, connection=connection)
        return read_views([kept], stores, connection=connection)[0]


def _worst_case(order: _Order, prices: Prices | None) -> list[Charge]:
    """Return the charges to reserve, before the transaction: a price may take seconds and wait for its turn.

    Raises:
        TooManyRequests, PricesWait: see Prices.
    """
    price = partial(worst_case, order.task, order.sizes, order.job.num_queries)
    if prices is None:
        return price()
    try:
        return only_certified()(price)()
    except NotCertified:
        return prices.run_long(order.job.created_by, price)


def _check_unasked(job: JobRecord, most: int, stores: Stores, connection: Connection) -> None:
    """Refuse another job if many of the requester's ended unasked, or still may: each stays in this journal for
    nothing, and in those of the sites that had replied.

    A job counts however it ended, and against its own token only.

    Raises:
        TooManyRequests: nobody was asked about too many of the token's jobs of the last 24 hours.
    """
    free_at = stores.jobs.willingness.unasked_until(job.created_by, job.created_at, most=most, connection=connection)
    if free_at is not None:
        wait_s = max(1, math.ceil((free_at - job.created_at).total_seconds()))
        raise TooManyRequests(
            f"of {most} jobs of this token in the last 24 hours no agent was asked: they wait, or were cancelled, "
            "refused, expired or failed; no more may, since each stays in the ledger for nothing. Submit the next in "
            f"{wait_s} s, or ask the operator to raise limits.max_unasked_jobs_per_day",
            retry_after_s=wait_s,
        )
