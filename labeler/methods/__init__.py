"""The ways in which agents answer: a module each, with its sensitivity, the proof of it, and how an agent answers.

    sensitivity     what a module has to say, and what prices are made of; a method that proves nothing has none
    knn, reverse_knn, ensemble, blind_average, aux_distill, federated, evaluate

Whoever adds a method writes such a module, a page docs/math/NAME.md, and a row in `METHODS`. Nobody else names methods.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Final

from pydantic import AfterValidator, WithJsonSchema

from labeler.methods import aux_distill, blind_average, ensemble, evaluate, federated, knn, reverse_knn
from labeler.methods.sensitivity import Method, ReleaseKind

METHODS: Final[dict[str, Method]] = {
    "knn": knn.METHOD,
    "reverse-knn": reverse_knn.METHOD,
    "ensemble": ensemble.METHOD,
    "blind-average": blind_average.METHOD,
    "aux-distill": aux_distill.METHOD,
    "federated": federated.METHOD,
    "evaluate": evaluate.METHOD,
}
"""Every way to answer, by the name a task gives it, in the order of introduction."""


def _known(name: str) -> str:
    if name not in METHODS:
        near = get_close_matches(name.lower().replace("_", "-"), METHODS, n=1)
        raise ValueError(
            f"Input should be one of {', '.join(METHODS)}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return name


MethodName = Annotated[str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(METHODS)})]
"""A name in METHODS, as models of pydantic read it."""

__all__ = ["METHODS", "Method", "MethodName", "ReleaseKind"]
