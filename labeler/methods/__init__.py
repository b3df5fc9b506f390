"""The methods by which agents answer: one module each, with its sensitivity, its proof, and an agent's answer.

    sensitivity     what a module must state, and prices that follow; a method without a proof has no price
    site_offset     what a site takes off its records before they vote, with its proof
    knn, reverse_knn, ensemble, blind_average, aux_distill, federated, evaluate

A new method needs such a module, a page docs/math/NAME.md, and a row in `METHODS`. No other module names methods.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, WithJsonSchema

from labeler.budget import LEAST_DELTA_OF_WINNERS
from labeler.errors import PrivacyRefusal
from labeler.methods import aux_distill, blind_average, ensemble, evaluate, federated, knn, reverse_knn
from labeler.methods.aux_distill import NEGATIVES_EVERY
from labeler.methods.sensitivity import BoundedNumbers, CountedVotes, Method, ReleaseKind, sums_means, training_of
from labeler.setting import PLAIN
from labeler.settings import nearest

if TYPE_CHECKING:
    from labeler.task import Task

DEFAULT_METHOD: Final = "reverse-knn"
"""The method of a task that names none: over REST, in task files, in notebooks and on the command line."""

DEFAULT_RELEASE: Final[ReleaseKind] = "histogram"
"""What a task opens that does not say."""

METHODS: Final[dict[str, Method]] = {
    "knn": knn.METHOD,
    "reverse-knn": reverse_knn.METHOD,
    "ensemble": ensemble.METHOD,
    "blind-average": blind_average.METHOD,
    "aux-distill": aux_distill.METHOD,
    "federated": federated.METHOD,
    "evaluate": evaluate.METHOD,
}
"""Every method, by the name a task gives it, in the order of introduction."""


def _known(name: str) -> str:
    if name not in METHODS:
        near = nearest(name, METHODS)
        raise ValueError(f"must be one of {', '.join(METHODS)}" + (f"; did you mean {near!r}?" if near else ""))
    return name


MethodName = Annotated[str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(METHODS)})]
"""A name in METHODS, as models of pydantic read it."""


def least_delta(task: Task) -> float:
    """Return the least delta at which the charges of a task bound anything; 0 if they do at every one.

    The charges of winners and of sums over secret samples are pairs, of which a ledger keeps only the Gaussian part
    (`labeler.accounting.losses`). Below this delta the rest may exceed the part that is held back (`labeler.budget`).
    So an account that has paid for one is never stated at a smaller delta.
    """
    return LEAST_DELTA_OF_WINNERS if task.release == "winner" or task.sampled is not None else 0.0


def unit_in_words(task: Task) -> str:
    """Return the unit of `sigma_votes`, for people."""
    if task.traits.counts:
        return "votes"
    return f"times what one {'record' if task.sampled is None else task.sampled.unit} can change"


def contribution_in_words(task: Task) -> str:
    """Return what an agent contributes, for people."""
    if task.sampled is not None:
        if task.sampled.unit == "record":
            return "in each step the clipped gradients of a secret sample of its records"
        return "in each step its clipped update of the model, or zero where its secret coin said no"
    if task.attributes_per_record is not None:
        most = task.votes_of_a_record
        each = "all of them" if most == task.num_classes else f"the first {most} of each"
        return f"{task.traits.attributes}, {each}"
    if task.traits.has_local_noise and training_of(task).score_share == 0:
        return "soft labels of a model with noise of its own, of which all agents' weigh the same"
    return "the sums of its records by class, along public axes" if sums_means(task) else task.traits.answer


def opened_in_words(task: Task) -> str:
    """Return what anybody may see of a job's sums, for people."""
    if task.release == "winner":
        return "the winning class of each question, chosen under noise"
    if sums_means(task):
        return "the sum of all agents' records by class, along public axes, under noise, and the labels it gives"
    if task.sampled is not None:
        return "each step of training a linear model under noise, hence the model itself and the labels it gives"
    several = task.attributes_per_record is not None
    about = "attribute, and the labels they give" if several else "class, and the label it gives"
    return task.traits.rows_about(
        f"one noisy sum of {task.traits.sums} per question and {about}",
        "a linear model: the mean of the agents' models under noise, and the labels it gives",
    )


def attacked_methods() -> list[str]:
    """Return the methods for which `labeler audit` has adversaries, by name."""
    return sorted(name for name, method in METHODS.items() if method.is_attacked)


def proof_of(method: str) -> tuple[str, str]:
    """Return the function whose docstring proves a method's sensitivity, and the method's paper.

    The paper is in the first line of the docstring of the function's module.

    Raises:
        PrivacyRefusal: no sensitivity is stated, so there can be no evidence of it.
    """
    match METHODS[method].stated:
        case CountedVotes(squared=function) | BoundedNumbers(answer_sum=function):
            words = inspect.getdoc(inspect.getmodule(function)) or ""
            return f"{function.__module__}.{function.__qualname__}", words.partition("\n")[0]
    raise PrivacyRefusal(f"method {method!r} has no stated sensitivity, so nothing can be evidence of its guarantee")


