"""A mechanism without a proof beside it, an independent oracle and a property test fails here.

Mechanisms are found, not listed: the proved functions of every method, and every class of labeler that has a price
(`mu_squared`, `event`), a `sensitivity` or a sampler.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import labeler.accounting
import labeler.methods
from labeler.methods import METHODS, Method
from labeler.methods.sensitivity import BoundedNumbers, CountedVotes
from labeler.task import Task

ROOT = Path(__file__).parent.parent
PROOF = re.compile(r"\*{1,2}(Proof|Fact|Sensitivity|Instance)\b")
"""What a proof begins with, in the docstring of a mechanism or of its module."""
ORACLE = re.compile(r"^(?:from|import) (?:mpmath|dp_accounting|opendp|itertools|tests\.oracles)\b", re.MULTILINE)
PRICED = ("mu_squared", "event", "sensitivity", "sample")

Mechanism = type | Callable[..., object]


@cache
def modules_with(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """The text of every test module but this one that has such a line."""
    texts = (path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__))
    return tuple(text for text in texts if pattern.search(text))


def lacks(mechanism: Mechanism) -> list[str]:
    """What a mechanism lacks: a proof; for a class that no method stands for, also tests that name it."""
    beside = f"{inspect.getdoc(mechanism)}\n{inspect.getdoc(inspect.getmodule(mechanism))}"
    found = [] if PROOF.search(beside) else ["proof"]
    if isinstance(mechanism, type):
        name = re.compile(rf"\b{mechanism.__name__}\b")
        kinds = {"oracle": ORACLE, "property test": re.compile(r"^@given\b", re.MULTILINE)}
        found += [kind for kind, sign in kinds.items() if not any(map(name.search, modules_with(sign)))]
    return found


def proved_by(method: Method) -> list[Mechanism]:
    match method.stated:
        case CountedVotes(squared=squared, largest=largest):
            return [squared, largest]
        case BoundedNumbers(answer_sum=answer_sum, event=event):
            return [answer_sum, *([] if event is None else [event])]
    return []


def classes() -> Iterator[type]:
    packages = (labeler.accounting, labeler.methods)
    names = [one.name for package in packages for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    for name in (*names, "labeler.noise", "labeler.descent", "labeler.evaluation", "labeler.tally", "labeler.steady"):
        for one in vars(importlib.import_module(name)).values():
            # `BoundedNumbers` holds mechanisms, each of which is looked at.
            is_own = inspect.isclass(one) and one.__module__ == name and one is not BoundedNumbers
            if is_own and any(hasattr(one, fact) or fact in inspect.get_annotations(one) for fact in PRICED):
                yield one


@pytest.mark.parametrize("mechanism", list(classes()), ids=lambda one: one.__name__)
def test_every_priced_class_has_a_proof_an_oracle_and_a_property_test(mechanism: type) -> None:
    assert lacks(mechanism) == []


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_proofs_oracles_on_its_page_and_a_property_test(name: str) -> None:
    assert [(one.__name__, lacks(one)) for one in proved_by(METHODS[name]) if lacks(one)] == []
    page = (ROOT / "docs" / "math" / f"{name}.md").read_text()
    oracles = re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", page.partition("Oracles")[2])
    tested = [one for one in oracles if f'"{name}"' in (ROOT / one).read_text()]
    assert tested, f"docs/math/{name}.md names no oracle that tests {name}"
    assert any(f'"{name}"' in text for text in modules_with(re.compile(r"^@given\b", re.MULTILINE)))


def test_a_planted_mechanism_without_any_of_it_is_caught() -> None:
    class Unproved:
        """A sum of votes, released with noise of the author's taste."""

        mu_squared = 1

    def bound(task: Task, *_: object) -> int:
        """Return two, which looks right."""
        return 2

    assert lacks(Unproved) == ["proof", "oracle", "property test"]
    planted = Method("a sixth", "votes", stated=CountedVotes(bound, bound, bound))
    assert [lacks(one) for one in proved_by(planted)] == [["proof"], ["proof"]]
    assert [one.__name__ for one in classes()].count("IntegerSum") == 1
