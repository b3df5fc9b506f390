"""Two sites that differ in one record, in one patient, or in all patients but one say and show the same numbers.

The sites share keys, policy and everything that is asked of them: a job per patient that is answered, one that waits,
and refusals by policy and by ledger. What leaves is the same byte by byte, but for the sealed noised votes (whose
lengths are the same) and the head of a journal, which holds a salt. So is what its officer reads. The times of answers
are compared in tests/simulation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from labeler.ledger.evidence import EvidenceScope
from labeler.messages.bodies import AnswerSent
from tests.workers.agent_site import AGENT, UNTIL, Site
from tests.workers.builders import shard_of_rows
from workers.agent.site import SiteConsole
from workers.homes.evidence import make_evidence

WORLDS = ("one record less", "one patient less", "one patient alone")
PATIENTS = 5


def keep(world: str, patients: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return which records a world has; patient 3 has many."""
    rows = np.arange(len(patients))
    return {
        "all": rows >= 0,
        "one record less": rows != np.flatnonzero(patients == 3)[0],
        "one patient less": patients != 3,
        "one patient alone": patients == 3,
    }[world]


def write_shard(site: Site, world: str) -> None:
    features, labels = site.shard.features[:], np.asarray(site.shard.labels[:])
    patients = np.random.default_rng(7).integers(0, PATIENTS, len(features))
    kept = keep(world, patients)
    path = site.home.parent / "of a world.shard"
    shutil.rmtree(path, ignore_errors=True)
    shard_of_rows(
        path, features[kept], labels[kept], classes=site.shard.classes, fingerprint=site.shard.fingerprint,
        persons=patients[kept].reshape(-1, 1).repeat(2, axis=1), site_key="k", max_records=1000,
    )  # fmt: skip


def letters(site: Site) -> Iterator[tuple[Any, ...]]:
    """Yield what left, to whom, without what is drawn anew in every run."""
    for kind in ("willing", "declined", "refused", "answered"):
        for message in site.relay.received(kind):
            body: Any = message.body
            if kind == "answered":
                body = AnswerSent.decode(body).journal_seq
            yield kind, message.header.task_digest, message.header.round_digest, body
    for tallier in site.talliers:
        for message in site.relay.mail_of(tallier):
            yield tallier, message.header.kind, message.header.round_digest, len(message.body)


def forget(site: Site) -> None:
    """Let the relay know nothing of what the other world sent."""
    site.relay.inbox.clear()
    for party in (AGENT, *site.talliers):
        site.relay.forget_mail(party)
    site.relay._taken.clear()
    site.relay._asked_after.clear()


def seen(site: Site, home: Any, world: str) -> dict[str, Any]:
    """Return everything that leaves the site and that its officer reads, of one world."""
    shutil.rmtree(site.home, ignore_errors=True)
    shutil.copytree(home, site.home)
    write_shard(site, world)
    forget(site)
    per_patient = {"method": "reverse-knn", "k": 1, "records_per_person": 1}
    with site.run():
        site.shares_of(site.ask(**per_patient))
        site.propose(site.proposal("waits", nonce="waits", until=UNTIL, **per_patient))
        site.willing(1)
        site.send(site.ask(sigma_votes=0.5))
        refused = [site.refusals(1)[0].reason]
        for number, task in enumerate(
            ({"sigma_votes": 0.5}, {"release": "winner"}, {"classes": ("a", "b")}, {"nonce": "of the day"})
        ):
            if "nonce" in task:  # the last questions of the day
                site.propose(site.proposal("waits, too", nonce="waits, too", until=UNTIL, **per_patient))
                site.willing(2)
            site.propose(replace(site.proposal(f"no-{number}", **task), requester="ada"))
            refused.append(site.declined(number + 1)[-1].refusal.reason)
        assert refused == ["budget-exceeded"] * 2 + ["policy-refusal", "mixed-shards", "policy-refusal"]
        site.relay.wait_for_rest(AGENT)
    shown = SiteConsole(site.home)
    overview = shown.overview()
    evidence = make_evidence(site.home, EvidenceScope()).evidence.model_dump(mode="json")
    journal = evidence["facts"]["journal"]
    del journal["head"], journal["read_at"], journal["last_entry_at"]
    return {
        "letters": sorted(letters(site), key=repr),
        "page": json.dumps({name: overview[name] for name in ("budget", "person", "jobs", "refused", "waiting")}),
        "csv": shown.rounds_csv(),
        "evidence": evidence,
    }


def test_no_number_tells_two_sites_apart_that_differ_in_a_record_or_a_patient(site: Site) -> None:
    home, site.home = site.home.parent / "as made", site.home.parent / "neighbours"
    policy = site.policy(releases=["histogram"], max_queries_per_day=3 * len(site.batch))
    site.make(policy, shard=str(home.parent / "of a world.shard"))
    shutil.copytree(site.home, home)
    one = seen(site, home, "all")
    assert len(one["letters"]) == 1 + 3 + 2 + 4 + 1
    assert '"person_epsilon": null' not in one["page"]
    for world in WORLDS:
        other = seen(site, home, world)
        for what in one:
            assert other[what] == one[what], (world, what)