def check(task: Task) -> None:
    """Refuse a task with fields that mean nothing for its method, or without those that its method needs.

    Raises:
        ValueError: the first such field.
    """
    if "k" not in task.traits.takes and task.k != 1:
        raise ValueError(f"k must be 1 for method {task.method}, which has no neighbours; found {task.k}")
    if task.release not in task.traits.releases:
        raise ValueError(
            f"release must be {' or '.join(task.traits.releases)} for method {task.method}: the largest of a row "
            "of its sums is not what was asked for"
        )
    _check_learner(task)
    negatives = len(task.traits.negatives(task))
    if negatives and task.training and task.training.dimension >= negatives:
        raise ValueError(
            f"training.dimension must be below the {negatives} public negatives, which are every "
            f"{NEGATIVES_EVERY}th query; found {task.training.dimension}"
        )
    _check_sampled(task)
    if task.training is not None and task.training.axes is not None and "training.axes" not in task.traits.takes:
        raise ValueError(
            f"training.axes only means something for method {_methods_that_take('training.axes')}, found {task.method}"
        )
    if task.grid_scale is not None and not task.traits.counts:
        raise ValueError(f"grid_scale follows from the other fields for method {task.method}; leave it out")
    for name in ("max_agent_records", "ballot_radius", "offset_share"):
        if getattr(task, name) is not None and name not in task.traits.takes:
            raise ValueError(f"{name} only means something for method {_methods_that_take(name)}")
    if task.group_size is not None and (task.sampled is not None or task.lifetime_budget is not None):
        raise ValueError(
            f"group_size goes with no {'sampled training' if task.sampled is not None else 'lifetime_budget'}: of "
            "records that a secret coin draws, or that fall silent one by one, no price for several together is proved"
        )
    if task.lifetime_budget is not None:
        _check_life(task)
    if task.attributes_per_record is not None:
        _check_attributes(task)
    if task.dishonest_talliers is not None and task.traits.has_local_noise:
        raise ValueError(
            f"dishonest_talliers must not be given for method {task.method}: its noise is in the model from "
            "which each agent answers, before there is anything to sum, and no noise on the sum stands in for "
            "it; leave it out, so that the agents add it"
        )


def _check_learner(task: Task) -> None:
    learners = task.traits.learners
    if task.training is None:
        if learners and PLAIN not in learners:
            raise ValueError(
                f"training must be given for method {task.method}: it says how agents train (docs/task-training.md)"
            )
    elif not learners:
        raise ValueError(f"training must not be given for method {task.method}; take it out")
    elif task.training.learner not in learners:
        raise ValueError(
            f"training.learner must be {' or '.join(learners)} for method {task.method}, found {task.training.learner}"
        )


def _check_attributes(task: Task) -> None:
    if not task.traits.attributes:
        taking = " or ".join(name for name, method in METHODS.items() if method.attributes)
        raise ValueError(
            f"attributes_per_record only means something for method {taking}: of {task.method} nobody has stated what "
            "a record with several attributes changes, and how its sums are read"
        )
    if task.release != "histogram":
        raise ValueError(
            "release must be histogram with attributes_per_record: a winner is the one class with most votes, and "
            "of attributes any number may hold at once"
        )


def _check_sampled(task: Task) -> None:
    sampled = task.sampled
    if (sampled is not None) != ("training.sampled" in task.traits.takes):
        raise ValueError(
            f"training.sampled must {'' if sampled is None else 'not '}be given for method {task.method}: it says "
            "how a model is trained in steps over secret samples"
        )
    if sampled is None:
        return
    if task.max_queries % task.steps or task.rows < 2:
        raise ValueError(
            f"max_queries must be as many rows for each of the {task.steps} steps (training.iterations), at least "
            f"2; found {task.max_queries}"
        )
    if task.records_per_person is not None:
        raise ValueError(
            "records_per_person goes with no sampled training: under a cap one record replaces another, and the "
            "price is proved for a record that comes or goes"
        )


def _check_life(task: Task) -> None:
    if "lifetime_budget" not in task.traits.takes:
        raise ValueError(
            f"lifetime_budget only means something for method {_methods_that_take('lifetime_budget')}: of "
            f"{task.method} nobody has proved what a record costs that has spent its budget and falls silent"
        )
    if task.a_record_may_be_replaced:
        raise ValueError(
            "lifetime_budget goes with neither max_agent_records nor records_per_person: under a cap a record that "
            "leaves lets another in, which has a budget of its own to spend"
        )
    budget = task.lifetime_budget
    asked = () if budget is None or budget.asked_classes is None else budget.asked_classes
    if len(set(asked)) != len(asked) or not set(asked) <= set(task.classes):
        raise ValueError("lifetime_budget.asked_classes must be different classes of the task")
    if task.offset_share is not None:
        raise ValueError(
            "lifetime_budget does not go with offset_share: an image that has spent its budget would still move the "
            "votes of its site's other images, unpaid"
        )
    if task.ballot_radius is not None:
        raise ValueError(
            "lifetime_budget does not go with ballot_radius: drawn onto a ball, every count of an agent moves with "
            "each record, and a record pays for its own votes alone"
        )


def _methods_that_take(field: str) -> str:
    return " or ".join(name for name, method in METHODS.items() if field in method.takes)


__all__ = [
    "DEFAULT_METHOD", "DEFAULT_RELEASE", "METHODS", "Method", "MethodName", "ReleaseKind", "attacked_methods", "check",
    "contribution_in_words", "least_delta", "opened_in_words", "proof_of", "unit_in_words",
]  # fmt: skip
