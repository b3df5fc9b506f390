"""Voting on many attributes at once: an agent says for each query which attributes are there, at most tau of them.

With one class per query an agent casts one vote. With attributes (a face may smile, wear glasses and be young) it
could cast as many as there are attributes, and the price would grow with all of them. So each agent casts at most tau
votes per query, for the attributes it is most certain of (tau-clipping: Zhu et al. 2020, "Private-kNN", and Zhu et
al. 2021 on CelebA with tau = 4). An attribute is on when at least half of the agents that answered say so.

**What it costs.** A ballot's row is the indicator of a set T of at most tau of A attributes, so its entries are 0 or
1. Let T' be the set in its place on neighbouring data. The rows differ, by one vote each, exactly where one set holds
an attribute that the other does not: the squared L2 distance (and the L1 distance) per query is |T \\ T'| + |T' \\ T|.

* Agent level, zero-out: T' is empty, so it is |T| <= min(tau, A). Attained by every agent that casts all its votes.
* Instance level: one record may change the trained model, and with it every attribute it names. At most tau votes
  leave and tau arrive, and no more than A attributes can differ at all: min(2 tau, A). Attained by two sets of tau with
  as little in common as possible. Nothing smaller holds, since a learner may answer anything after any record.

Q queries are different coordinates, so squares add up: Q times as much. One coordinate changes by at most 1 at both
levels. Where A <= tau nothing is clipped: that is plain voting on A attributes.

A positive vote is a count like any other: the sum, its noise and its price are those of every other method.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting, PrivacyRefusal
from labeler.task import Level


def attribute_ballots(
    certainties: NDArray[np.floating], *, most_positive: int, threshold: float = 0.5
) -> NDArray[np.int64]:
    """Vote for the attributes that are more certain than a threshold, at most the tau most certain of each query.

    Among equally certain ones the lowest attribute number goes first, so that a ballot is a function of what the model
    says and not of how a sort goes about it.

    Args:
        certainties: shape (num_queries, num_attributes), finite: probabilities, or any other score.
        most_positive: tau, at least 1; public and the same for every agent.
        threshold: an attribute of at most this certainty gets no vote. Public or the agent's own choice: either way
            it moves nothing in the proof.

    Returns:
        Votes, int64 of 0 and 1, shape (num_queries, num_attributes); each row sums to at most tau.

    Raises:
        InvalidSetting: tau below 1, or a threshold that is not finite.
        BadData: certainties that are no matrix, or not finite.
    """
    _check_most_positive(most_positive)
    if not math.isfinite(threshold):
        raise InvalidSetting(f"the threshold must be a finite number, found {threshold}")
    if certainties.ndim != 2 or not certainties.size or not np.isfinite(certainties).all():
        raise BadData("certainties must be a matrix of finite numbers, one row per query, one column per attribute")
    order = np.argsort(-certainties, axis=1, kind="stable")[:, :most_positive]
    ballots = np.zeros(certainties.shape, dtype=np.int64)
    np.put_along_axis(ballots, order, 1, axis=1)
    return ballots * (certainties > threshold)


def check_attribute_ballots(ballots: NDArray[np.int64], *, num_attributes: int, most_positive: int) -> None:
    """Refuse ballots beyond what the price was computed for. The last place where anybody can see one.

    Raises:
        InvalidSetting: not int64 of shape (num_queries, num_attributes), or no query.
        PrivacyRefusal: an entry other than 0 and 1, or more than tau votes at one query.
    """
    _check_most_positive(most_positive)
    if ballots.dtype != np.int64 or ballots.ndim != 2 or ballots.shape[1] != num_attributes or not len(ballots):
        raise InvalidSetting(
            f"ballots must be int64 of shape (num_queries, {num_attributes}); "
            f"found {ballots.dtype} of shape {ballots.shape}"
        )
    # Entries first: only bounded entries can be summed without wrapping around.
    if ballots.min() < 0 or ballots.max() > 1:
        raise PrivacyRefusal("a ballot holds a count other than 0 and 1, which the price does not cover")
    if ballots.sum(axis=1).max() > most_positive:
        raise PrivacyRefusal(
            f"a ballot names more than {most_positive} attributes at one query, which the price does not cover"
        )


def attributes_squared_sensitivity(level: Level, *, queries: int, num_attributes: int, most_positive: int) -> int:
    """Squared L2 sensitivity of the sums of a batch of queries, in votes squared; the module holds the proof.

    Args:
        level: whose presence is protected: one record of one agent, or an agent (zero-out).
        queries: Q, at least 1.
        num_attributes: A, at least 1.
        most_positive: tau, at least 1.

    Returns:
        Q min(2 tau, A) at instance level, Q min(tau, A) at agent level.
    """
    _check_most_positive(most_positive)
    if queries < 1 or num_attributes < 1:
        raise InvalidSetting(f"at least one query and one attribute, found {queries} and {num_attributes}")
    return queries * min(most_positive if level == "agent" else 2 * most_positive, num_attributes)


def attributes_on(noisy_sums: NDArray[np.floating], *, contributors: int) -> NDArray[np.bool_]:
    """Which attributes at least half of the agents named, as far as the noisy sums tell. Costs no privacy.

    Args:
        noisy_sums: released sums in votes, shape (num_queries, num_attributes).
        contributors: how many agents answered: public.

    Returns:
        bool, of the same shape.

    Raises:
        InvalidSetting: no contributors.
    """
    if contributors < 1:
        raise InvalidSetting(f"at least one agent must have answered, found {contributors}")
    return np.asarray(2 * noisy_sums >= contributors)


def _check_most_positive(most_positive: int) -> None:
    if most_positive < 1:
        raise InvalidSetting(f"an agent names at most tau attributes per query, tau at least 1; found {most_positive}")
