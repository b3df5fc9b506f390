"""A site's own view of its agent: its ledger, waiting tasks, past answers, and the decisions its people can take.

All of it is public, or the site's own accounting, and nothing of a record; only of a folder of images it counts the
files (workers.agent.images). It is read from the agent's journal without
disturbing an agent that runs. The shell and the site's page show and decide by the same functions.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from feature_store.shard import deletions
from labeler.batching import PersonSpent, person_charge, person_spent, round_sizes, total_charges
from labeler.budget import epsilon_left, epsilon_spent, spent_in_words
from labeler.errors import BudgetExceeded, LabelerError, NotFound, NotReady, PolicyRefusal
from labeler.ledger.agent_memory import (
    AgentMemory,
    ChargedRound,
    answered,
    answered_by_price,
    check_delta,
)
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import all_set_aside
from labeler.ledger.promises import PromiseStore, RequesterShares, refused_by_site
from labeler.planning import price
from labeler.setting import LEVELS
from labeler.system.clock import now_utc
from labeler.task import Task
from workers.agent import decisions
from workers.agent.decisions import is_approved, refused, stopped
from workers.agent.images import SiteImages
from workers.agent.policy import BudgetTable, Policy, read_policy
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE, POLICY_FILE, path_in_home, read_agent_config

MOST_ROUNDS: Final = 1000
"""Rounds that the overview of a site groups by job, the last ones; the file of its history has every round."""


def site_budget(home: Path) -> list[dict[str, Any]]:
    """Return every account of an agent's own ledger, in nano-units of mu^2 and as epsilon at the policy's delta.

    A spent epsilon is None where something was answered that has no finite price at that level. "Posted" is what was
    answered; "spent" also counts what is set aside for jobs that wait. `left_epsilon` is the largest further job.

    Raises:
        JournalBroken, JournalBehind: the ledger cannot be trusted.
        PolicyRefusal: the policy cannot be read, or names a delta at which nothing can be said of what was spent.
    """
    read_agent_config(home)
    limits = read_policy(home / POLICY_FILE).budget
    caps = {"instance": limits.instance_epsilon, "agent": limits.agent_epsilon}
    delta = limits.delta
    with closing(_look(home)) as database:
        with database.read() as connection:
            check_delta(connection, delta)
        ledger = Ledger(database, clock=now_utc)
        balances, unpriced, aside = ledger.balances(), ledger.charged_without(), all_set_aside(database)
    found = []
    for one in balances:
        is_bounded = one.account not in unpriced[one.level]
        posted, spent = (epsilon_spent(nano, delta) if is_bounded else None for nano in (one.posted, one.spent))
        left = None if one.left is None else epsilon_left(one.left, delta)
        found.append(
            {
                "account": one.account,
                "level": one.level,
                "delta": delta,
                "cap_nano": one.cap,
                "posted_nano": one.posted,
                "spent_nano": one.spent,
                "left_nano": one.left,
                "cap_epsilon": None if caps[one.level] == "unlimited" else caps[one.level],
                "life_nano": aside.get(one.account, 0) if one.level == "instance" else 0,
                "posted_epsilon": posted,
                "spent_epsilon": spent,
                "left_epsilon": left,
                "words": spent_in_words(posted, spent, left),
            }
        )
    return found


def site_person(home: Path) -> dict[str, Any]:
    """Return what everything that was ever answered says of one patient of the site (`labeler.batching.person_spent`).

    Raises:
        As `site_budget`.
    """
    read_agent_config(home)
    delta = read_policy(home / POLICY_FILE).budget.delta
    with closing(_look(home)) as database, database.read() as connection:
        check_delta(connection, delta)
        is_complete = not Ledger(database, clock=now_utc).written_off(connection=connection)
        return person_spent(answered_by_price(connection), is_complete=is_complete).to_json(delta)


def shares_taken(home: Path) -> list[tuple[str, float]]:
    """Return the part of its budget share that each requester has taken, largest first; empty where the policy gives
    none.

    A part of more than 1 was taken before the policy was narrowed.

    Raises:
        JournalBroken, JournalBehind, PolicyRefusal: as `site_budget`.
    """
    limits = read_policy(home / POLICY_FILE).budget
    if limits.per_requester is None:
        return []
    with closing(_look(home)) as database:
        shares = RequesterShares()
        with database.read() as connection:
            who = shares.requesters(connection=connection)
            taken = {name: shares.taken(name, connection=connection) for name in who}
    found: list[tuple[str, float]] = []
    for name, (by_level, of_life) in taken.items():
        parts = [(by_level[level], limits.cap(level)) for level in LEVELS] + [(of_life, limits.life_nano)]
        found.append((name, max((nano / (limits.per_requester * cap) for nano, cap in parts if cap), default=0.0)))
    return sorted(found, key=lambda one: (-one[1], one[0]))


def waiting_tasks(home: Path) -> list[dict[str, Any]]:
    """Return tasks that wait for a person's approval, oldest first, with the cost of each (None: no finite price).

    The price is for noise of `sigma_votes`, which needs `noise_contributors` agents that are real and honest. `takes`
    says for each limited level which parts of the budget an approval takes and leaves; `unpayable` why there can be
    none.

    Raises:
        NotReady: the agent has not run yet, so it has been asked nothing.
    """
    read_agent_config(home)
    with closing(_look(home)) as database:
        memory = _memory(database)
        waiting, names = memory.waiting(), memory.requesters()
        open_ones = [one for one in waiting if not is_approved(home, one[0]) and refused(home, one[0]) is None]
        taken = {digest: _taken(home, task, database) for digest, task, _ in open_ones}
    return [_described(task, names) | {"asked_at": _moment(at)} | taken[digest] for digest, task, at in open_ones]


def decided_tasks(home: Path) -> list[dict[str, Any]]:
    """Return tasks that a person has decided, the last decision first, with the decision and the reason.

    Raises:
        NotReady: the agent has not run yet, so it has been asked nothing.
    """
    read_agent_config(home)
    with closing(_look(home)) as database:
        memory = _memory(database)
        decided, waiting, names = memory.decided(), memory.waiting(), memory.requesters()
    found = [_decision(home, one.task, names, one.requested_at, one.decided_at) for one in decided]
    # Decided a moment ago: the agent has not looked yet.
    new = [_decision(home, task, names, asked_at, None) for _, task, asked_at in waiting]
    return [one for one in new if one["decision"] != "withdrawn"] + found


def answered_rounds(home: Path, *, last: int | None = None) -> list[dict[str, Any]]:
    """Return the rounds that were ever charged, oldest first: time, task, job, and price.

    The epsilons are of each round by itself at the policy's delta; `site_budget` has what several cost together. For
    votes for life (`life_nano` above 0) they are of all such rounds together, ever.

    Args:
        last: the number of rounds, counted from the newest; None for every round.

    Raises:
        NotReady: the agent has not run yet, so it has answered nothing.
        PolicyRefusal: as `site_budget`.
    """
    read_agent_config(home)
    delta = read_policy(home / POLICY_FILE).budget.delta
    with closing(_look(home)) as database:
        names = _memory(database).requesters()
        with database.read() as connection:
            check_delta(connection, delta)
        rounds, tasks = answered(database, last=last)
    return [_answered(one, tasks.get(one.task_digest), names, delta) for one in rounds]


_OF_A_JOB: Final = (
    *("task_id", "name", "requesters", "method", "classes", "job_id"),
    *("delta", "life_nano", "records_per_person"),
)


def answered_jobs(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group answered rounds by job, the newest first; rounds that were asked without a job are grouped by task."""
    jobs: dict[tuple[str, str], dict[str, Any]] = {}
    for one in rounds:
        key = (one["task_id"], one["job_id"])
        known = jobs.get(key)
        if known is None:
            sums = dict.fromkeys(("queries", "rounds", "instance_nano", "agent_nano", "person_nano"), 0)
            jobs[key] = known = {name: one[name] for name in _OF_A_JOB} | {"first_at": one["at"]} | sums
        known["last_at"] = one["at"]
        known["rounds"] += 1
        for name in ("queries", "instance_nano", "agent_nano"):
            known[name] += one[name]
        # One round without a bound for a person leaves the job without one.
        parts = (known["person_nano"], one["person_nano"])
        known["person_nano"] = None if None in parts else sum(parts)
    for job in jobs.values():
        job["person_epsilon"] = PersonSpent(job["person_nano"]).epsilon(job["delta"])
        for level in LEVELS:
            nano = job["life_nano"] if level == "instance" and job["life_nano"] else job[f"{level}_nano"]
            job[f"{level}_epsilon"] = epsilon_spent(nano, job["delta"])
    return sorted(jobs.values(), key=lambda job: str(job["last_at"]), reverse=True)


