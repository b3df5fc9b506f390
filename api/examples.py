"""The examples of the OpenAPI document: one small story, told once.

Five agents hold labeled photographs of four tools. A requester asks about two public photographs.
"""

from __future__ import annotations

from typing import Any

TASK_ID = "5f0c9f2f3b6d1c8a7e4b90d2a16c3e5f708192a3b4c5d6e7f8091a2b3c4d5e6f"
FINGERPRINT = "sha256:9b2e61d07c35"
JOB_ID = "job-20270301-7f3a9c21"
TOKEN_ID = "tok-4be1d09a"
OTHER_TOKEN_ID = "tok-77c0a1e2"
VERIFY_KEY = "c2" * 32
SEAL_KEY = "7a" * 32
HASH = "d41d8cd98f00b204e9800998ecf8427e27ae41e4649b934ca495991b7852b855"
CLASSES = ["backpack", "calculator", "keyboard", "mug"]

TASK_REQUEST: dict[str, Any] = {
    "name": "office tools",
    "epsilon": 0.5,
    "max_queries": 20,
}

TASK_REQUEST_OF_THE_PAPER: dict[str, Any] = {
    "name": "office tools",
    "classes": CLASSES,
    "method": "knn",
    "k": 5,
    "epsilon": 2.0,
    "delta": 1e-5,
    "max_queries": 200,
    "release": "histogram",
    "backbone_fingerprint": FINGERPRINT,
}
"""By kNN-DPFL, which is asked in parts: 200 questions, in jobs of any size."""

PRICE: dict[str, Any] = {
    "queries": 2,
    "delta": 1e-5,
    "instance_epsilon": 0.42,
    "agent_epsilon": 2.9,
    "instance_charge_nano": 12_100_000,
    "agent_charge_nano": 430_000_000,
    "instance_question_nano": 6_050_000,
    "agent_question_nano": 215_000_000,
    "reason": "",
}

TASK: dict[str, Any] = {
    "task_id": TASK_ID,
    "task": {"name": "office tools", "classes": CLASSES, "method": "knn", "k": 5, "sigma_votes": 25.0},
    "participants": ["hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e"],
    "created_at": "2027-03-01T09:00:00Z",
    "queries_left": 198,
    "price": {**PRICE, "queries": 200, "instance_epsilon": 2.0, "agent_epsilon": None},
    "created_by": TOKEN_ID,
    "shared_with": [],
}

SHARE_REQUEST: dict[str, Any] = {"token_id": OTHER_TOKEN_ID}

TASK_SHARED: dict[str, Any] = {**TASK, "shared_with": [OTHER_TOKEN_ID]}

TASK_PAGE: dict[str, Any] = {"next": None, "items": [TASK]}

ESTIMATE_REQUEST: dict[str, Any] = {"task_id": TASK_ID, "queries": 2}

ESTIMATE: dict[str, Any] = {
    "price": PRICE,
    "sigma_votes": 25.0,
    "total_sigma_votes": 25.0,
    "quorum": 5,
    "affordable": True,
    "accounts": [
        {
            "account": "federation",
            "level": "instance",
            "asked_nano": 12_100_000,
            "left_nano": 250_000_000,
            "enough": True,
        }
    ],
    "refusal": "",
    "jobs_left": 20,
    "expected_accuracy": {"low": 0.71, "high": 0.962, "reason": "", "records": None},
    "warning": "",
}

JOB_REQUEST: dict[str, Any] = {
    "task_id": TASK_ID,
    "name": "march photographs",
    "features": [[0.6, 0.8, 0.0], [0.0, 0.6, 0.8]],
    "query_ids": ["photo-1", "photo-2"],
    "backbone_fingerprint": FINGERPRINT,
}

JOB: dict[str, Any] = {
    "job_id": JOB_ID,
    "task_id": TASK_ID,
    "name": "march photographs",
    "task_name": "office tools",
    "state": "collecting",
    "stage": "waiting for shares of 5 of 5 agents: hospital-a, hospital-b, hospital-c, hospital-d, hospital-e",
    "queries": 2,
    "queries_done": 0,
    "images": 2,
    "selection": {"strategy": "all", "count": None, "seed": 0},
    "price": PRICE,
    "cost": {"questions": 0, "instance_nano": 0, "agent_nano": 0, "instance_epsilon": 0.0, "agent_epsilon": 0.0},
    "created_at": "2027-03-01T09:05:00Z",
    "updated_at": "2027-03-01T09:05:02Z",
    "expires_at": "2027-03-02T09:05:00Z",
    "created_by": TOKEN_ID,
    "rounds": [
        {
            "number": 0,
            "queries": 2,
            "state": "asked",
            "answered": [],
            "waiting_for": ["hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e"],
            "refused": {},
        }
    ],
    "problem": None,
    "ledger_seq": None,
    "version": 4,
}

JOB_PAGE: dict[str, Any] = {"next": None, "items": [JOB]}

