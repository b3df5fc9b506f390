"""An audit of a task: every adversary's runs, counted durably, and what they prove.

**Many runs**: each is a whole life of the task, every second one with the canary. **One run**: one life with as many
canaries as can each have separate numbers of the sum, each present by a fair coin. It gives two bounds. `one_run_mu`
needs no further assumption. The other counts canaries as runs, because noise of different numbers is independent.

Each run's count is appended to a file, so the same command continues after an interruption.

Natural records are those of a shard, or handwritten digits (`Pool`). The document becomes a page (`render_page`), which
loads nothing and runs nothing. Its picture uses the page's own colors, so it follows the reader's color scheme.
Jinja2 escapes every text.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from checks.audit.adversaries import ADVERSARIES, STRONGEST, SceneAttack, Surroundings, View, check_attackable
from checks.audit.observers import KnownVotes
from checks.audit.poison import most_canaries, poisoned
from feature_store.index.definition import check_features
from feature_store.results.page_templates import page_templates
from feature_store.shard import Shard
from labeler.auditing import Attempt, AuditFacts, AuditFindings, findings_of
from labeler.errors import BadData, InvalidSetting
from labeler.setting import StatedLevel
from labeler.system.files import exclusive, replace_file
from labeler.task import Task
from workers.progress import ProgressCallback, silent

FORMAT: Final = "labeler-audit/1"
RUNS_FILE: Final = "runs.jsonl"
LOCK_FILE: Final = ".lock"
REPORT_FILE: Final = "audit.json"
PAGE_FILE: Final = "audit.html"
FINGERPRINT: Final = "audit"
STAYS_HERE: Final = "These counts are about private records, and no noise hides them: keep this folder at the site."
ONE_RUN: Final = "one-run"
_GUESSED_SHARE: Final = 3
"""One canary in this many is guessed, those with the clearest scores; fixed before the run."""


@dataclass(frozen=True, eq=False)
class Audit:
    """The settings of an audit.

    Attributes:
        adversaries: names in ADVERSARIES, and ONE_RUN for the one run with many canaries.
        runs: of each adversary, half of them with the canary.
        level: what a canary is: one record, the records of a person, or an agent.
        confidence: with which everything the audit states holds together.
        seed: of what is public in it.
        noise_seed: of all noise; None draws it as the product does.
        features, labels: natural records.
        is_private: whether these are private. Then counts of errors are counts about private records, without noise:
            they stay at the site, and out of evidence (`labeler.auditing.read_audit`).
    """

    task: Task
    adversaries: tuple[str, ...]
    runs: int
    level: StatedLevel = "instance"
    view: View = "release"
    confidence: float = 0.99
    seed: int = 0
    noise_seed: int | None = None
    features: NDArray[np.int16] = field(repr=False, kw_only=True)
    labels: NDArray[np.int16] = field(repr=False, kw_only=True)
    is_private: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_attackable(self.task, self.level, self.view)
        unknown = sorted(set(self.adversaries) - {*ADVERSARIES, ONE_RUN})
        if not self.adversaries:
            raise InvalidSetting("no adversary has an attack on this task; see checks.audit.adversaries to add one")
        if unknown:
            raise InvalidSetting(
                f"no adversary is called {', '.join(unknown)}; choose {', '.join([*ADVERSARIES, ONE_RUN])}"
            )
        if without := sorted(set(self.adversaries) - set(applicable(self.task, self.adversaries, self.level))):
            raise InvalidSetting(f"{', '.join(without)} has no attack on this task at level {self.level}; leave it out")
        if self.runs < 2:
            raise InvalidSetting(f"an audit takes at least 2 runs, one of each kind; found {self.runs}")
        if not 0 < self.confidence < 1:  # before hours of runs, not after them
            raise InvalidSetting(f"confidence must be above 0 and below 1, found {self.confidence:g}")

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of a folder's runs: another audit may not continue them."""
        return {
            "format": FORMAT,
            "task": self.task.digest,
            "level": self.level,
            "view": self.view,
            "seed": self.seed,
            "noise_seed": self.noise_seed,
            "records": hashlib.sha256(self.features.tobytes() + self.labels.tobytes()).hexdigest(),
            "private": self.is_private,
        }


def applicable(task: Task, names: Sequence[str], level: StatedLevel = "instance") -> tuple[str, ...]:
    """Return those of these adversaries that have an attack on the task at this level."""
    fits = {name for name, one in ADVERSARIES.items() if one.takes(task)}
    if task.lifetime_budget is None and level != "agent" and most_canaries(task) > 1:
        fits.add(ONE_RUN)
    return tuple(name for name in names if name in fits)


