"""The methods by which agents answer: one module each, with its sensitivity, its proof, and an agent's answer.

    sensitivity     what a module must state, and prices that follow; a method without a proof has no price
    knn, reverse_knn, ensemble, blind_average, aux_distill, federated, evaluate

A new method needs such a module, a page docs/math/NAME.md, and a row in `METHODS`. No other module names methods.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, WithJsonSchema

from labeler.methods import aux_distill, blind_average, ensemble, evaluate, federated, knn, reverse_knn
from labeler.methods.sensitivity import Method, ReleaseKind
from labeler.settings import nearest

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

__all__ = ["DEFAULT_METHOD", "DEFAULT_RELEASE", "METHODS", "Method", "MethodName", "ReleaseKind"]
