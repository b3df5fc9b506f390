"""The ways in which agents answer: a module each, with its traits, its sensitivity and the proof of it.

    terms           what a module has to say: traits, and what is proved
    sensitivity     what prices are made of: asks a task's method, refuses one that proves nothing
    knn, reverse_knn, ensemble, blind_average, aux_distill, federated

Whoever adds a method writes such a module, the module of `workers.voting` that finds its answers, and a row here. Other
modules ask the traits, and not a method's name.
"""

from __future__ import annotations

from typing import Final, Literal

from labeler.methods import aux_distill, blind_average, ensemble, federated, knn, reverse_knn
from labeler.methods.terms import BoundedNumbers, CountedVotes, MethodTraits, ReleaseKind

Method = Literal["knn", "reverse-knn", "ensemble", "blind-average", "aux-distill", "federated"]
"""How agents answer; see METHODS."""

METHODS: Final[dict[Method, MethodTraits]] = {
    "knn": knn.TRAITS,
    "reverse-knn": reverse_knn.TRAITS,
    "ensemble": ensemble.TRAITS,
    "blind-average": blind_average.TRAITS,
    "aux-distill": aux_distill.TRAITS,
    "federated": federated.TRAITS,
}
"""Every way to answer, by the name a task gives it."""

METHOD_NAMES: Final[tuple[Method, ...]] = tuple(METHODS)
"""For help and refusals, in the order of introduction."""

__all__ = [
    "METHODS",
    "METHOD_NAMES",
    "BoundedNumbers",
    "CountedVotes",
    "Method",
    "MethodTraits",
    "ReleaseKind",
]