def default_adversaries(task: Task, level: StatedLevel = "instance") -> tuple[str, ...]:
    """Return all adversaries that have an attack on the task at this level."""
    return applicable(task, [*ADVERSARIES, ONE_RUN], level)


def run_audit(audit: Audit, out: Path, *, progress: ProgressCallback = silent) -> dict[str, Any]:
    """Do an audit, or what is left of it, and write its document.

    Args:
        out: folder of its files; created if missing.

    Raises:
        BadData: the folder belongs to another audit, or to something else.
        LabelerError: the task cannot be run.
    """
    if not (out / RUNS_FILE).exists() and out.is_dir() and any(map(_is_foreign, out.iterdir())):
        raise BadData(f"output folder {out} is not empty and holds no audit of ours; choose an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out / LOCK_FILE, f"the output {out.name!r}"):
        book = _Book(out / RUNS_FILE, audit.identity)
        attempts = []
        for name in audit.adversaries:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="audit-") as folder:
                place = Path(folder) / name
                place.mkdir()
                around = Surroundings(
                    task=audit.task.model_copy(update={"backbone_fingerprint": FINGERPRINT}),
                    level=audit.level,
                    features=audit.features,
                    labels=audit.labels,
                    view=audit.view,
                    folder=place,
                    seed=audit.seed,
                    noise_seed=audit.noise_seed,
                )
                attempt = (
                    _one_run(around, book, progress)
                    if name == ONE_RUN
                    else _many_runs(name, around, audit.runs, book, progress)
                )
            attempts.append(attempt)
            book.seconds += time.perf_counter() - started
        facts = AuditFacts(
            task=audit.task.model_dump(mode="json"),
            task_digest=audit.task.digest,
            level=audit.level,
            view=audit.view,
            confidence=audit.confidence,
            seed=audit.seed,
            noise="the operating system's" if audit.noise_seed is None else f"seeded with {audit.noise_seed}",
            attempts=tuple(attempts),
        )
        document = {
            "format": FORMAT,
            "private": audit.is_private,
            "facts": facts.model_dump(mode="json"),
            "findings": findings_of(facts).model_dump(mode="json"),
            "curves": {name: _curve(book, name) for name in audit.adversaries if name != ONE_RUN},
            "seconds": round(book.seconds, 1),
        }
        replace_file(out / REPORT_FILE, (json.dumps(document, indent=1) + "\n").encode())
        return document


def _is_foreign(path: Path) -> bool:
    """True for a file that an audit stopped before its first run does not leave."""
    return path.name != LOCK_FILE and not path.name.startswith(f".{RUNS_FILE}.")


def _many_runs(name: str, around: Surroundings, runs: int, book: _Book, progress: ProgressCallback) -> Attempt:
    missing = [number for number in range(runs) if (name, number) not in book.scores]
    if missing:
        progress(f"Attack {name}", runs - len(missing), runs)
        attack = ADVERSARIES[name].prepare(around)
        book.note(name, attack.moved_mu)
        for done, number in enumerate(missing, start=runs - len(missing) + 1):
            book.add(name, number, attack.trial(number, present=bool(number % 2)))
            progress(f"Attack {name}", done, runs)
    absent = [book.scores[name, number] for number in range(0, runs, 2)]
    present = [book.scores[name, number] for number in range(1, runs, 2)]
    return Attempt(
        adversary=name,
        sentence=ADVERSARIES[name].sentence,
        absent=len(absent),
        present=len(present),
        false_positives=sum(score > 0 for score in absent),
        false_negatives=sum(score <= 0 for score in present),
        moved_mu=book.moved.get(name),
    )


