"""Put the numbers and facts of a report into words. Bounds are rounded so that they stay true.

**Totals of classes.** Released votes show if a class has hardly any votes, or drowns the others. The sum of a class's
released counts over all questions is its votes plus noise of a known size. The totals are computed from released
numbers and public settings, never from agents' records. So they cost nothing, and tell nothing that the release does
not. No release shows who mislabeled, and who lied.

Ballots on a ball (`labeler.methods.reverse_knn`) are centered: each agent subtracts the mean of each question over all
classes, and shortens the rest. Then a class below the mean has less than zero votes, and so has a class that nobody
holds. Classes that are asked about equally often add up to zero, whatever was answered. So totals of classes tell
nothing there. The page only says whether all numbers, as one vector, are longer than noise alone makes them.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from feature_store.results.page_templates import count
from feature_store.results.report.model import AttributeReport, JobReport
from feature_store.results.scores import UNEQUAL, Scores
from labeler.budget import say_epsilon
from labeler.methods import opened_in_words, unit_in_words
from labeler.rounds.effects import AnswerStatus
from labeler.task import Task

_COIN_SAYS_NOTHING = 0.9995
"""From this share on, the page would say "right at most 100 % of the time", which tells nothing."""


def say_delta(delta: float) -> str:
    """Return a delta in the notation of papers: 1e-4."""
    mantissa, exponent = f"{delta:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def say_percent(share: float | None) -> str:
    """Return a share of 1 in percent, with one decimal; 100 % and 0 % only if they are exact."""
    if share is None:
        return "not known"
    percent = round(100 * share, 1)
    if 0 < share < 1:
        percent = min(99.9, max(0.1, percent))
    return f"{percent:g} %" if percent in (0, 100) else f"{percent:.1f} %"


def say_number(value: float) -> str:
    """Return a number of votes with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def headline(report: JobReport) -> str:
    """Return one claim about how good the labels are, from the best evidence there is."""
    images, unseen = report.images, report.student_accuracy
    if report.attributes is not None:
        return _attributes(report.attributes)
    if images is not None and images.accuracy is not None:
        known = int(images.known.sum())
        whom = f"all {known:,}" if known == len(images) else f"{known:,} of {len(images):,}"
        checked = "" if known == len(images) else " that can be checked"
        said = f"{say_percent(images.accuracy)} of {whom} public images{checked} are labeled right"
        scores = report.image_scores
        # If classes are of unequal size, plain accuracy says little by itself.
        if scores is not None and abs(scores.balanced - scores.accuracy) >= UNEQUAL:
            said += f", {say_percent(scores.balanced)} where each class counts alike"
        return f"{said}."
    if unseen is not None:
        return f"A student trained on the answers is right on {say_percent(unseen)} of unseen images."
    if images is not None:
        labeled = f"{count(len(images), 'public image')} labeled"
        claim = f", half of them with a confidence of {say_percent(images.median_confidence)} or more"
        return f"{labeled}{report.task.traits.claim_confidence(claim, ' by the released model')}."
    if report.label_accuracy is not None:
        return f"{say_percent(report.label_accuracy)} of the answers with a known truth are right."
    return f"{report.answered:,} of {count(len(report.queries), 'question')} answered."


def class_by_class(scores: Scores | None) -> str:
    """Return the balanced accuracy, and for two classes the AUROC; empty if no truth is known."""
    if scores is None:
        return ""
    area = "" if scores.auroc is None else f", AUROC {scores.auroc:.3f}"
    return f"balanced accuracy {say_percent(scores.balanced)}{area}"


def _attributes(said: AttributeReport) -> str:
    whom = f"{count(len(said.outcomes), 'attribute')} of {count(said.count, 'public image')}"
    if said.accuracy is None:
        return f"{whom} labeled, with a mean confidence of {say_percent(said.confidence)}."
    beside = f"always the commoner value: {say_percent(said.commoner)}"
    return f"{say_percent(said.accuracy)} of {whom} are labeled right ({beside})."


def guarantee(report: JobReport) -> str:
    """Return the sentence below the headline, which states the cost."""
    price = report.privacy.instance
    who = f"the {count(report.contributors, 'agent')} that answered"
    if price.epsilon is None:
        return f"There is no guarantee for a single private image of {who}: {price.reason.rstrip('.')}."
    bound = f"epsilon {say_epsilon(price.epsilon)} about any one private image of {who}"
    delta = say_delta(report.privacy.delta)
    if report.is_seeded:
        return f"With noise nobody can predict, nobody outside could learn more than {bound} (delta {delta})."
    return f"Nobody outside can learn more than {bound} (delta {delta})."


def best_guess(epsilon: float, delta: float) -> float:
    """Return the largest chance to guess right whether one image was used; a coin toss has one half.

    For an (epsilon, delta) guarantee, no test of two equally likely neighbors succeeds more often than
    (exp(epsilon) + delta) / (1 + exp(epsilon)) (Kairouz, Oh, Viswanath 2015, Theorem 2.1).
    """
    odds = math.exp(-epsilon)
    return min(1.0, (1 + delta * odds) / (1 + odds))


