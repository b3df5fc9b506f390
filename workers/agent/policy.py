"""The policy of a site, what it allows its agent to do: a TOML file of the site, read again at every ask.

Only the site can widen it: a coordinator that asks for more gets a refusal, and nothing else. Unknown fields are
refused, missing ones are too (but those that `docs/policy.md` calls optional), and while the file cannot be read
everything is. Every decision follows from the policy and the ask alone, never from a record, so a refusal tells nothing
private.

Every field is listed in `docs/policy.md`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import floor, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from labeler.budget import LEAST_DELTA, MOST_DELTA, budget_for, say_epsilon
from labeler.caps import CapsTable
from labeler.errors import AwaitingApproval, InvalidSetting, PolicyRefusal
from labeler.messages.bodies import Ask, Proposal
from labeler.methods import MethodName, ReleaseKind, least_delta
from labeler.noise import TALLIERS
from labeler.planning import has_finite_price
from labeler.setting import LEVELS
from labeler.settings import SettingsText
from labeler.solving import epsilon_within
from labeler.system.files import read_named
from labeler.task import Level, PositiveFinite, Task

MAX_POLICY_BYTES = 1024 * 1024

HexKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PartyId = Annotated[str, Field(min_length=1, max_length=200)]


class Settings(BaseModel):
    """A settings file, or a table of it: every field known, of its exact type."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, strict=True)


class BudgetTable(CapsTable):
    """`[budget]`: the most that all answers of this agent together may ever cost. What `life_epsilon` set aside once is
    never given back.

    Attributes:
        delta: failure probability of the caps.
        per_requester: the share of each cap, and of the `life_epsilon` for a record, that the jobs of one requester may
            take. So none uses up the others' budget. None if one may take all. The coordinator names the requester
            (`Proposal.requester`). A share divides a budget among requesters; only the caps protect records. Jobs
            without a named requester share one share.
    """

    model_config = ConfigDict(strict=True)

    delta: Annotated[float, Field(ge=LEAST_DELTA, le=MOST_DELTA)]
    per_requester: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check_life(self) -> BudgetTable:
        try:
            _ = self.life_nano
        except InvalidSetting as error:
            raise ValueError(f"life_epsilon: {error}") from None
        return self

    @property
    def life_nano(self) -> int | None:
        """B, nano-units of mu^2; None where votes for life are not cast."""
        return self.set_aside_nano(self.delta)

    def cap(self, level: Level) -> int | None:
        """Return the cap in nano-units of mu^2; None where it is not limited."""
        return self.cap_nano(level, self.delta)


class AllowTable(Settings):
    """`[allow]`: which tasks are answered.

    Attributes:
        backbones: fingerprints of the backbones whose features may be asked about.
        tasks: digests of the tasks, or "any".
        methods: ways of voting.
        releases: what may be opened. The holder of all talliers' keys can read an agent's noised ballots in a round of
            the histogram. It can read the ballots themselves of a winner round of knn, whose noise is shared apart, and
            of every round whose noise the talliers add.
        max_queries_per_day: most queries answered in any 24 hours.
        max_noise_contributors: among how many agents, this one included, a task may divide its noise (its h, see
            `Task.noise_contributors`). A task is charged for noise of standard deviation sigma that nobody can
            subtract. Each agent adds noise of sigma / sqrt(h), so with g real and honest agents in a sum nobody can
            subtract sigma * sqrt(g / h). Invented agents make h larger, and g no larger. An agent cannot see who else
            takes part, but g is at least 1, itself. So the true mu is at most the charged one times
            sqrt(max_noise_contributors), whatever the coordinator invents or leaves out. With 1 the site trusts only
            its own noise. With more it trusts that at least one tallier sums none but real agents (`[agents]` in
            tallier.toml), of whom no more than the task's `colluding_agents` collude: then g >= h in every sum. So name
            no more than the agents known to be real and honest.
        max_noise_talliers: among how many talliers a task whose noise they add (`Task.dishonest_talliers`) may divide
            it. 0, unless the file says otherwise, refuses such tasks: the agent adds no noise then, and only the
            talliers protect its votes from the release. With 1 the site trusts that one of its three talliers is
            honest, as it does for its shares anyway; with 2, that two are. The true mu is at most the charged one times
            sqrt(max_noise_talliers) as long as one is.
        approval: whether a person has to approve each task before it is answered.
        person_epsilon: the most that one task may cost one person whose records are here, all of them together, at the
            policy's delta; None where that is not bounded. With a bound, tasks that state no price for a person
            (`Task.records_per_person`) are refused. It is about one task: budgets add up per image and per site.
        life_job_share: the share of the B set aside for votes for life that one job may take of any image, so that no
            job silences a whole site. None, the default, lets one job take all. The amount a job may take follows only
            from its task (`labeler.accounting.lifetime.job_nano`), so a refusal says nothing about images.
    """

    backbones: Annotated[tuple[str, ...], Field(strict=False)]
    tasks: Annotated[tuple[HexKey, ...], Field(strict=False)] | Literal["any"]
    methods: Annotated[tuple[MethodName, ...], Field(strict=False)]
    releases: Annotated[tuple[ReleaseKind, ...], Field(strict=False)]
    max_queries_per_day: Annotated[int, Field(ge=0)]
    max_noise_contributors: Annotated[int, Field(ge=1)]
    approval: bool
    max_noise_talliers: Annotated[int, Field(ge=0, le=2)] = 0
    person_epsilon: PositiveFinite | None = None
    life_job_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None