MOST_REFUSALS: Final = 500
"""Refusals without a person that the overview and the shell list, the last ones."""


def site_refusals(home: Path) -> list[dict[str, Any]]:
    """Return what the site's policy or ledger refused, the last first; what people refused is in `decided_tasks`.

    Raises:
        NotReady: the agent has not run yet, so it has been asked nothing.
    """
    read_agent_config(home)
    with closing(_look(home)) as database, database.read() as connection:
        found = refused_by_site(connection, last=MOST_REFUSALS)
    return [
        {
            "at": _moment(one.at),
            "task_id": one.task_digest,
            "name": one.name,
            "requester": one.requester,
            "job_id": one.job_id,
            "reason": one.reason,
            "sentence": one.sentence,
        }
        for one in found
    ]


def deleted_at(home: Path) -> list[dict[str, Any]]:
    """Return when records of this site were deleted, the last first, and how many rounds were answered before.

    Never which records, nor how many.

    Raises:
        NotReady: the agent has not run yet, so no round was answered.
        PolicyRefusal: as `site_budget`.
    """
    moments = deletions(Path(path_in_home(home, read_agent_config(home).shard)))
    rounds = [one["at"] for one in answered_rounds(home)] if moments else []
    return [{"at": at, "rounds_before": sum(one <= at for one in rounds)} for at in reversed(moments)]