def what_epsilon_means(report: JobReport) -> tuple[str, ...]:
    """Return sentences that explain epsilon to a newcomer: what it measures and bounds, and whom it protects."""
    price, delta = report.privacy.instance, report.privacy.delta
    first = (
        "Epsilon measures how much everything that was released could change "
        "if any one private image had not been used. The smaller it is, the less anybody can tell."
    )
    if price.epsilon is None:
        return (first, f"This job has none for a single image: {price.reason.rstrip('.')}.")
    guess = best_guess(price.epsilon, delta)
    if guess < _COIN_SAYS_NOTHING:
        second = (
            "Suppose somebody knows every other image and tosses a coin to guess whether this one was used. "
            f"They are right 50 % of the time. After studying every answer, at epsilon {say_epsilon(price.epsilon)}, "
            f"they are right at most {math.ceil(1000 * guess) / 10:.1f} % of the time."
        )
    else:
        second = (
            f"Epsilon {say_epsilon(price.epsilon)} is large: on paper, somebody who knows every other image could "
            "be all but certain whether this one was used."
        )
    third = (
        f"Delta ({say_delta(delta)}) is the small probability that this promise leaves out. Whatever is made from the "
        "answers, such as the student, costs nothing more."
    )
    return first, second, third, *_person(report), *_group(report), report.holds_against


def _group(report: JobReport) -> tuple[str, ...]:
    """Return the bound for any g images of all agents, where the task names their number."""
    price, many = report.privacy.group, report.privacy.group_size
    if price is None or many is None:
        return ()
    together = f"any {many:,} images of all agents together" if many > 1 else "any one image"
    if price.epsilon is None:
        return (f"For {together} there is no bound: {price.reason.rstrip('.')}.",)
    return (f"For {together}, whoever they show, epsilon is {say_epsilon(price.epsilon)}.",)


def _person(report: JobReport) -> tuple[str, ...]:
    """Return the bound for a person who has several images, or say that there is none."""
    price, most = report.privacy.person, report.privacy.records_per_person
    if price is None or most is None:
        return (
            "All of this is about one image. A person with several images is hidden less well. This task does not say "
            "by how much, because it does not bound how many images of one person vote (records_per_person).",
        )
    if price.epsilon is None:
        return (f"For a person with several images there is no bound: {price.reason.rstrip('.')}.",)
    return (
        f"For all images of one person at one agent, of which at most {most:,} {'votes' if most == 1 else 'vote'}, "
        f"epsilon is {say_epsilon(price.epsilon)}. A person with images at two agents is hidden less well than that.",
    )


def talliers(task: Task) -> str:
    """Return the number of talliers, and what they add."""
    if task.dishonest_talliers is None:
        return str(task.talliers)
    return f"{task.talliers}, who add the noise; {task.dishonest_talliers} may be dishonest"


def noise_in_words(task: Task) -> tuple[str, ...]:
    """Describe the noise, and the cost of caution about colluding or missing agents."""
    if not task.noise_parties:
        return (
            "Each agent adds all the noise that its price needs to what it learned, once, before it answers anything. "
            "So the price does not rely on anybody else's noise, and agents that collude do not weaken it.",
            f"With fewer than {task.quorum} of {task.agents} agents nothing is opened.",
        )
    unit, of_talliers = unit_in_words(task), task.noise_by == "talliers"
    votes, unit = (" votes", "votes per class of a question") if unit == "votes" else ("", unit)
    share, total = task.sigma_votes / math.sqrt(task.noise_contributors), task.total_sigma_votes
    counted_on = f"The price counts on {say_number(task.sigma_votes)}{votes} of noise that nobody can subtract."
    lines = []
    if of_talliers:
        dishonest = "One" if task.dishonest_talliers == 1 else "Two"
        lines += [
            "The three talliers hide the sum under noise, each with a standard deviation of "
            f"{say_number(share)} {unit}; agents add none. {counted_on}",
            f"However many agents collude, they know none of it. {dishonest} of the three talliers may pool what they "
            "know with an attacker. Noise that an attacker knows does not count.",
        ]
    else:
        lines.append(
            f"Each agent hides its {task.traits.sums} under noise of its own, with a standard deviation of "
            f"{say_number(share)} {unit}. {counted_on}"
        )
        lines.append(
            f"Up to {count(task.colluding_agents, 'agent')} may pool what they know with an attacker. "
            "Noise that an attacker knows does not count, so the others add more."
            if task.colluding_agents
            else "The price assumes that an attacker knows none of it. Each agent knows only its own."
        )
    lines.append(
        f"Up to {count(task.max_dropouts, 'agent')} may fail to answer; with fewer than {task.quorum} of {task.agents} "
        "nothing is opened."
        if task.max_dropouts
        else "No agent may fail to answer: if one is missing, nothing is opened."
    )
    if of_talliers or task.noise_contributors < task.agents:
        carries = "a sum carries" if of_talliers else "with all agents present a sum carries"
        lines.append(
            f"That caution is paid for in accuracy, not in epsilon: {carries} {say_number(total)}{votes} of noise, "
            f"{total / task.sigma_votes:.2f} times what the price counts on."
        )
    return tuple(lines)