class CoordinatorTable(Settings):
    """`[coordinator]`: whose asks are answered at all.

    Attributes:
        verify_key: the coordinator's public signing key, 64 hexadecimal digits.
    """

    verify_key: HexKey


class Policy(Settings):
    """A whole policy file.

    Attributes:
        talliers: whom the site trusts with a share: tallier id -> its public sealing key. Every task is shared among
            exactly these. With more of them than a task needs, two sets of them could sum one round over different
            agents, and the difference would be single ballots. The holder of all their keys can read what this agent
            sends (see `releases`).
    """

    budget: BudgetTable
    allow: AllowTable
    talliers: dict[PartyId, HexKey]
    coordinator: CoordinatorTable

    @model_validator(mode="after")
    def _check_talliers(self) -> Policy:
        if len(set(self.talliers.values())) != len(self.talliers):
            raise ValueError("two talliers have one key, so one party would hold two shares")
        return self

    def check(self, ask: Ask | Proposal, *, coordinator_key: str, is_approved: bool) -> None:
        """Refuse what the policy does not allow. The ledger checks budgets and the day's queries.

        Args:
            ask: as the coordinator signed it, or proposed it before.
            coordinator_key: with which its signature was checked.
            is_approved: whether a person at the site has approved this task.

        Raises:
            PolicyRefusal: names the field, what is allowed and what was asked.
            AwaitingApproval: everything else is in order, and a person has to approve the task.
        """
        task, allow = ask.task, self.allow
        if coordinator_key != self.coordinator.verify_key:
            raise PolicyRefusal(
                "coordinator.verify_key: the policy names another coordinator since this agent was started; restart it"
            )
        if task.backbone_fingerprint not in allow.backbones:
            raise _refusal("allow.backbones", _short(allow.backbones), task.backbone_fingerprint[:16] or "none")
        if allow.tasks != "any" and task.digest not in allow.tasks:
            raise _refusal("allow.tasks", _short(allow.tasks), task.digest)
        if task.method not in allow.methods:
            raise _refusal(
                "allow.methods", ", ".join(allow.methods) or "none", task.method, _take("method", allow.methods)
            )
        if task.release not in allow.releases:
            raise _refusal(
                "allow.releases", ", ".join(allow.releases) or "none", task.release, _take("release", allow.releases)
            )
        self.check_delta(task)
        self._check_noise(task)
        self._check_life(task)
        self._check_person(task)
        self._check_recipients(ask)
        largest = max(ask.sizes)
        if largest > allow.max_queries_per_day:
            most = allow.max_queries_per_day
            remedy = f"submit jobs of at most {most} {'query' if most == 1 else 'queries'}"
            raise _refusal("allow.max_queries_per_day", str(most), f"{largest} at once", remedy)
        if allow.approval and not is_approved:
            raise AwaitingApproval(
                f"allow.approval: a person at the site has to approve task {task.digest} first "
                f"(labeler agent approve {task.digest[:12]}); the coordinator asks again automatically"
            )

    def check_delta(self, task: Task) -> None:
        """Refuse a task whose charge bounds nothing at the policy's delta.

        A task's own delta may be larger, and have a finite price where the site's has none: where one change reaches
        beyond the noise sampler, mu^2 says nothing.

        Raises:
            PolicyRefusal: the delta is below the task's least, or nothing is proved at it.
        """
        least = least_delta(task)
        if self.budget.delta < least:
            raise _refusal(
                "budget.delta",
                f"winners and sampled training only at {least:g} or more",
                f"{self.budget.delta:g}",
                "set release to histogram in a new task" if task.release == "winner" else "",
            )
        if self.budget.delta >= task.delta:
            return
        ours = task.model_copy(update={"delta": self.budget.delta})
        for level in LEVELS:
            if self.budget.cap(level) is None or not has_finite_price(task, level):
                continue
            if not has_finite_price(ours, level):
                raise _refusal(
                    "budget.delta",
                    f"what has a finite epsilon at {self.budget.delta:g} ({level} level)",
                    f"a task that has one at its own delta of {task.delta:g} alone",
                )

    def _check_life(self, task: Task) -> None:
        if task.lifetime_budget is None:
            return
        most = self.budget.life_nano
        if most is None:
            raise _refusal(
                "budget.life_epsilon",
                "no votes for life",
                f"a task with {task.lifetime_budget.budget_nano} nano-units",
                "leave lifetime_budget out of a new task",
            )
        if task.lifetime_budget.budget_nano > most:
            raise _refusal(
                "budget.life_epsilon",
                f"votes for life of {most} nano-units a record",
                str(task.lifetime_budget.budget_nano),
                f"set lifetime_budget.budget_nano to {most} or less in a new task",
            )
        share = self.allow.life_job_share
        if share is None:
            return
        # Imported on use: few sites cast votes for life.
        from labeler.accounting.lifetime import job_nano, vote_nano

        least, asked = floor(Fraction(share) * most), job_nano(task)
        if asked > least:
            votes = least // vote_nano(task)
            more_noise = f"raise sigma_votes {(asked / max(1, least)) ** 0.5 + 0.01:.2f}-fold in a new task"
            raise _refusal(
                "allow.life_job_share",
                f"a job to take at most {least} nano-units of an image's votes for life (a share of {share:g})",
                f"a job of up to {asked}",
                f"set k to {votes} or less, or {more_noise}" if votes else more_noise,
            )

    def _check_noise(self, task: Task) -> None:
        divided, allow = task.noise_contributors, self.allow
        if task.dishonest_talliers is not None:
            most = allow.max_noise_talliers
            if divided > most:
                remedy = f"set dishonest_talliers to {TALLIERS - most} in a new task, or leave it out" if most else ""
                raise _refusal(
                    "allow.max_noise_talliers",
                    f"noise divided among {most} talliers" if most else "no task whose noise the talliers add",
                    f"noise divided among {divided} talliers",
                    remedy or "leave dishonest_talliers out of a new task, so that the agents add the noise",
                )
        elif divided > allow.max_noise_contributors:
            # Each colluding agent more is one contributor less (labeler.task).
            least = task.colluding_agents + divided - allow.max_noise_contributors
            raise _refusal(
                "allow.max_noise_contributors",
                f"noise divided among {allow.max_noise_contributors} agents",
                f"noise divided among {divided}",
                # Without a number that a task may have, only the site can do something.
                f"set colluding_agents to {least} or more in a new task (it is {task.colluding_agents})"
                if least + task.max_dropouts < task.agents
                else "",
            )

    def _check_person(self, task: Task) -> None:
        most, delta = self.allow.person_epsilon, self.budget.delta
        if most is None:
            return
        if task.records_per_person is None:
            raise _refusal(
                "allow.person_epsilon",
                f"epsilon {most:g} per person",
                "a task without records_per_person, so no bound",
                "set records_per_person in a new task",
            )
        # Imported on use: a tallier reads homes, too, and prices need scipy.
        from labeler.planning import price

        # The whole task, whatever part of it this ask is; at the site's own delta.
        person = price(task.model_copy(update={"delta": delta})).person
        if person is None or not person.epsilon <= most:
            asked = f"epsilon {say_epsilon(person.epsilon)}" if person and isfinite(person.epsilon) else "no bound"
            fits = epsilon_within(task, task.max_queries, level="person", left_nano=budget_for(most, delta))
            remedy = "" if fits is None else f"make a task of epsilon {fits:g} per image or less"
            raise _refusal("allow.person_epsilon", f"epsilon {most:g} per person (delta {delta:g})", asked, remedy)

    def _check_recipients(self, ask: Ask | Proposal) -> None:
        pinned_ids = ", ".join(sorted(self.talliers)) or "none"
        for tallier in ask.talliers:
            pinned = self.talliers.get(tallier.tallier_id)
            if pinned is None:
                raise _refusal("talliers", pinned_ids, tallier.tallier_id)
            if pinned != tallier.seal_key:
                raise _refusal(f"talliers.{tallier.tallier_id}", f"the key {pinned[:16]}", tallier.seal_key[:16])
        if len(ask.talliers) != len(self.talliers):
            named = ", ".join(tallier.tallier_id for tallier in ask.talliers)
            raise _refusal("talliers", f"shares among all of {pinned_ids}", f"shares among {named} only")