JOB_FORGOTTEN: dict[str, Any] = {
    **JOB,
    "state": "completed",
    "stage": "done: 2 of 2 answered",
    "queries_done": 2,
    "forgotten_at": "2027-03-03T10:00:00Z",
}

JOB_CANCELLED: dict[str, Any] = {**JOB, "state": "cancelled", "stage": "cancelled", "version": 5}

LABELS_REQUEST: dict[str, Any] = {
    "task_id": TASK_ID,
    "images": [{"name": "photo-1.jpg", "data": "/9j/4AAQSkZJRgABAQAAAQABAAD/"}],
    "wait_s": 30.0,
}
"""The picture is shortened."""

QUERY_BUDGET: dict[str, Any] = {
    "account": "federation",
    "level": "instance",
    "share_kind": "each",
    "share_nano": 1_210_000,
    "total_nano": 12_100_000,
    "total_epsilon": 0.4127,
    "charge_nano": 12_100_000,
    "agent_share_nano": None,
    "agent_total_nano": None,
    "agent_total_epsilon": None,
}

QUERY_BUDGETS: dict[str, Any] = {
    "items": [
        {
            "job_id": JOB_ID,
            "number": 9,
            "query_id": "query-000009",
            "source": "photo-9.jpg",
            "status": "answered",
            "release": "histogram",
            **QUERY_BUDGET,
        }
    ],
    "waiting": [],
    "next": None,
}

LABEL_ROW: dict[str, Any] = {
    "query_id": "query-000000",
    "source": "photo-1.jpg",
    "label": 3,
    "label_name": "mug",
    "confidence": 0.971,
    "status": "answered",
    "noisy_votes": [3.1, -12.4, 20.9, 88.2],
    **QUERY_BUDGET,
}

IMAGE_LABEL_LINE = (
    '{"source": "photo-1.jpg", "label": 3, "label_name": "mug", "confidence": 0.971, "origin": "inferred", '
    f'"task_digest": "{TASK_ID}", "job_id": "{JOB_ID}", "share_kind": "each", "share_nano": 0' + "}\n"
)
LABELS: dict[str, Any] = {"job_id": JOB_ID, "state": "completed", "price": PRICE, "labels": [LABEL_ROW]}

LABELS_LATER: dict[str, Any] = {"job_id": JOB_ID, "state": "collecting", "price": PRICE, "labels": []}

_SHARE: dict[str, Any] = {"value": 0.91, "noise": [0.88, 0.94], "sampling": [0.87, 0.94], "drowned": False}

EVALUATION: dict[str, Any] = {
    "version": "labeler-evaluation/1",
    "classes": ["healthy", "ill"],
    "layout": "confusion",
    "edges": [0.8],
    "sigma": 34.4,
    "contributors": 5,
    "records": {"value": 4790, "noise": [4640, 4940]},
    "accuracy": _SHARE,
    "balanced_accuracy": _SHARE,
    "auroc": _SHARE,
    "recall": [{"class": "healthy", **_SHARE}, {"class": "ill", **_SHARE}],
    "confusion": [{"true": "ill", "predicted": "healthy", "value": 61, "noise": [-34, 156], "drowned": True}],
    "bands": [{"from": 0.0, "to": 0.8, **_SHARE}, {"from": 0.8, "to": 1.0, **_SHARE}],
    "stated": [[0.74, 0.96], [0.61, 0.88]],
    "speaks_for": "It speaks for images like the sites' own.",
    "model": {"sha256": TASK_ID, "kind": "pooled", "job_id": JOB_ID},
    "job_id": JOB_ID,
    "task_digest": TASK_ID,
}

BALANCE: dict[str, Any] = {
    "account": "federation",
    "level": "instance",
    "cap_nano": 262_100_000,
    "posted_nano": 12_100_000,
    "reserved_nano": 0,
    "left_nano": 250_000_000,
    "delta": 1e-5,
    "cap_epsilon": 2.0,
    "spent_epsilon": 0.42,
    "posted_epsilon": 0.42,
    "left_epsilon": 1.95,
    "words": "at most 0.420 so far; one more job of up to 1.95",
    "left_fraction": 0.9538,
}

PERSON: dict[str, Any] = {
    "account": "federation",
    "person_nano": 6_050_000,
    "person_epsilon": 0.28,
    "records_per_person": 1,
    "reason": "",
    "delta": 1e-5,
    "words": "One patient with at most 1 voting image: at most epsilon 0.280 so far (delta 1e-05).",
}

BUDGET: dict[str, Any] = {"accounts": [BALANCE], "persons": [PERSON], "head_seq": 17, "head_hash": HASH, "delta": 1e-5}

AGENT_BUDGET: dict[str, Any] = {
    **BUDGET,
    "accounts": [{**BALANCE, "account": "agent:hospital-a"}],
    "persons": [{**PERSON, "account": "agent:hospital-a"}],
}

LEDGER_ENTRY: dict[str, Any] = {
    "seq": 17,
    "at": "2027-03-01T09:05:09Z",
    "kind": "post",
    "account": "federation",
    "level": "instance",
    "reservation_id": f"{JOB_ID}/0",
    "amount_nano": 12_100_000,
    "spent_after_nano": 12_100_000,
    "detail": {"job": JOB_ID},
    "hash": HASH,
}