def without_a_bound(report: JobReport) -> tuple[str, ...]:
    """Say why an agent as a whole has no bound, and what would give it one."""
    reason = report.privacy.agent.reason
    return (f"For a whole agent: {reason.rstrip('.')}.",) if reason else ()


def never_revealed(report: JobReport) -> tuple[str, ...]:
    """List what the protocol never reveals."""
    return (
        "any private image, its features or its label",
        report.task.traits.secret,
        f"a sum of {report.task.traits.sums} without noise",
        # Where every record votes exactly once, the noisy sums add up to about as many votes as there are records.
        *(() if report.task.traits.told_beside else ("how many records an agent holds",)),
        *(("how close any question was",) if report.task.release == "winner" else ()),
    )


def was_released(report: JobReport) -> tuple[str, ...]:
    """List what anybody may see, and what the price pays for."""
    opened, also = opened_in_words(report.task), report.task.traits.told_beside
    return (opened, *also, "how many agents took part", "the settings of the task, with its class names", "the price")


def all_warnings(report: JobReport) -> tuple[str, ...]:
    """List what a reader must know before trusting the page, most serious first."""
    found: list[str] = []
    if report.is_seeded:
        found.append(
            "This was a simulation: the noise came from a seed, and whoever knows the seed can subtract it. "
            "The epsilons say what the same settings give with real randomness."
        )
    if report.not_covered:
        found.append(report.not_covered)
    missing = len(report.queries) - report.answered
    if missing:
        counts = report.status_counts
        reasons = [
            words if counts[status] == missing else f"{counts[status]:,} {words}"
            for status, words in (
                (AnswerStatus.ABSTAINED, "too unclear to label"),
                (AnswerStatus.REFUSED_BUDGET, "refused because the budget was spent"),
                (AnswerStatus.FAILED_QUORUM, "for lack of agents"),
            )
            if counts[status]
        ]
        found.append(f"{count(missing, 'question')} got no label: {', '.join(reasons)}.")
    if not report.answered:
        found.append("So there is no student, and no image has a label. What it cost stays paid for.")
    return (*found, *class_totals(report))


STANDS_OUT: Final = 3.0
"""Standard deviations of the noise that a class's total must reach to stand out. Noise alone does so once in 740 times.

A class is called silent only if the mean total of a class is at least twice that. A class with this mean total then
seems silent with the same chance. With fewer votes (a few questions at a small price) no single class stands out,
though all together may.
"""

LOPSIDED: Final = 20.0

ALL_NOISE: Final = (
    "No class's released votes stand out from the noise, so the labels are guessed. Spend more, or ask less."
)


def class_totals(report: JobReport) -> tuple[str, ...]:
    """Return sentences about classes whose released votes are no more than noise, or many times another's."""
    rows = [query.noisy_votes for query in report.queries if query.noisy_votes is not None]
    if not rows or not report.task.noise_parties or report.attributes is not None:
        return ()
    # The sum of squares of noise alone is chi-squared: for n numbers it has mean n and variance 2 n.
    squares = np.square(np.array(rows) / report.task.total_sigma_votes)
    if float(squares.sum()) < squares.size + STANDS_OUT * math.sqrt(2 * squares.size):
        return (ALL_NOISE,)
    if report.task.ballot_radius is not None:
        return ()
    totals = np.sum(rows, axis=0)
    noise = report.task.total_sigma_votes * math.sqrt(len(rows))
    if totals.mean() < 2 * STANDS_OUT * noise:
        return ()
    found: list[str] = []
    silent = [report.class_name(int(label)) for label in np.flatnonzero(totals < STANDS_OUT * noise)]
    if silent:
        found.append(
            f"The released votes for {', '.join(silent)} add up to no more than noise: agents may hold none of "
            f"{'these' if len(silent) > 1 else 'it'}, or too few records for this price. "
            f"{'Their images' if len(silent) > 1 else 'Images of it'} are probably called something else."
        )
    heard = np.flatnonzero(totals >= STANDS_OUT * noise)
    most, least = heard[np.argmax(totals[heard])], heard[np.argmin(totals[heard])]
    if totals[most] >= LOPSIDED * totals[least]:
        found.append(
            f"{report.class_name(int(most))} got about {totals[most] / totals[least]:.0f} times the votes of "
            f"{report.class_name(int(least))}: labels of the rarer class are less sure than they look."
        )
    return tuple(found)
