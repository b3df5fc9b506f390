"""Bodies that hold numbers of a round: shares, what is held of them, sums of them, and winners.

As in `labeler.messages.rounds`, a decoder believes nothing. Shares and sums are secret, and sealed before they leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from labeler.errors import ProtocolViolation, TooLarge
from labeler.messages.envelope import (
    MAX_MESSAGE_BYTES,
    read_json,
    read_with_array,
    read_with_arrays,
    write_json,
    write_with_array,
    write_with_arrays,
)
from labeler.messages.rounds import check_contributors, check_shape, round_fields, round_from
from labeler.randomness import KEY_BYTES
from labeler.sharing import SHARING_ID_BYTES, ShareVector
from labeler.tally import AggregateShare, BallotShare
from labeler.untrusted import Digest, Flag, SharingId, check_mapping, check_party_id, hex_bytes, names_of, strict, whole
from labeler.winner import Winner, WinnerTerms

_Shape = Annotated[
    list[Annotated[int, whole(1)]],
    Field(min_length=1, max_length=4, description="1 to 4 dimensions, each a whole number of at least 1"),
]
_Contributors = Annotated[list[str], Field(description="a list of agents")]


@strict("a share")
class _ShareHead:
    """A share as it is written, but for its words or their seed."""

    shape: _Shape
    sharing_id: SharingId
    is_seeded: Flag


@strict("a share of ballots and noise")
class _BallotShareHead:
    """The same where ballots and noise come apart."""

    shape: _Shape
    ballots_id: SharingId
    noise_id: SharingId
    is_seeded: Flag


@strict("an aggregate share")
class _AggregateHead:
    """A tallier's sum as it is written, but for its words."""

    tallier: Annotated[int, whole(0, 2)]
    round: Annotated[Any, Field(description="a round")]
    contributors: _Contributors
    sharings_digest: Digest
    is_seeded: Flag


@strict("a winner")
class _WinnerHead:
    """Winners as they are written, but for the labels."""

    tallier: Annotated[int, whole(0, 2)]
    round_digest: Digest
    contributors: _Contributors
    sharings_digest: Digest
    is_seeded: Flag


def share_to_bytes(share: ShareVector | BallotShare) -> bytes:
    """Body of "input-share" before it is sealed. Secret.

    The field in which shares add up is not written: both sides know it from the terms of the round.
    """
    if isinstance(share, BallotShare):
        content = {
            "version": "labeler-ballot-share/1",
            "shape": list(share.shape),
            "ballots_id": share.ballots.sharing_id.hex(),
            "noise_id": share.noise.sharing_id.hex(),
            "is_seeded": share.is_seeded,
        }
        parts = {"ballots": share.ballots, "noise": share.noise}
        if share.ballots.seed is None or share.noise.seed is None:
            return write_with_arrays(content, {f"{name}_words": part.expand() for name, part in parts.items()})
        seeds = {"ballots_seed": share.ballots.seed, "noise_seed": share.noise.seed}
        return write_with_arrays(content, {name: np.frombuffer(seed, dtype=np.uint8) for name, seed in seeds.items()})
    content = {
        "version": "labeler-share/1",
        "shape": list(share.shape),
        "sharing_id": share.sharing_id.hex(),
        "is_seeded": share.is_seeded,
    }
    if share.seed is not None:
        return write_with_array(content, "seed", np.frombuffer(share.seed, dtype=np.uint8))
    return write_with_array(content, "words", share.expand())


def share_from_bytes(
    data: bytes, *, max_entries: int, terms: WinnerTerms | None = None, most_bytes: int = MAX_MESSAGE_BYTES
) -> ShareVector | BallotShare:
    """Read a share.

    Args:
        data: what `share_to_bytes` wrote.
        max_entries: most numbers the shared vector may have (queries times classes of the round). A seed of 32
            bytes stands for a vector of any size, so without the bound a short message could fill the memory of
            a tallier.
        terms: of the round, in a winner round. They say in which field the words must be residues, and whether
            ballots and noise come apart.
        most_bytes: largest body taken; more than a message may have only for one that never travelled.

    Raises:
        ProtocolViolation: malformed, or not a share of such a round.
        TooLarge: the shape has more entries.
    """
    if terms is not None and terms.row_total is not None:
        return _ballot_share(data, max_entries, terms, most_bytes)
    dtypes: dict[str, type[np.generic]] = {"seed": np.uint8, "words": np.uint64}
    names = names_of(_ShareHead)
    content, name, array = read_with_array(data, "a share", names, "labeler-share/1", dtypes, most_bytes=most_bytes)
    head = _ShareHead(**content)
    shape = _bounded(head.shape, max_entries)
    return _vector(name, array, shape, bytes.fromhex(head.sharing_id), head.is_seeded, terms)


def _ballot_share(data: bytes, max_entries: int, terms: WinnerTerms, most_bytes: int) -> BallotShare:
    what, names = "a share of ballots and noise", names_of(_BallotShareHead)
    choices: list[dict[str, type[np.generic]]] = [
        {"ballots_seed": np.uint8, "noise_seed": np.uint8},
        {"ballots_words": np.uint64, "noise_words": np.uint64},
    ]
    content, arrays = read_with_arrays(data, what, names, "labeler-ballot-share/1", choices, most_bytes=most_bytes)
    head = _BallotShareHead(**content)
    shape = _bounded(head.shape, max_entries)
    if len(shape) != 2:
        raise ProtocolViolation(f"{what} has 2 dimensions, found {len(shape)}")
    kind = "seed" if "noise_seed" in arrays else "words"
    parts = []
    for name, written, size in (
        ("ballots", head.ballots_id, (shape[0], shape[1] + 1)),
        ("noise", head.noise_id, shape),
    ):
        parts.append(_vector(kind, arrays[f"{name}_{kind}"], size, bytes.fromhex(written), head.is_seeded, terms))
    return BallotShare(*parts)