LEDGER_PAGE: dict[str, Any] = {"next": None, "items": [LEDGER_ENTRY]}

EVIDENCE: dict[str, Any] = {
    "version": "labeler-signed-evidence/1",
    "verify_key": VERIFY_KEY,
    "signature": "5d" * 64,
    "evidence": {
        "version": "labeler-evidence/1",
        "software": {"name": "private-labeler", "version": "1.0.0"},
        "facts": {},
        "tasks": [],
        "accounts": [],
        "remarks": [],
        "meaning": [],
    },
}
"""Shortened; labeler.evidence.document defines all fields."""

PARTY_REQUEST: dict[str, Any] = {
    "party_id": "hospital-a",
    "role": "agent",
    "verify_key": VERIFY_KEY,
    "seal_key": SEAL_KEY,
}

KEYS_REQUEST: dict[str, Any] = {"verify_key": "e5" * 32, "seal_key": "19" * 32}

PARTY: dict[str, Any] = {
    "party_id": "hospital-a",
    "role": "agent",
    "tallier": None,
    "verify_key": VERIFY_KEY,
    "seal_key": SEAL_KEY,
    "fingerprint": "8f1c22d09ab34e57",
    "state": "active",
    "enrolled_at": "2027-03-01T08:30:00Z",
    "last_contact": "2027-03-01T09:05:08Z",
    "is_live": True,
    "backbone_fingerprint": FINGERPRINT,
    "classes": CLASSES,
    "version": "1.0.0",
}

PARTY_REVOKED: dict[str, Any] = {**PARTY, "state": "revoked", "is_live": False}

PARTIES: dict[str, Any] = {
    "coordinator_verify_key": "0d" * 32,
    "coordinator_seal_key": "91" * 32,
    "parties": [PARTY],
    "live_agents": 5,
    "live_talliers": 3,
    "talliers_needed": 3,
    "has_quorum": True,
    "key_changes": [
        {
            "party_id": "hospital-a",
            "role": "agent",
            "is_rotation": True,
            "expires_at": "2027-03-08T08:30:00Z",
            "used_at": None,
        }
    ],
}

INVITATION_REQUEST: dict[str, Any] = {"party_id": "hospital-a", "role": "agent", "valid_days": 7}

INVITATION: dict[str, Any] = {
    "invitation_id": "inv-0a1b2c3d4e5f6071",
    "party_id": "hospital-a",
    "role": "agent",
    "expires_at": "2027-03-08T08:30:00Z",
    "phrase": "7K3M-9QXD-2RPA",
    "document": {
        "version": "labeler-invitation/1",
        "party_id": "hospital-a",
        "url": "https://labels.example.org",
        "token": "inv_" + "a" * 43,
        "signature": "5b" * 64,
    },
}

WITHDRAWN: dict[str, Any] = {"party_id": "hospital-a", "withdrawn": 1}

ENROLMENT_REQUEST: dict[str, Any] = {
    "token": "inv_" + "a" * 43,
    "party_id": "hospital-a",
    "role": "agent",
    "verify_key": VERIFY_KEY,
    "seal_key": SEAL_KEY,
    "signature": "5b" * 64,
}

ENROLMENT: dict[str, Any] = {
    "party_id": "hospital-a",
    "role": "agent",
    "tallier": None,
    "fingerprint": "8f1c22d09ab34e57",
    "roster_digest": HASH,
}

TOKEN_REQUEST: dict[str, Any] = {"name": "nightly labeling", "role": "requester"}

TOKEN: dict[str, Any] = {
    "token_id": TOKEN_ID,
    "name": "nightly labeling",
    "role": "requester",
    "created_at": "2027-03-01T08:00:00Z",
    "revoked_at": None,
    "token": None,
}

TOKEN_MADE: dict[str, Any] = {**TOKEN, "token": "lab_shown-once-keep-it-secret"}

TOKEN_PAGE: dict[str, Any] = {"next": None, "items": [TOKEN]}

READY: dict[str, Any] = {
    "ready": True,
    "checks": [
        {"name": "journal", "ok": True, "detail": "17 entries, the chain holds"},
        {"name": "quorum", "ok": True, "detail": "5 agents and 3 talliers are live"},
    ],
    "version": "1.0.0",
}

NOT_READY: dict[str, Any] = {
    "ready": False,
    "checks": [
        {"name": "journal", "ok": True, "detail": "17 entries, the chain holds"},
        {"name": "quorum", "ok": False, "detail": "2 of 3 talliers are live"},
    ],
    "version": "1.0.0",
}

THUMBNAILS_REQUEST: dict[str, Any] = {"sources": ["photo-1.jpg", "photo-2.jpg"]}

THUMBNAILS: dict[str, Any] = {
    "items": [{"source": "photo-1.jpg", "jpeg": "/9j/4AAQSkZJRg=="}, {"source": "photo-2.jpg", "jpeg": None}]
}