def read_policy(path: Path) -> Policy:
    """Read and check a site's policy.

    Raises:
        PolicyRefusal: it cannot be read, so nothing is allowed; the message says why.
    """
    try:
        return _policy_of(read_named(path, most_bytes=MAX_POLICY_BYTES), path.name)
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
    except InvalidSetting as error:
        reason = str(error)
    raise PolicyRefusal(f"the site's policy {path.name} allows nothing as it is: {reason}")


@lru_cache(maxsize=4)
def _policy_of(data: bytes, name: str) -> Policy:
    """Return the policy that a file of these bytes says; the file is read at every ask, and parsed when it differs."""
    return SettingsText.of(data, name).check(Policy)


def policy_toml(policy: Policy) -> str:
    """Return a policy as a file that `read_policy` reads back."""
    heading = "# What this site allows its agent to answer. Read again at every ask; see docs/policy.md.\n"
    # Defaults are left out: a version that does not know a field then reads every other file.
    return heading + toml_text(policy.model_dump(exclude_defaults=True))


def toml_text(fields: Mapping[str, Any]) -> str:
    """Return settings as TOML: the single values, then a table for each mapping."""
    tables = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {toml_value(value)}" for name, value in fields.items() if name not in tables]
    for name, table in tables.items():
        named = {
            key if key.isascii() and key.isidentifier() else toml_value(key): value for key, value in table.items()
        }
        lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in named.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """Return a truth value, number, text or tuple of them as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            f"\\U{ord(letter):08x}" if letter in '"\\' or not letter.isprintable() else letter for letter in value
        )
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)


def _take(field: str, allowed: Sequence[str]) -> str:
    return f"set {field} to {' or '.join(allowed)} in a new task" if allowed else ""


def _short(names: tuple[str, ...]) -> str:
    """Return the first few of a list of digests, for a sentence."""
    shown = ", ".join(name[:16] for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (shown or "none") + more


def _refusal(field: str, allowed: str, asked: str, remedy: str = "") -> PolicyRefusal:
    """Return a refusal, for requester and site.

    Args:
        remedy: the field of the task that the requester can change, and a value that passes.
    """
    way_out = f"{remedy}; else only" if remedy else "only"
    return PolicyRefusal(
        f"{field}: the site's policy allows {allowed}, and {asked} was asked for; {way_out} the site can change its "
        "policy"
    )
