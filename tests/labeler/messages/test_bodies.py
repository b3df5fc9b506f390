"""Bodies read back exactly, and whatever is not one is refused with an error of ours."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from labeler.errors import (
    AwaitingApproval,
    BudgetExceeded,
    InvalidTask,
    LabelerError,
    ProtocolViolation,
    TooLarge,
    WrongDigest,
)
from labeler.messages.bodies import (
    MAX_ENTRIES,
    MAX_JSON_BYTES,
    Ask,
    OpenRound,
    Poll,
    RefusalBody,
    share_from_bytes,
    share_to_bytes,
)
from labeler.sharing import ShareVector
from labeler.tally import QueryBatch
from tests.labeler.messages.examples import (
    ASK,
    BATCH,
    BODIES,
    FIELD_SHARES,
    OPEN,
    PAIRS,
    POLL,
    PROPOSAL,
    REFUSAL,
    REVERSE_ROUND,
    ROUND,
    SHARED,
    SHARES,
    TALLIERS,
    TASK,
    WINNER_ROUND,
    WORDS,
)


def changed(body: bytes, **changes: object) -> bytes:
    """A body with other fields; a field that is `...` is left out."""
    head, line_feed, rest = body.partition(b"\n")
    content = {name: value for name, value in (json.loads(head) | changes).items() if value is not ...}
    return json.dumps(content).encode() + line_feed + rest


def with_arrays(body: bytes, **arrays: np.ndarray[Any, Any]) -> bytes:
    return body.partition(b"\n")[0] + b"\n" + save(arrays)


@pytest.mark.parametrize("name", BODIES)
def test_what_is_read_is_what_was_written(name: str) -> None:
    """A body that is written again has the same bytes, so no field was lost; arrays cannot be written to."""
    body, decode, encode = BODIES[name]
    found = decode(body)
    assert encode(found) == body
    if name in WORDS and name != "ask":
        assert found == WORDS[name]
    if name in SHARED:
        share = SHARED[name][0]
        assert type(found) is type(share)
        assert found.fingerprint() == share.fingerprint()
    for array in ("words", "row_sums", "labels"):
        if (part := getattr(found, array, None)) is not None:
            assert not part.flags.writeable


def test_an_ask_reads_back_with_the_same_round() -> None:
    for ask in (ASK, replace(ASK, batch=QueryBatch(BATCH.features))):
        assert Ask.decode(ask.encode()).round.digest == ask.round.digest


@pytest.mark.parametrize("name", BODIES)
def test_a_field_too_many_or_too_few_is_refused(name: str) -> None:
    body, decode, _ = BODIES[name]
    decode(changed(body))
    with pytest.raises(ProtocolViolation, match="exactly the fields"):
        decode(changed(body, surplus=1))
    for field in json.loads(body.partition(b"\n")[0]):
        with pytest.raises(ProtocolViolation):
            decode(changed(body, **{field: ...}))


@pytest.mark.parametrize("name", BODIES)
def test_a_field_of_another_type_is_refused(name: str) -> None:
    body, decode, _ = BODIES[name]
    for field, value in json.loads(body.partition(b"\n")[0]).items():
        for other in (None, True, 1.5, -1, "\n", [], {"a": []}, [1], 10**400, float("nan"), float("inf")):
            if type(other) is type(value) or (field in ("expires_at", "until") and isinstance(other, float)):
                continue
            if field == "wait_s" or (field == "facts" and isinstance(other, dict)):
                continue
            with pytest.raises(LabelerError):
                decode(changed(body, **{field: other}))


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_another_kind_is_refused(name: str) -> None:
    for other, (body, *_) in BODIES.items():
        if other.rpartition(" ")[2] != name.rpartition(" ")[2]:
            with pytest.raises(ProtocolViolation):
                BODIES[name][1](body)


@pytest.mark.parametrize("name", BODIES)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(LabelerError):
        BODIES[name][1](data)


@pytest.mark.parametrize("name", BODIES)
@given(data=st.data())
@settings(max_examples=50)
def test_a_mutated_body_reads_or_is_refused_with_an_error_of_ours(name: str, data: st.DataObject) -> None:
    body, decode, _ = BODIES[name]
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(mutated) - 1))
        action = data.draw(st.sampled_from(["flip", "digit", "insert", "delete", "cut"]))
        if action == "flip":
            mutated[place] ^= data.draw(st.integers(1, 255))
        elif action == "digit":
            mutated[place] = data.draw(st.sampled_from(list(b'0123456789-.eE"{}[],:')))
        elif action == "insert":
            mutated[place:place] = data.draw(st.binary(min_size=1, max_size=4))
        elif action == "delete":
            del mutated[place : place + data.draw(st.integers(1, 20))]
        else:
            del mutated[max(place, 1) :]
        mutated = mutated or bytearray(b"{")
    with suppress(LabelerError):
        decode(bytes(mutated))


@given(st.dictionaries(st.text(max_size=12), st.lists(st.integers(-3, 2**63), max_size=4), max_size=3), st.data())
def test_a_hostile_array_header_is_refused_with_an_error_of_ours(
    shapes: dict[str, list[int]], data: st.DataObject
) -> None:
    header: dict[str, object] = {
        name: {
            "dtype": data.draw(st.sampled_from(["U64", "U8", "I16", "BF16", "F8_E4M3", "BOOL", "x"])),
            "shape": shape,
            "data_offsets": [0, data.draw(st.integers(0, 2**63))],
        }
        for name, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    length = data.draw(st.sampled_from([len(text), 0, 2**63, 2**64 - 1]))
    head = share_to_bytes(SHARES[2]).partition(b"\n")[0]
    with pytest.raises(LabelerError):
        share_from_bytes(head + b"\n" + length.to_bytes(8, "little") + text + bytes(8), max_entries=15)


SEED, WORD_ROWS = np.zeros(32, np.uint8), np.zeros((5, 3), np.uint64)
ARRAYS: dict[str, list[dict[str, Any]]] = {
    "ask": [
        {},
        {"features": BATCH.features.astype(np.float32)},
        {"features": np.full((5, 8), np.nan)},
        {"features": BATCH.features.astype(np.int64)},
        {"features": BATCH.features, "more": BATCH.features},
        {"other": BATCH.features},
        {"features": BATCH.features.ravel()},
        {"features": np.zeros((5, 0), np.int16)},
        {"features": np.zeros((0, 8), np.int16)},
    ],
    "seed share": [
        {"seed": SEED[:31]},
        {"seed": SEED.astype(np.int8)},
        {"seed": SEED[None]},
        {"words": WORD_ROWS.reshape(3, 5)},
        {"words": WORD_ROWS.ravel()},
        {"words": WORD_ROWS.astype(np.int64)},
        {"words": np.full((5, 3), np.nan)},
        {"seed": SEED, "words": WORD_ROWS},
        {"words": WORD_ROWS, "x": SEED[:1]},
    ],
    "ballot word share": [
        {"ballots_seed": SEED},
        {"ballots_seed": SEED, "noise_words": WORD_ROWS},
        {"ballots_seed": SEED[:31], "noise_seed": SEED},
        {"ballots_words": WORD_ROWS, "noise_words": WORD_ROWS},
        {"ballots_words": np.zeros((5, 4), np.int64), "noise_words": WORD_ROWS},
        {"ballots_words": np.full((5, 4), 2**64 - 1, np.uint64), "noise_words": WORD_ROWS},
    ],
    "aggregate-share": [{"words": WORD_ROWS, "row_sums": WORD_ROWS[:2]}],
    "winner aggregate-share": [
        {"words": WORD_ROWS},
        {"words": WORD_ROWS, "row_sums": WORD_ROWS.reshape(3, 5)},
        {"words": WORD_ROWS, "row_sums": np.full((2, 5), 2**64 - 1, np.uint64)},
        {"words": WORD_ROWS, "row_sums": np.zeros((2, 5), np.int64)},
    ],
    "winner": [
        {"labels": np.zeros(5, np.int32)},
        {"labels": np.zeros((5, 1), np.int16)},
        {"labels": np.zeros(0, np.int16)},
        {"labels": np.full(5, -2, np.int16)},
    ],
}
"""Arrays that no features, share, sum or winners are."""


@pytest.mark.parametrize("name", ARRAYS)
def test_a_body_with_arrays_of_another_form_is_refused(name: str) -> None:
    body, decode, _ = BODIES[name]
    for arrays in ARRAYS[name]:
        with pytest.raises(ProtocolViolation):
            decode(with_arrays(body, **arrays))


def test_features_longer_than_a_normalised_one_are_refused() -> None:
    """Inner products with them would leave the integers that float32 holds exactly."""
    length = np.zeros((1, 64), np.int16)
    length[0, 0] = 2048
    Ask(TASK, QueryBatch(length), TALLIERS, 1.8e9)
    length[0, 0] = 2060
    with pytest.raises(ProtocolViolation, match="longer than a normalised feature"):
        Ask(TASK, QueryBatch(length), TALLIERS, 1.8e9)
    with pytest.raises(ProtocolViolation, match="longer than a normalised feature"):
        Ask(TASK, QueryBatch(np.full((1, 10_000), -32768, np.int16)), TALLIERS, 1.8e9)


def test_other_features_under_the_same_digest_are_refused() -> None:
    features = BATCH.features.copy()
    features[0, 0] += 1
    with pytest.raises(WrongDigest, match="batch_digest"):
        Ask.decode(with_arrays(ASK.encode(), features=features))
    with pytest.raises(WrongDigest, match="batch_digest"):
        Ask.decode(changed(ASK.encode(), first_query=11))


def test_another_task_under_the_same_digest_is_refused() -> None:
    task = TASK.model_dump(mode="json")
    with pytest.raises(WrongDigest, match="task_digest"):
        Ask.decode(changed(ASK.encode(), task=task | {"sigma_votes": 26.0}))
    with pytest.raises(InvalidTask):
        Ask.decode(changed(ASK.encode(), task=task | {"sigma_votes": -1.0}))
    with pytest.raises(InvalidTask, match="without quotes"):
        Ask.decode(changed(ASK.encode(), task=task | {"k": "5"}))
    with pytest.raises(ProtocolViolation, match="written out in full"):
        Ask.decode(changed(ASK.encode(), task=task | {"k": 5.0}))


@pytest.mark.parametrize("first_query", [-1, 96, 2**61])
def test_a_batch_beyond_the_queries_paid_for_is_refused(first_query: int) -> None:
    with pytest.raises(ProtocolViolation, match="pays for queries 0 to 99"):
        Ask(TASK, QueryBatch(BATCH.features, first_query), TALLIERS, 1.8e9)


@pytest.mark.parametrize("field", ["tallier_id", "seal_key", "verify_key"])
def test_one_party_never_gets_two_shares(field: str) -> None:
    twice = replace(TALLIERS[1], **{field: getattr(TALLIERS[0], field)})
    with pytest.raises(ProtocolViolation, match="two shares"):
        Ask(TASK, BATCH, (TALLIERS[0], twice, TALLIERS[2]), 1.8e9)
    with pytest.raises(ProtocolViolation, match="3 talliers"):
        Ask(TASK, BATCH, TALLIERS[:2], 1.8e9)


@pytest.mark.parametrize("expires_at", [float("nan"), float("inf"), 0, -1.0, 1e12, True, "1.8e9", None])
def test_a_time_that_is_none_is_refused(expires_at: Any) -> None:
    with pytest.raises(ProtocolViolation, match="expires_at"):
        replace(ASK, expires_at=expires_at)
    with pytest.raises(ProtocolViolation, match="expires_at"):
        replace(OPEN, expires_at=expires_at)
    with pytest.raises(ProtocolViolation):
        Ask.decode(changed(ASK.encode(), expires_at=expires_at))


def test_infinity_written_as_a_large_number_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="expires_at"):
        Ask.decode(ASK.encode().replace(b'"expires_at":1800000000.0', b'"expires_at":1e999'))
    with pytest.raises(ProtocolViolation, match="finite"):
        Poll.decode(POLL.encode().replace(b'"b":1', b'"b":1e999'))


def test_two_agents_with_one_key_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="count twice"):
        replace(OPEN, participants={"agent-1": "1a" * 32, "agent-2": "1a" * 32})


def test_a_round_whose_shares_fit_no_message_is_refused() -> None:
    with pytest.raises(TooLarge, match="at most"):
        replace(OPEN, round=replace(ROUND, num_queries=MAX_ENTRIES, num_classes=2))
    with pytest.raises(ProtocolViolation):
        OpenRound.decode(changed(OPEN.encode(), round={"task_digest": "a" * 64}))
    words = np.zeros(MAX_ENTRIES // 2 * 2, np.uint64).reshape(-1, 2)
    assert len(share_to_bytes(ShareVector(words.shape, bytes(16), False, words=words))) < 64 * 1024 * 1024 - 8192


def test_a_seed_cannot_stand_for_more_than_the_round_holds() -> None:
    body = share_to_bytes(SHARES[0])
    with pytest.raises(TooLarge, match="at most 14"):
        share_from_bytes(body, max_entries=14)
    with pytest.raises(TooLarge):
        share_from_bytes(changed(body, shape=[2**40, 2**40]), max_entries=15)


def test_a_refusal_is_made_of_an_error() -> None:
    refusal = RefusalBody.of(BudgetExceeded("agent 'a' has\n  0.1 left\x07" + "." * 3000))
    assert (refusal.reason, refusal.is_final) == ("budget-exceeded", True)
    assert refusal.sentence.startswith("agent 'a' has 0.1 left?...")
    assert RefusalBody.decode(refusal.encode()) == refusal
    assert not RefusalBody.of(AwaitingApproval("a person has to approve first")).is_final
    assert RefusalBody.of(AwaitingApproval()).sentence
    with pytest.raises(ProtocolViolation):
        replace(REFUSAL, sentence="a" * 2001)


def test_json_beyond_the_limit_is_not_parsed() -> None:
    for _, decode, _ in BODIES.values():
        with pytest.raises((TooLarge, ProtocolViolation), match=str(MAX_JSON_BYTES)):
            decode(b"[" * (MAX_JSON_BYTES + 1))
    with pytest.raises(TooLarge):
        replace(POLL, facts={"a": "x" * MAX_JSON_BYTES}).encode()


def test_a_share_of_another_kind_of_round_is_refused() -> None:
    terms, reverse = WINNER_ROUND.terms, REVERSE_ROUND.terms
    for share, wrong in ((PAIRS[0], None), (PAIRS[2], reverse), (FIELD_SHARES[2], terms), (SHARES[0], terms)):
        with pytest.raises(ProtocolViolation):
            share_from_bytes(share_to_bytes(share), max_entries=15, terms=wrong)
    # The last share of a histogram is made of 64-bit words, most of which are no residues.
    with pytest.raises(ProtocolViolation, match="no residue"):
        share_from_bytes(share_to_bytes(SHARES[2]), max_entries=15, terms=reverse)


def test_a_ballot_share_of_another_shape_or_size_is_refused() -> None:
    body, terms = share_to_bytes(PAIRS[2]), WINNER_ROUND.terms
    seeds = share_to_bytes(PAIRS[0])
    with pytest.raises(TooLarge, match="at most 14 entries"):
        share_from_bytes(seeds, max_entries=14, terms=terms)
    for shape in ([5], [5, 3, 1], [3, 5], [5, 4]):
        with pytest.raises((ProtocolViolation, TooLarge)):
            share_from_bytes(changed(body, shape=shape), max_entries=15, terms=terms)
    same_id = json.loads(body.partition(b"\n")[0])["noise_id"]
    with pytest.raises(ProtocolViolation, match="ids of their own"):
        share_from_bytes(changed(body, ballots_id=same_id), max_entries=15, terms=terms)


def test_terms_are_part_of_the_digest_of_a_round_and_a_round_without_keeps_its_own() -> None:
    assert len({ROUND.digest, WINNER_ROUND.digest, REVERSE_ROUND.digest}) == 3
    assert b"terms" not in OPEN.encode()


def test_a_round_whose_row_sums_would_not_fit_into_a_message_is_refused() -> None:
    """Ballots and noise apart take twice the words, and a sum one word per agent and query more."""
    wide = replace(WINNER_ROUND, num_queries=MAX_ENTRIES // 7 + 1)
    with pytest.raises(TooLarge, match="7 for each query"):
        OpenRound(wide, 0, {"agent-1": "1a" * 32}, 1.8e9)
    many = {f"agent-{number}": f"{number:064x}" for number in range(100)}
    with pytest.raises(TooLarge, match="103 for each query"):
        OpenRound(replace(WINNER_ROUND, num_queries=MAX_ENTRIES // 103 + 1), 0, many, 1.8e9)
    OpenRound(replace(WINNER_ROUND, num_queries=MAX_ENTRIES // 103), 0, many, 1.8e9)


def test_a_proposal_is_another_one_where_its_job_rounds_or_deadline_differ_and_not_where_keys_do() -> None:
    others = [replace(PROPOSAL, **changes) for changes in ({"job_id": "j"}, {"sizes": (8,)}, {"expires_at": 1.9e9})]
    assert len({PROPOSAL.digest, *(one.digest for one in others)}) == 4
    rotated = replace(PROPOSAL, talliers=(replace(TALLIERS[0], seal_key="9" * 64), *TALLIERS[1:]))
    assert rotated.digest == PROPOSAL.digest


OUT_OF_BOUNDS: dict[str, list[dict[str, Any]]] = {
    "poll": [
        {"after": "x"}, {"after": "1-2-3"}, {"after": "9" * 21}, {"wait_s": -1}, {"wait_s": 30.1}, {"wait_s": True},
        {"journal_seq": -1}, {"journal_hash": ""}, {"coordinator_hash": "zz"}, {"coordinator_seq": 1},
        {"program": "a\nb"}, {"program": ""}, {"facts": {"a": float("nan")}}, {"facts": None},
    ],
    "mail": [{"after": "x"}, {"coordinator_hash": ""}, {"coordinator_hash": "zz"}, {"coordinator_seq": -1}],
    "a party's own mail": [{"journal_hash": ""}, {"journal_hash": "zz"}, {"journal_seq": -1}],
    "winner": [{"tallier": 3}, {"contributors": []}, {"contributors": ["b", "a"]}, {"round_digest": "x"}],
    "proposal": [
        {"sizes": []}, {"sizes": [0, 3]}, {"sizes": [True]}, {"sizes": [100, 1]}, {"talliers": []}, {"job_id": ""},
        {"job_id": "a\nb"}, {"expires_at": "soon"}, {"task_digest": "0" * 64}, {"version": "labeler-proposal/2"},
    ],
} | {
    name: [{"contributors": one} for one in ([], ["b", "a"], ["a", "a"], ["a\n"], [1], "ab")]
    for name in ("sum", "aggregate-share")
} | {"seed share": [{"shape": one} for one in ([], [0, 3], [5, -3], [5, 3.0], [True, 15], [1] * 5)]}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_a_body_with_a_field_out_of_bounds_is_refused(name: str) -> None:
    body, decode, _ = BODIES[name]
    for changes in OUT_OF_BOUNDS[name]:
        with pytest.raises(ProtocolViolation):
            decode(changed(body, **changes))


@pytest.mark.parametrize(
    "terms",
    [
        {"scale": 0}, {"scale": True}, {"scale": 2**62 + 1}, {"lowest": 1}, {"lowest": -(2**30)}, {"highest": None},
        {"row_total": 0}, {"row_total": 1.0}, {"threshold": -1}, {"threshold": ...}, {"more": 1},
    ],
)  # fmt: skip
def test_terms_that_no_task_has_are_refused(terms: dict[str, object]) -> None:
    body = BODIES["winner open-round"][0]
    round = json.loads(body)["round"]
    wrong = {name: value for name, value in (round["terms"] | terms).items() if value is not ...}
    with pytest.raises(ProtocolViolation):
        OpenRound.decode(changed(body, round=round | {"terms": wrong}))
