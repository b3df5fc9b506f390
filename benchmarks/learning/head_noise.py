"""How much noise two private heads get in the paper's tables: its two budgets as shares, and the least for a price."""

from __future__ import annotations

import math
from dataclasses import replace

from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting
from labeler.methods.aux_distill import LocalHeadTerms


def paper_scores_share(
    epsilon_scores: float = 0.1, epsilon_head: float = 0.5, *, delta_scores: float = 1e-5, delta_head: float = 1e-5
) -> float:
    """The share of mu^2 that the paper's two budgets give to the certainty head: 0.05 for its 0.1 and 0.5."""
    scores, head = mu_of_epsilon(epsilon_scores, delta_scores), mu_of_epsilon(epsilon_head, delta_head)
    return scores**2 / (scores**2 + head**2)


def solve_noise(terms: LocalHeadTerms, *, epsilon: float, delta: float, scores_share: float) -> LocalHeadTerms:
    """The same terms with the least noise for which the release of both heads is certified (epsilon, delta).

    Args:
        terms: everything but the noise.
        epsilon: for both heads together, instance level.
        delta: in (0, 1).
        scores_share: share of mu^2 for the certainty head, in (0, 1); 0 for none. `paper_scores_share` has the paper's.

    Raises:
        InvalidSetting: a number is out of bounds.
    """
    if not 0 <= scores_share < 1:
        raise InvalidSetting(f"the share of the certainty head lies in [0, 1), found {scores_share!r}")
    if not 0 < epsilon < math.inf:
        raise InvalidSetting(f"epsilon must be positive and finite, found {epsilon!r}")
    mu = mu_of_epsilon(epsilon, delta)
    while True:
        solved = replace(
            terms,
            sigma_head=1 / (mu * math.sqrt(1 - scores_share)),
            sigma_scores=1 / (mu * math.sqrt(scores_share)) if scores_share else None,
        )
        found = solved.epsilon(delta)
        if found <= epsilon:
            return solved
        # Rounding and the certificate cost about a hundredth; epsilon grows with mu at least in proportion.
        mu *= min(epsilon / found, 1 - 1e-6)