def approve(home: Path, digest: str) -> None:
    """Let the agent answer a task that its budget can pay.

    Raises:
        BudgetExceeded: it cannot.
        JournalBroken, JournalBehind, PolicyRefusal: as `site_budget`.
    """
    if (home / JOURNAL_FILE).exists():
        with closing(_look(home)) as database:
            memory = _memory(database)
            asked = [task for _, task, _ in memory.waiting()] + [one.task for one in memory.decided()]
            for no in [_taken(home, task, database)["unpayable"] for task in asked if task.digest == digest]:
                if no:
                    raise BudgetExceeded(f"task {digest[:12]} cannot be approved: {no}")
    decisions.approve(home, digest)


def _taken(home: Path, task: Task, database: Database) -> dict[str, Any]:
    """Return the parts of each limited budget that a task would take for its questions not yet answered or promised."""
    try:
        budget = read_policy(home / POLICY_FILE).budget
    except PolicyRefusal as error:
        return {"takes": [], "unpayable": str(error)}
    ledger = Ledger(database, clock=now_utc)
    spent = {one.level: one.spent for one in ledger.balances()}
    asked = AgentMemory(database, ledger).queries_of(task.digest)
    asked += PromiseStore(database, ledger).open_queries(task_digest=task.digest)
    rest = task.max_queries - asked
    needed = total_charges(task, round_sizes(task, rest), answered=asked) if rest > 0 else dict.fromkeys(LEVELS, 0)
    takes: list[dict[str, Any]] = []
    unpayable = ""
    for level in LEVELS:
        cap, amount = budget.cap(level), needed.get(level)
        if cap is None:
            continue
        whose = "your budget per image" if level == "instance" else "your budget for the whole site"
        field = f"budget.{level}_epsilon"
        left = cap - spent.get(level, 0)
        if amount is None:
            words = f"has no finite price, so it would take more than {whose}"
            remedy = f'set {field} to "unlimited" in policy.toml, or refuse it'
        elif amount > left:
            words = f"takes {percent(amount / cap)} of {whose}, of which {percent(max(left, 0) / cap)} is left"
            remedy = f"raise {field} in policy.toml, or refuse it and let it ask for less"
        else:
            words = f"takes {percent(amount / cap)} of {whose}, {percent((left - amount) / cap)} remains"
            remedy = ""
        takes.append({"level": level, "asked_nano": amount, "left_nano": left, "cap_nano": cap, "words": words})
        if remedy and not unpayable:
            unpayable = f"it {words}; {remedy}"
    return {"takes": takes, "unpayable": unpayable}


def percent(part: float) -> str:
    """Format a part of a budget: two digits, and only zero is shown as nothing."""
    if 0 < part < 0.001:
        return "less than 0.1 %"
    return f"{100 * part:.{0 if part >= 0.1 or not part else 1}f} %"