def _one_run(around: Surroundings, book: _Book, progress: ProgressCallback) -> Attempt:
    canaries = most_canaries(around.task)
    coins = np.random.default_rng([around.seed, 77]).integers(0, 2, canaries).astype(bool)
    if (ONE_RUN, 0) not in book.scores:
        scores = one_run_scores(around, coins, progress)
        for number, score in enumerate(scores):
            book.add(ONE_RUN, number, score)
    clear = np.array([book.scores[ONE_RUN, number] for number in range(canaries)])
    guesses = max(1, canaries // _GUESSED_SHARE)
    clearest = np.argsort(-np.abs(clear), kind="stable")[:guesses]
    return Attempt(
        adversary=ONE_RUN,
        sentence="every record and question is its own; one run, many canaries, each there by a coin",
        absent=int((~coins).sum()),
        present=int(coins.sum()),
        false_positives=int((clear[~coins] > 0).sum()),
        false_negatives=int((clear[coins] <= 0).sum()),
        canaries=canaries,
        guesses=guesses,
        correct=int(((clear[clearest] > 0) == coins[clearest]).sum()),
    )


def one_run_scores(around: Surroundings, coins: NDArray[np.bool_], progress: ProgressCallback = silent) -> list[float]:
    """Run one life of the task with the canaries whose coin says so; return a score of each canary."""
    canaries = len(coins)
    if not 0 < coins.sum() < canaries:
        raise InvalidSetting(f"one run needs canaries of both kinds; this task has room for {canaries}")
    alone = poisoned(
        around.task, around.level, canaries=canaries, rng=np.random.default_rng([around.seed, 5]), queries=None
    )
    attack = SceneAttack(alone, around)
    everything = attack.pipeline.expected(attack.worlds.with_canaries(range(canaries)))
    seen = attack.pipeline.run(
        attack.worlds.with_canaries(np.flatnonzero(coins).tolist()),
        seed=None if around.noise_seed is None else f"{around.noise_seed} one run",
    )
    scores = []
    for number in range(canaries):
        without = attack.pipeline.expected(attack.worlds.with_canaries(j for j in range(canaries) if j != number))
        scores.append(KnownVotes(around.task, without, everything).score(seen))
        progress(f"Attack {ONE_RUN}", number + 1, canaries)
    return scores


def _curve(book: _Book, name: str) -> list[list[float]]:
    """Return false positive and false negative rates of every threshold, at most a hundred points."""
    numbers = sorted(number for key, number in book.scores if key == name)
    absent = np.sort([book.scores[name, number] for number in numbers if number % 2 == 0])
    present = np.sort([book.scores[name, number] for number in numbers if number % 2 == 1])
    found = []
    for threshold in np.quantile(np.concatenate([absent, present]), np.linspace(0, 1, 101)):
        positives = 1 - np.searchsorted(absent, threshold, side="right") / len(absent)
        negatives = np.searchsorted(present, threshold, side="right") / len(present)
        found.append([round(float(positives), 5), round(float(negatives), 5)])
    return found


class _Book:
    """The counts of an audit: one line of JSON per run, flushed at once; a line cut off by a crash is counted again."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self.scores: dict[tuple[str, int], float] = {}
        self.moved: dict[str, float] = {}
        self.seconds = 0.0
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if lines and json.loads(lines[0]) != identity:
                raise BadData(
                    f"{path.parent} holds the runs of another audit (another task, level, view, seed or records); "
                    "give an empty folder"
                )
            whole = [line for line in lines if line.endswith("\n")]
            for line in whole[1:]:
                one = json.loads(line)
                if "moved_mu" in one:
                    self.moved[one["adversary"]] = float(one["moved_mu"])
                else:
                    self.scores[one["adversary"], one["run"]] = float(one["score"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadData(f"{path} is damaged, or no file of an audit; give an empty folder") from None
        replace_file(path, "".join(whole or [json.dumps(identity) + "\n"]).encode())

    def note(self, adversary: str, moved_mu: float | None) -> None:
        """Record how far an adversary's canary moves what it sees, where that is known."""
        if moved_mu is not None and adversary not in self.moved:
            self.moved[adversary] = moved_mu
            self._append({"adversary": adversary, "moved_mu": moved_mu})

    def add(self, adversary: str, run: int, score: float) -> None:
        if not math.isfinite(score):
            score = math.copysign(1e300, score) if not math.isnan(score) else 0.0
        self.scores[adversary, run] = score
        self._append({"adversary": adversary, "run": run, "score": score})

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


__all__ = ["FINGERPRINT", "ONE_RUN", "STRONGEST", "Audit", "run_audit"]


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 400, 56, 48, 14
_CANARY = {"instance": "one record", "person": "the records of one person", "agent": "a whole agent"}


def render_page(document: dict[str, Any]) -> str:
    """Render the page of a document of `checks.audit.run`."""
    facts, findings = read_document(document)
    found = findings.findings
    longest = 1.12 * max(findings.promised_epsilon, *(max(one.epsilon, one.moved_epsilon or 0) for one in found)) or 1.0
    step, scale = min(52, (_HEIGHT - 70) / len(found)), (_WIDTH - 20) / longest
    alphas = np.concatenate([np.linspace(0, 0.02, 20), np.linspace(0.02, 1, 80)])
    least = ndtr(ndtri(np.clip(1 - alphas, 1e-12, 1 - 1e-12)) - findings.promised_mu)
    rows = [
        {
            "attempt": attempt,
            "found": one,
            "color": f"var(--c{(place + 1) % 5})",
            "y": 42 + step * place,
            "bar": round(max(1.5, scale * one.epsilon), 1),
            "moved": None if one.moved_epsilon is None else round(10 + scale * min(one.moved_epsilon, longest), 1),
            "curve": " ".join(_at(x, y) for x, y in document["curves"].get(one.adversary, ())),
        }
        for place, (attempt, one) in enumerate(zip(facts.attempts, found, strict=True))
    ]
    environment = page_templates("checks", "audit")
    return environment.get_template("page.html.j2").render(
        facts=facts,
        findings=findings,
        task=facts.task,
        canary=_CANARY[facts.level],
        verdict=in_words(findings),
        stays_here=STAYS_HERE if document["private"] else "",
        rows=rows,
        step=step,
        bar_limit=round(10 + scale * findings.promised_epsilon, 1),
        bound=" ".join(_at(float(x), float(y)) for x, y in zip(alphas, least, strict=True)),
        at=_at,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        bottom=_BOTTOM,
    )


def read_document(document: dict[str, Any]) -> tuple[AuditFacts, AuditFindings]:
    """Read the facts that were counted and the findings that they prove."""
    facts, findings = json.dumps(document["facts"]), json.dumps(document["findings"])
    return AuditFacts.model_validate_json(facts), AuditFindings.model_validate_json(findings)


def in_words(findings: AuditFindings) -> str:
    """Return the verdict in a sentence."""
    strongest = max(findings.findings, key=lambda one: one.epsilon)
    if findings.is_above:
        broken = ", ".join(one.adversary for one in findings.findings if one.is_above)
        return (
            f"The promise is broken: {broken} proved more than mu {findings.promised_mu:.4g}, for which the task is "
            "charged. What ran is not what was priced."
        )
    return (
        f"Nothing contradicts the promise. The strongest adversary, {strongest.adversary}, proved epsilon "
        f"{strongest.epsilon:.3g} of the {findings.promised_epsilon:.4g} promised."
    )


def _at(x: float, y: float) -> str:
    """Return the place of a pair of error rates in the picture of curves."""
    return f"{_LEFT + x * (_WIDTH - _LEFT - 10):.1f},{_TOP + (1 - y) * (_HEIGHT - _TOP - _BOTTOM):.1f}"


PRIVATE_SHARE: Final = 0.6
"""The share of the records that agents hold. The rest is public."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Labeled features, divided into what agents hold and what is public.

    Attributes:
        name: of where they come from, for people.
        classes: in label order.
        public, truth: features of public images, and what they show, which only scoring reads.
        is_private: whether a private shard holds them.

    Raises:
        BadData: features outside the exact range.
    """

    name: str
    classes: tuple[str, ...]
    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    public: NDArray[np.int16] = field(repr=False)
    truth: NDArray[np.int16] = field(repr=False)
    is_private: bool = False

    def __post_init__(self) -> None:
        check_features(self.features)
        check_features(self.public, what="public features")


def divided(
    name: str, classes: tuple[str, ...], features: NDArray[np.int16], labels: NDArray[np.int16], *, seed: int
) -> Pool:
    """Divide records into a pool in which PRIVATE_SHARE of them, at random, are the agents'.

    Raises:
        InvalidSetting: too few records for both parts, or one whose class nobody knows.
    """
    if len(labels) < 10 or labels.min() < 0:
        raise InvalidSetting(f"this deals at least 10 records whose classes are known; {name} has {len(labels)}")
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    private, public = np.split(order, [int(PRIVATE_SHARE * len(order))])
    return Pool(name, classes, features[private], labels[private], features[public], labels[public])


def digits_pool(*, seed: int) -> Pool:
    """Return the 1,797 handwritten digits that come with scikit-learn, as pixels: no download and no backbone."""
    from feature_store.rows import quantize
    from workers.digits import CLASSES, load_digits

    images, targets = load_digits()
    return divided(
        "the handwritten digits",
        CLASSES,
        quantize(images.reshape(len(images), -1)),
        targets.astype(np.int16),
        seed=seed,
    )


def shard_pool(shard: Shard, *, seed: int) -> Pool:
    """Return the records of a shard, without deleted ones."""
    if shard.has_attributes:
        raise InvalidSetting(
            f"{shard.path} holds attributes, any number per record, and this works with one class per record; run "
            "`labeler run` on it"
        )
    pool = divided("the shard", shard.classes, shard.features[shard.rows], shard.labels[shard.rows], seed=seed)
    return replace(pool, is_private=not shard.is_public)