def _bounded(sizes: list[int], max_entries: int) -> tuple[int, ...]:
    if math.prod(sizes) > max_entries:
        raise TooLarge(f"a share has at most {max_entries} entries here, found {math.prod(sizes)}")
    return tuple(sizes)


def _vector(
    name: str,
    array: NDArray[Any],
    shape: tuple[int, ...],
    sharing_id: bytes,
    is_seeded: bool,
    terms: WinnerTerms | None,
) -> ShareVector:
    field = None if terms is None else terms.field
    if name == "seed":
        check_shape(array, (KEY_BYTES,), "the seed of a share")
        return ShareVector(shape, sharing_id, is_seeded, seed=array.tobytes(), field=field)
    check_shape(array, shape, "the words of a share")
    return ShareVector(shape, sharing_id, is_seeded, words=array, field=field)


def holdings_to_bytes(holdings: Mapping[str, bytes]) -> bytes:
    """Body of "holdings": the sharing_id a tallier holds of each agent. Not secret."""
    return write_json(
        {
            "version": "labeler-holdings/1",
            "holdings": {agent: sharing_id.hex() for agent, sharing_id in holdings.items()},
        }
    )


def holdings_from_bytes(data: bytes) -> Mapping[str, bytes]:
    """Read a body of "holdings"."""
    content = read_json(data, "holdings", ("holdings",), "labeler-holdings/1")
    return MappingProxyType(
        {
            check_party_id(agent, "an agent of holdings"): hex_bytes(
                value, SHARING_ID_BYTES, "a sharing_id of holdings"
            )
            for agent, value in check_mapping(content["holdings"], "holdings").items()
        }
    )


def aggregate_to_bytes(share: AggregateShare) -> bytes:
    """Body of "aggregate-share" before it is sealed. Secret until the round is opened, of a winner round for ever."""
    arrays = {"words": share.words}
    if share.row_sums is not None:
        arrays["row_sums"] = share.row_sums
    return write_with_arrays(
        {
            "version": "labeler-aggregate-share/1",
            "tallier": share.tallier,
            "round": round_fields(share.round),
            "contributors": sorted(share.contributors),
            "sharings_digest": share.sharings_digest,
            "is_seeded": share.is_seeded,
        },
        arrays,
    )


def aggregate_from_bytes(data: bytes) -> AggregateShare:
    """Read an aggregate share; its words have the shape of its round and cannot be written to.

    Raises:
        ProtocolViolation: malformed. Whether it belongs to the round at hand is checked where it is opened.
    """
    names, version = names_of(_AggregateHead), "labeler-aggregate-share/1"
    choices: list[dict[str, type[np.generic]]] = [{"words": np.uint64}, {"words": np.uint64, "row_sums": np.uint64}]
    content, arrays = read_with_arrays(data, "an aggregate share", names, version, choices)
    head = _AggregateHead(**content)
    round, contributors = round_from(head.round), tuple(head.contributors)
    check_contributors(contributors, "an aggregate share")
    has_rows = round.terms is not None and round.terms.row_total is not None
    if ("row_sums" in arrays) != has_rows:
        raise ProtocolViolation("an aggregate share holds row sums where its round checks rows, and nowhere else")
    shapes = {
        "words": (round.num_queries, round.num_classes),
        "row_sums": (len(contributors), round.num_queries),
    }
    for name, array in arrays.items():
        check_shape(array, shapes[name], f"{name} of an aggregate share")
        if round.terms is not None:
            round.terms.field.check(array, f"{name} of an aggregate share")
        arrays[name] = array.copy()
        arrays[name].setflags(write=False)
    return AggregateShare(
        tallier=head.tallier,
        round=round,
        contributors=frozenset(contributors),
        sharings_digest=head.sharings_digest,
        words=arrays["words"],
        is_seeded=head.is_seeded,
        row_sums=arrays.get("row_sums"),
    )


def winner_to_bytes(winner: Winner) -> bytes:
    """Body of "winner" before it is sealed: what a tallier and the two others have opened of a round."""
    return write_with_array(
        {
            "version": "labeler-winner/1",
            "tallier": winner.tallier,
            "round_digest": winner.round_digest,
            "contributors": sorted(winner.contributors),
            "sharings_digest": winner.sharings_digest,
            "is_seeded": winner.is_seeded,
        },
        "labels",
        winner.labels,
    )


def winner_from_bytes(data: bytes) -> Winner:
    """Read a body of "winner".

    Raises:
        ProtocolViolation: malformed. Whether it answers the round at hand is checked by `agree_on_winners`.
    """
    names, types = names_of(_WinnerHead), {"labels": np.int16}
    content, _, labels = read_with_array(data, "a winner", names, "labeler-winner/1", types)
    head = _WinnerHead(**content)
    check_contributors(tuple(head.contributors), "a winner")
    return Winner(**vars(head) | {"contributors": frozenset(head.contributors), "labels": labels})