def _described(task: Task, names: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the public facts of a task, with its price as stated in it (None: no finite price)."""
    cost = price(task)
    return {
        "task_id": task.digest,
        "name": task.name,
        "requesters": names.get(task.digest, []),
        "classes": list(task.classes),
        "method": task.method,
        "release": task.release,
        "queries": task.max_queries,
        "agents": task.agents,
        "colluding_agents": task.colluding_agents,
        "holds_against": cost.holds_against,
        "noise_contributors": task.noise_contributors,
        "noise_by": task.noise_by,
        "sigma_votes": task.sigma_votes,
        "instance_epsilon": cost.instance.to_json()["epsilon"],
        "person_epsilon": None if cost.person is None else cost.person.to_json()["epsilon"],
        "records_per_person": task.records_per_person,
        **({} if task.attributes_per_record is None else {"attributes_per_record": task.attributes_per_record}),
        "agent_epsilon": cost.agent.to_json()["epsilon"],
        "delta": task.delta,
    }


def _decision(
    home: Path, task: Task, names: Mapping[str, list[str]], asked_at: datetime, decided_at: datetime | None
) -> dict[str, Any]:
    no = refused(home, task.digest)
    decision = "refused" if no else "approved" if is_approved(home, task.digest) else "withdrawn"
    at = no.at if no and no.at else "" if decided_at is None else _moment(decided_at)
    return _described(task, names) | {
        "decision": decision,
        "reason": no.reason if no else "",
        "asked_at": _moment(asked_at),
        "decided_at": at,
    }


def _answered(one: ChargedRound, task: Task | None, names: Mapping[str, list[str]], delta: float) -> dict[str, Any]:
    charges = {level: one.charges.get(level, 0) for level in LEVELS}
    life_nano = 0 if task is None or task.lifetime_budget is None else task.lifetime_budget.budget_nano
    person_nano = None if task is None else person_charge(task, one.num_queries)
    return {
        "at": _moment(one.at),
        "task_id": one.task_digest,
        "name": "" if task is None else task.name,
        "requesters": names.get(one.task_digest, []),
        "method": "" if task is None else task.method,
        "classes": [] if task is None else list(task.classes),
        "job_id": one.job_id,
        "round": one.round_digest,
        "queries": one.num_queries,
        "talliers": list(one.talliers),
        "delta": delta,
        "life_nano": life_nano,
        **{f"{level}_nano": amount for level, amount in charges.items()},
        "person_nano": person_nano,
        "records_per_person": None if task is None else task.records_per_person,
        "agent_epsilon": epsilon_spent(charges["agent"], delta),
        "person_epsilon": PersonSpent(person_nano).epsilon(delta),
        # No round of votes for life has a separate epsilon: the stated one is of all such rounds together, ever.
        "instance_epsilon": epsilon_spent(life_nano or charges["instance"], delta),
    }


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds")


def _look(home: Path) -> Database:
    if not (home / JOURNAL_FILE).exists():
        raise NotReady(f"the agent of {home} has no journal yet; start it once")
    return open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE, read_only=True)


def _memory(database: Database) -> AgentMemory:
    return AgentMemory(database, Ledger(database, clock=now_utc))


class SiteConsole:
    """One home, for the page of its site (api.console.site). Every call reads it again: agent and shell write
    meanwhile.

    Raises:
        InvalidSetting: it is no agent's home.
    """

    def __init__(self, home: Path) -> None:
        read_agent_config(home)
        self._home = home
        self._images = SiteImages(home)

    def overview(self) -> dict[str, Any]:
        """Return the agent's name, whether it answers, its tasks, the budget left, and its folder of images.

        What cannot be read is named in `problems`, and the rest is shown.
        """
        home, config, no = self._home, read_agent_config(self._home), stopped(self._home)
        found: dict[str, Any] = {
            "agent_id": config.agent_id,
            "coordinator_url": config.coordinator_url,
            "stopped": None if no is None else {"reason": no.reason, "at": no.at},
        }
        problems: list[str] = []
        parts: dict[str, Callable[[], Any]] = {
            "images": self._images.overview,
            "policy": lambda: policy_in_words(read_policy(home / POLICY_FILE)),
            "waiting": lambda: waiting_tasks(home),
            "decided": lambda: decided_tasks(home),
            "refused": lambda: site_refusals(home),
            "deleted": lambda: deleted_at(home),
            "budget": lambda: site_budget(home),
            "person": lambda: site_person(home),
            "jobs": lambda: answered_jobs(answered_rounds(home, last=MOST_ROUNDS)),
        }
        for name, read in parts.items():
            try:
                found[name] = read()
            except LabelerError as error:
                found[name] = None if name in ("images", "person") else []
                if isinstance(error, NotReady) and (found["images"] or {}).get("is_embedded") is False:
                    continue  # an agent that has never embedded its images has no journal yet
                problems.append(str(error))
        return found | {"problems": list(dict.fromkeys(problems))}

    def rounds(self) -> list[dict[str, Any]]:
        """Return every round that was ever answered."""
        return answered_rounds(self._home)

    def rounds_csv(self) -> str:
        """Return every round that was ever answered, as CSV."""
        return as_csv(self.rounds())

    def approve(self, digest: str) -> None:
        """Let the agent answer a task that was asked for; raises NotFound for another, and as `approve`."""
        self._check_asked(digest)
        approve(self._home, digest)

    def refuse(self, digest: str, reason: str) -> None:
        """Refuse a task that was asked for; raises NotFound for another, and as `decisions.refuse`."""
        self._check_asked(digest)
        decisions.refuse(self._home, digest, reason)

    def stop(self, reason: str) -> None:
        """Answer nothing new."""
        decisions.stop(self._home, reason)

    def resume(self) -> None:
        """Answer again."""
        decisions.resume(self._home)

    def embed(self) -> None:
        """Begin to embed what has changed in the folder of images; see `SiteImages.embed`."""
        self._images.embed()

    def close(self) -> None:
        """End what the page began."""
        self._images.close()

    def _check_asked(self, digest: str) -> None:
        asked = (*waiting_tasks(self._home), *decided_tasks(self._home))
        if digest not in {one["task_id"] for one in asked}:
            raise NotFound("nobody asked for this task, or it was withdrawn; look at the page again")


COLUMNS: Final = (
    "at",
    "task_id",
    "name",
    "requesters",
    "method",
    "classes",
    "job_id",
    "round",
    "queries",
    "talliers",
    "instance_epsilon",
    "person_epsilon",
    "agent_epsilon",
    "delta",
    "records_per_person",
    "instance_nano",
    "person_nano",
    "agent_nano",
)
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def as_csv(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines with a heading. Lists are joined by semicolons; a price without a bound is an empty cell.

    A text from others that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(COLUMNS)
    for one in rounds:
        lines.writerow([_cell(one[name]) for name in COLUMNS])
    return written.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    text = "; ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA) else text


def policy_in_words(policy: Policy) -> list[str]:
    """Return one sentence for each thing that the policy allows or refuses, in the order of the file."""
    budget, allow = policy.budget, policy.allow
    lines = [
        _cap("one private image", budget.instance_epsilon, budget.delta),
        _cap("this site as a whole", budget.agent_epsilon, budget.delta),
        *_life(budget, allow.life_job_share),
        *_share(budget.per_requester),
        "Every task needs the approval of a person here."
        if allow.approval
        else "Tasks that keep to this policy are answered without asking a person.",
        "Any task may ask, within this policy."
        if allow.tasks == "any"
        else f"Only {len(allow.tasks)} tasks may ask, those named in the policy.",
        f"Ways to answer: {', '.join(allow.methods) or 'none, so everything is refused'}.",
        f"What may be opened of a sum: {', '.join(allow.releases) or 'nothing, so everything is refused'}.",
        f"At most {allow.max_queries_per_day:,} questions are answered in any 24 hours.",
        "It counts on no noise but its own: tasks have to name all other agents as colluding or absent."
        if allow.max_noise_contributors == 1
        else f"It counts on {allow.max_noise_contributors} agents, itself among them, to add their part of the noise.",
    ]
    if allow.max_noise_talliers:
        honest = "one of the three talliers" if allow.max_noise_talliers == 1 else "two of the three talliers"
        lines.append(f"The talliers may add the noise in its place: it counts on {honest} to be honest.")
    if allow.person_epsilon is not None:
        lines.append(
            f"One task may cost one person, with all their records here, at most epsilon {allow.person_epsilon:g}."
        )
    names = ", ".join(sorted(policy.talliers)) or "nobody, so everything is refused"
    return [*lines, f"Shares go to {names}, and to nobody else."]


def _life(budget: BudgetTable, share: float | None) -> list[str]:
    if budget.life_epsilon is None:
        return []
    return [
        "Votes for life: all such tasks that are ever answered cost one private image at most epsilon "
        f"{budget.life_epsilon:g} together, which is set aside; an image that has spent it votes no more, and nobody "
        "is told which has. "
        + (
            "One job may take all that an image has left of it."
            if share is None
            else f"One job may take at most {100 * share:g} % of it from an image."
        )
    ]


def _share(part: float | None) -> list[str]:
    said = "One requester may take at most {:g} % of each of these; the coordinator says who asks."
    return [] if part is None else [said.format(100 * part)]


def _cap(what: str, epsilon: float | str, delta: float) -> str:
    if isinstance(epsilon, str):
        return f"About {what}: recorded, with no limit."
    return f"About {what}: all answers together at most epsilon {epsilon:g} (delta {delta:g})."
