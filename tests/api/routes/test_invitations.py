"""Invitations over HTTP: who may invite whom, and what a token opens, once, for one pair of keys."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.coordinator.invitations import Invitations
from labeler.errors import NotAuthenticated
from labeler.invitation import Invitation, enrolment_statement, read_document, token_digest
from labeler.ledger.parties import InvitationStore
from labeler.system.keys import PartyKeys, verify_statement
from tests.api.routes.conftest import ConfigOf, ServeIn, Service
from workers.homes.joining import write_invitation

JsonObject = dict[str, Any]


@pytest.fixture
def empty(serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path) -> Iterator[Service]:
    """A service at which nobody is enrolled."""
    with serve_in(config_of(tmp_path / "home"), is_filled=False) as started:
        yield started


def invite(service: Service, party_id: str, **fields: Any) -> httpx2.Response:
    with service.http("admin") as http:
        return http.post("/v1/invitations", json={"party_id": party_id} | fields)


def read(answer: httpx2.Response, folder: Path) -> Invitation:
    """The invitation as it arrives in a file."""
    assert answer.status_code == 201, answer.text
    path = folder / "sent.json"
    write_invitation(path, answer.json()["document"])
    found, signature = read_document(path.read_bytes())
    verify_statement(found.statement, signature, found.verify_key)
    return found


def request_of(invitation: Invitation, keys: PartyKeys, **changes: Any) -> JsonObject:
    who: JsonObject = {
        "role": invitation.role,
        "party_id": invitation.party_id,
        "tallier": invitation.tallier,
        "verify_key": keys.public.verify_key,
        "seal_key": keys.public.seal_key,
        "token": invitation.token,
    } | changes
    statement = enrolment_statement(coordinator_key=invitation.verify_key, **who)
    return who | {"signature": keys.sign_statement(statement)}


def enrol(service: Service, body: JsonObject) -> httpx2.Response:
    with service.http(None) as http:
        return http.post("/v1/enrolments", json=body)


def complete(service: Service, folder: Path) -> None:
    """Three talliers, joined by invitation."""
    for number in range(3):
        answer = invite(service, f"tallier-{number}", role="tallier")
        assert enrol(service, request_of(read(answer, folder), PartyKeys.generate())).status_code == 200


def test_talliers_and_hospitals_join_by_invitation(empty: Service, tmp_path: Path) -> None:
    complete(empty, tmp_path)
    answer = invite(empty, "hospital-a")
    found = read(answer, tmp_path)
    assert answer.json()["phrase"] == found.phrase
    assert [one.party_id for one in found.talliers] == ["tallier-0", "tallier-1", "tallier-2"]
    assert found.verify_key == empty.coordinator.roster.party_list().coordinator_verify_key
    keys = PartyKeys.generate()
    done = enrol(empty, request_of(found, keys))
    assert done.json() == {
        "party_id": "hospital-a",
        "role": "agent",
        "tallier": None,
        "fingerprint": keys.public.fingerprint,
        "roster_digest": found.roster_digest,
    }
    assert empty.coordinator.stores.parties.get("hospital-a").verify_key == keys.public.verify_key
    assert empty.coordinator.budget("hospital-a").accounts, "an agent that joined has its accounts"


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_talliers_that_are_all_invited_first_join_in_any_order(
    empty: Service, tmp_path: Path, order: tuple[int, ...]
) -> None:
    found = [read(invite(empty, f"site-{number}", role="tallier"), tmp_path) for number in range(3)]
    assert [one.tallier for one in found] == [0, 1, 2]
    for number in order:
        assert enrol(empty, request_of(found[number], PartyKeys.generate())).status_code == 200
    assert {one.party_id: one.tallier for one in empty.coordinator.stores.parties.list("tallier")} == {
        "site-0": 0,
        "site-1": 1,
        "site-2": 2,
    }


def test_an_open_invitation_holds_its_number_until_it_is_withdrawn_or_written_anew(
    empty: Service, tmp_path: Path
) -> None:
    for number in range(3):
        read(invite(empty, f"site-{number}", role="tallier"), tmp_path)
    full = invite(empty, "site-3", role="tallier")
    assert (full.status_code, full.json()["detail"].count("site-")) == (422, 3)
    assert "--withdraw" in full.json()["detail"]
    held = invite(empty, "site-3", role="tallier", tallier=1)
    assert held.status_code == 409
    assert "labeler invite site-1 --withdraw" in held.json()["detail"]
    assert read(invite(empty, "site-1", role="tallier"), tmp_path).tallier == 1
    with empty.http("admin") as http:
        assert http.delete("/v1/invitations/site-1").status_code == 200
    assert read(invite(empty, "site-3", role="tallier"), tmp_path).tallier == 1


def test_a_hospital_is_not_invited_before_all_talliers_have_joined(empty: Service, tmp_path: Path) -> None:
    answer = invite(empty, "registry", role="tallier", tallier=1)
    assert enrol(empty, request_of(read(answer, tmp_path), PartyKeys.generate())).status_code == 200
    refused = invite(empty, "hospital-a")
    assert refused.status_code == 409
    detail = refused.json()["detail"]
    assert "1 (registry)" in detail
    assert "missing: 0, 2" in detail
    assert "labeler invite NAME --role tallier --number 0" in detail
    for number in (0, 2):
        assert invite(empty, f"site-{number}", role="tallier", tallier=number).status_code == 201
    detail = invite(empty, "hospital-a").json()["detail"]
    assert "site-0 has the invitation of 0; site-2 has the invitation of 2" in detail
    assert "--number" not in detail
    assert not empty.coordinator.stores.parties.list("agent")


def test_the_same_keys_are_answered_the_same_and_others_are_refused(empty: Service, tmp_path: Path) -> None:
    found = read(invite(empty, "registry", role="tallier"), tmp_path)
    keys = PartyKeys.generate()
    first, again = (enrol(empty, request_of(found, keys)) for _ in range(2))
    assert (first.status_code, first.json()) == (200, again.json())
    other = enrol(empty, request_of(found, PartyKeys.generate()))
    assert other.status_code == 409
    assert "used before, with other keys" in other.json()["detail"]
    assert empty.coordinator.stores.parties.get("registry").verify_key == keys.public.verify_key
    empty.coordinator.roster.revoke("registry")
    assert enrol(empty, request_of(found, keys)).status_code == 409, "what was revoked does not come back"
    assert empty.coordinator.stores.parties.get("registry").state == "revoked"


@pytest.mark.parametrize("changes", [{"party_id": "other"}, {"role": "agent", "tallier": None}, {"tallier": 2}])
def test_an_invitation_is_for_one_name_and_role(empty: Service, tmp_path: Path, changes: JsonObject) -> None:
    found = read(invite(empty, "registry", role="tallier", tallier=1), tmp_path)
    refused = enrol(empty, request_of(found, PartyKeys.generate(), **changes))
    assert refused.status_code == 401
    assert not empty.coordinator.stores.parties.list()


def test_nobody_enrols_keys_that_he_does_not_hold(empty: Service, tmp_path: Path) -> None:
    found = read(invite(empty, "registry", role="tallier"), tmp_path)
    thief, owner = PartyKeys.generate(), PartyKeys.generate().public
    body = request_of(found, thief, verify_key=owner.verify_key, seal_key=owner.seal_key)
    assert enrol(empty, body).status_code == 403
    # Signed for another coordinator's invitation, it is worth nothing here.
    elsewhere = found.model_copy(update={"verify_key": owner.verify_key})
    assert enrol(empty, request_of(elsewhere, thief)).status_code == 403
    assert not empty.coordinator.stores.parties.list()


def test_tokens_that_are_unknown_expired_or_withdrawn_open_nothing(empty: Service, tmp_path: Path) -> None:
    keys = PartyKeys.generate()
    first = read(invite(empty, "registry", role="tallier"), tmp_path)
    second = read(invite(empty, "registry", role="tallier"), tmp_path)
    unknown = second.model_copy(update={"token": "inv_" + "x" * 43})
    answers = [enrol(empty, request_of(one, keys)) for one in (first, unknown)]
    with empty.http("admin") as http:
        assert http.delete("/v1/invitations/registry").json() == {"party_id": "registry", "withdrawn": 1}
    answers.append(enrol(empty, request_of(second, keys)))
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.json()["detail"] for answer in answers}) == 1, "a stranger does not learn which it was"
    # A clock that is a month ahead sees an invitation that has expired.
    late = Invitations(
        empty.coordinator.config,
        empty.coordinator.stores.database,
        empty.coordinator.stores.parties,
        empty.coordinator._keys,
        open_accounts=lambda _: None,
        clock=lambda: datetime.now(UTC) + timedelta(days=31),
    )
    third = read(invite(empty, "registry", role="tallier"), tmp_path)
    from api.schema import EnrolmentRequest

    with pytest.raises(NotAuthenticated):
        late.enrol(EnrolmentRequest.model_validate(request_of(third, keys)))
    assert not empty.coordinator.stores.parties.list()


def test_a_revocation_withdraws_what_was_sent_and_new_keys_come_by_a_new_invitation(
    empty: Service, tmp_path: Path
) -> None:
    complete(empty, tmp_path)
    old, new = PartyKeys.generate(), PartyKeys.generate()
    assert enrol(empty, request_of(read(invite(empty, "hospital-a"), tmp_path), old)).status_code == 200
    before = read(invite(empty, "hospital-a", rotate=True), tmp_path)
    assert before.is_rotation
    with empty.http("admin") as http:
        assert http.delete("/v1/parties/hospital-a").status_code == 200
    assert enrol(empty, request_of(before, new)).status_code == 401
    after = read(invite(empty, "hospital-a", rotate=True), tmp_path)
    assert enrol(empty, request_of(after, old)).status_code == 409, "a key that was revoked is never taken again"
    assert enrol(empty, request_of(after, new)).status_code == 200
    record = empty.coordinator.stores.parties.get("hospital-a")
    assert (record.state, record.verify_key) == ("active", new.public.verify_key)


@pytest.mark.parametrize(
    ("fields", "status", "complaint"),
    [
        ({"party_id": "tallier-1"}, 409, "enrolled already"),
        ({"party_id": "new", "role": "tallier"}, 422, "all 3 talliers are enrolled or invited: tallier-0"),
        ({"party_id": "new", "role": "tallier", "tallier": 1}, 409, "tallier 1 is 'tallier-1'"),
        ({"party_id": "new", "rotate": True}, 404, "no party 'new'"),
        ({"party_id": "tallier-1", "rotate": True}, 409, "neither role nor number"),
        ({"party_id": "coordinator"}, 422, "the coordinator's own"),
        ({"party_id": "new", "tallier": 1}, 422, "an agent has no number"),
        ({"party_id": "new", "ca_certificates": "no certificate"}, 422, "PEM"),
        ({"party_id": "new", "ca_certificates": "-----BEGIN EC PRIVATE KEY-----"}, 422, "private key"),
        ({"party_id": "new", "valid_days": 31}, 422, "valid_days"),
    ],
)
def test_who_could_not_be_enrolled_is_not_invited(
    service: Service, fields: JsonObject, status: int, complaint: str
) -> None:
    with service.http("admin") as http:
        refused = http.post("/v1/invitations", json=fields)
    assert refused.status_code == status, refused.text
    assert complaint in refused.json()["detail"]


def test_attempts_of_one_address_are_few(empty: Service, tmp_path: Path) -> None:
    found = read(invite(empty, "registry", role="tallier"), tmp_path)
    unknown = request_of(found.model_copy(update={"token": "inv_" + "x" * 43}), PartyKeys.generate())
    codes = [enrol(empty, unknown).status_code for _ in range(31)]
    assert codes == [401] * 30 + [429]


def test_a_token_is_kept_as_a_hash_and_every_use_leaves_a_line(
    empty: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = PartyKeys.generate()
    with caplog.at_level(logging.INFO, "labeler"):
        found = read(invite(empty, "registry", role="tallier"), tmp_path)
        assert enrol(empty, request_of(found, keys)).status_code == 200
    said = {record.message: vars(record) for record in caplog.records if record.name == "labeler.coordinator"}
    assert {"invitation made", "party enrolled by invitation"} <= said.keys()
    used = said["party enrolled by invitation"]
    assert (used["party"], used["fingerprint"]) == ("registry", keys.public.fingerprint)
    assert used["by"] == empty.holder("admin")
    assert found.token not in caplog.text + str([vars(record) for record in caplog.records])
    database = empty.coordinator.stores.database
    (record,) = InvitationStore(database).list()
    assert (record.party_id, record.verify_key) == ("registry", keys.public.verify_key)
    data = b"".join(path.read_bytes() for path in empty.coordinator.config.home.glob("journal.db*"))
    assert token_digest(found.token).encode() in data
    assert found.token.encode() not in data


def test_that_keys_change_or_are_about_to_is_told_without_what_opens_the_invitation(
    empty: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(empty, tmp_path)
    read(invite(empty, "hospital-a"), tmp_path)
    rotation = read(invite(empty, "tallier-1", role="tallier", rotate=True), tmp_path)

    def told() -> list[tuple[str, bool, bool]]:
        with empty.http("viewer") as http:
            answer = http.get("/v1/parties")
        assert rotation.token not in answer.text
        assert rotation.phrase not in answer.text
        found = answer.json()["key_changes"]
        return sorted((one["party_id"], one["is_rotation"], one["used_at"] is not None) for one in found)

    joined = [(f"tallier-{number}", False, True) for number in range(3)]
    assert told() == sorted([("hospital-a", False, False), *joined, ("tallier-1", True, False)])
    assert enrol(empty, request_of(rotation, PartyKeys.generate())).status_code == 200
    assert told() == sorted([("hospital-a", False, False), *joined, ("tallier-1", True, True)])
    with empty.http("admin") as http:
        assert http.delete("/v1/invitations/hospital-a").status_code == 200
    assert told() == sorted([*joined, ("tallier-1", True, True)])
    later = datetime.now(UTC) + timedelta(days=8)
    monkeypatch.setattr(empty.coordinator.invitations, "_clock", lambda: later)
    assert told() == []


STRANGERS_BYTES = 16 * 1024


def test_a_strangers_enrolment_is_counted_before_its_body_is_read_and_bounded(
    empty: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 bodies of 1 MiB were parsed before anybody counted: 9.6 s of a core and 700 MB in a minute."""
    monkeypatch.setattr("api.limits.WINDOW_S", 3600.0)  # in which a slow machine sends all of them
    large = json.dumps({"token": [[] for _ in range(250_000)]}).encode()
    headers = {"Content-Type": "application/json"}

    def in_chunks() -> Iterator[bytes]:
        yield from (large[start : start + 4096] for start in range(0, len(large), 4096))

    with empty.http(None) as http:
        before = time.process_time()
        sent = [http.post("/v1/enrolments", content=large, headers=headers).status_code for _ in range(20)]
        sent += [http.post("/v1/enrolments", content=in_chunks(), headers=headers).status_code for _ in range(5)]
        sent += [http.post("/v1/enrolments", content=b"no json", headers=headers).status_code for _ in range(5)]
        spent_s = time.process_time() - before
        refused = http.post("/v1/enrolments", content=large, headers=headers)
    assert sent == [413] * 25 + [400] * 5
    assert (refused.status_code, refused.json()["type"]) == (429, "urn:labeler:problem:rate-limited")
    # Less than to parse ten of them, on any machine; before they were bounded it was to parse all of them twice.
    before = time.process_time()
    for _ in range(10):
        json.loads(large)
    assert spent_s < time.process_time() - before


def test_an_enrolment_and_an_invitation_to_it_fit_into_what_a_stranger_may_send(empty: Service, tmp_path: Path) -> None:
    found = read(invite(empty, "n" * 100, role="tallier"), tmp_path)
    body = request_of(found, PartyKeys.generate())
    assert len(json.dumps(body)) < STRANGERS_BYTES // 8
    assert enrol(empty, body).status_code == 200
