"""Step: run the coordinator's machine, with the results of its computations (questions, bodies, releases, turns)."""

from __future__ import annotations

from labeler.driver.intake import Incoming
from labeler.driver.reading import LoadedJob, TurnPlan
from labeler.driver.sending import Questions, Relays, Writer, batch_of
from labeler.errors import BadData, LabelerError, TryAgain
from labeler.messages.bodies import aggregate_from_bytes, winner_from_bytes
from labeler.release import agree_on_winners, open_histogram
from labeler.rounds import effects as fx
from labeler.rounds import queues
from labeler.rounds.coordinator import step
from labeler.rounds.effects import Effect, Event, JobRun, Patience
from labeler.system.faults import fault_point
from labeler.tally import round_of


class Stepper:
    """Steps jobs and puts the results into a plan."""

    def __init__(self, sender: Writer, questions: Questions, relays: Relays, patience: Patience) -> None:
        self._sender = sender
        self._questions = questions
        self._relays = relays
        self._patience = patience

    def step_safely(self, job_id: str, event: Event, plan: TurnPlan) -> None:
        """Take a step that no message waits for: a job that meets a defect must not stop the others."""
        draft = plan.draft(job_id)
        try:
            refusal = self.step(job_id, event, draft)
            if refusal is not None:  # only an event of a party in this process can be refused here
                raise refusal
        except Exception as error:
            plan.retries[job_id] = error
            return
        plan.join(draft)

    def step(self, job_id: str, event: Event, plan: TurnPlan, incoming: Incoming | None = None) -> LabelerError | None:
        """Take one event, and the events that its computations return; return why a message is refused."""
        waiting: list[Event] = [event]
        is_unfinished = False
        while waiting:
            run, effects = step(plan.run_of(job_id), waiting.pop(0), plan.now)
            plan.runs[job_id] = run
            for effect in effects:
                if isinstance(effect, fx.RefuseMessage):
                    return effect.error
                if isinstance(effect, fx.Store):
                    plan.stores.setdefault(job_id, []).append(effect)
                elif isinstance(effect, fx.Relay) and incoming is not None:
                    terms, classes = run.task.winner_terms, run.task.num_classes
                    # If rows are checked, ballots with a column for votes not cast are sent in addition to the noise.
                    columns = 2 * classes + 1 if terms is not None and terms.row_total is not None else classes
                    one = run.round_with(incoming.message.header.round_digest)
                    self._relays.check(incoming.message, one.num_queries if one is not None else 0, columns)
                    plan.relays.append(incoming)
                elif isinstance(effect, fx.Send):
                    plan.sends.append((job_id, effect))
                else:
                    found = self._compute(job_id, effect, plan)
                    is_unfinished |= found is None
                    waiting += found or []
        if is_unfinished:
            again_s = plan.now.steady_s + self._patience.ask_again_s
            plan.looks[job_id] = min(again_s, plan.looks.get(job_id, again_s))
        return None

    def _compute(self, job_id: str, effect: Effect, plan: TurnPlan) -> list[Event] | None:
        """Return the events of an effect that is neither stored nor sent; None if it must be tried again."""
        job, run = plan.jobs[job_id], plan.runs[job_id]
        match effect:
            case fx.WaitUntil():
                plan.looks[job_id] = effect.steady_s
            case fx.RequestSlot():
                if effect.needs_features:
                    try:
                        if not self._questions.has_features(job.record, run.task):
                            return []
                    except TryAgain:
                        raise
                    except LabelerError as error:
                        return [fx.JobFailed(error)]
                if job_id in plan.turns.held:
                    return [fx.JobAdmitted()]  # the step that took its place could not be kept; the place could
                plan.turns = plan.turns.put(job.record.created_by, job_id)
            case fx.Prepare():
                return self._prepare(job, run)
            case fx.MakeBodies():
                try:
                    self._sender.make(run, effect.number)
                except TryAgain:
                    if not (plan.stores.get(job_id) or plan.sends):
                        raise
                    # The earlier effects of this step are kept, like a sum of a paid round; this one is tried again.
                    return None
                except LabelerError as error:
                    return [fx.JobFailed(error, effect.number)]
                return [fx.BodiesMade(effect.number)]
            case fx.Unshard():
                return [self._put_together(run, effect)]
            case fx.AskForTurn():
                plan.line, is_granted = queues.ask_for_turn(
                    plan.line,
                    effect.round_digest,
                    plan.now.steady_s,
                    num_answers=effect.num_answers,
                    limit_s=effect.limit_s,
                    ask_again_s=self._patience.ask_again_s,
                )
                return [fx.TurnGranted(effect.round_digest)] if is_granted else []
            case fx.TurnFailed():
                plan.line, following = queues.turn_failed(plan.line, effect.round_digest, plan.now.steady_s)
                plan.follow += [] if following is None else [following]
            case fx.ReleaseSlot():
                plan.line, entered = queues.leave_line(plan.line, effect.round_digests)
                plan.follow += entered
                if effect.has_ended:
                    plan.turns = plan.turns.leave(job_id)
        return []

    def _prepare(self, job: LoadedJob, run: JobRun) -> list[Event]:
        try:
            features = self._questions.look(job.record, run.task)
            if features is None:
                return []
            if len(features) != run.num_queries // run.task.steps:
                raise BadData(
                    f"{len(features)} questions were prepared, {run.num_queries} were paid for; make a task with "
                    f"max_queries = {len(features) * run.task.steps}, or submit again"
                )
            batches = []
            for number in run.untied:
                batch = batch_of(features, run, run.rounds[number])
                batches.append((number, batch.digest, round_of(run.task, batch).digest))
        except TryAgain:
            raise
        except LabelerError as error:
            return [fx.JobFailed(error)]
        return [fx.QuestionsPrepared(tuple(batches))]

    def _put_together(self, run: JobRun, effect: fx.Unshard) -> Event:
        try:
            if run.task.release == "winner":
                of_round = run.round_value(run.rounds[effect.number])
                release = agree_on_winners([winner_from_bytes(one) for one in effect.answers], of_round, run.task)
            else:
                release = open_histogram([aggregate_from_bytes(one) for one in effect.answers], run.task)
        except LabelerError as error:
            return fx.JobFailed(error)
        fault_point("coordinator.opened")
        return fx.ReleaseKnown(effect.number, release)
