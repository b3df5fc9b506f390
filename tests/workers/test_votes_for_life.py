"""Votes for life at a real agent: what an image has spent outlives its record, its features, a kill, and its round."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from feature_store.shard import Shard
from labeler.accounting.lifetime import set_aside_nano, vote_nano
from labeler.budget import budget_for
from labeler.ledger.database import open_database
from labeler.ledger.lifetimes import CLOSED, NO_DIGESTS, OTHER_KEY
from labeler.ledger.schema import life_spends
from labeler.messages.bodies import Ask
from labeler.sharing import unshard
from labeler.system.site_key import SiteKey
from labeler.tally import QueryBatch
from tests.workers.agent_site import AGENT, Site
from tests.workers.builders import shard_of_rows
from tests.workers.conftest import CLASSES, DIMENSION
from workers.agent.policy import Policy, policy_toml
from workers.agent.site import SiteConsole
from workers.homes.journals import accept_restored_journal, backup_home, verify_journal

KEY, OTHER = SiteKey(b"k" * 32), SiteKey(b"o" * 32)
RECORDS = 60
EPSILON = 15.0


def write(
    path: Path, *, ids: int = 0, key: SiteKey | None = KEY, fingerprint: str = "backbone", twice: int = 0
) -> Shard:
    """Write the same 60 images under other record ids, another backbone or key; the first few of them twice."""
    shutil.rmtree(path, ignore_errors=True)
    rng = np.random.default_rng(3)
    centres = np.random.default_rng(7).normal(size=(len(CLASSES), DIMENSION))
    labels = (np.arange(RECORDS) % len(CLASSES)).astype(np.int16)
    features = centres[labels] + 0.3 * rng.normal(size=(RECORDS, DIMENSION))
    rows = np.concatenate([np.arange(RECORDS), np.arange(twice)])
    digests = None if key is None else key.digests("image", [b"image %d" % number for number in rows])
    return shard_of_rows(
        path, features[rows], labels[rows], classes=CLASSES, fingerprint=fingerprint, image_digests=digests,
        backbone={"kind": "pixels"}, site_key=None if key is None else key.name, max_records=1000,
        random_bytes=np.random.default_rng(ids).bytes,
    )  # fmt: skip


class LifeSite(Site):
    """A site whose policy sets something aside for votes for life, unless `life` says otherwise."""

    life: float | None = EPSILON
    backbones: tuple[str, ...] = ("backbone", "other")

    def policy(self, **changes: Any) -> Policy:
        policy = super().policy(backbones=self.backbones, **changes)
        budget = {"instance_epsilon": 30.0, "life_epsilon": self.life}
        return policy.model_copy(update={"budget": policy.budget.model_copy(update=budget)})

    def ask_for_life(self, *, votes: int = 1, fingerprint: str = "backbone", **changes: Any) -> Ask:
        """A task in which a record has as many votes for its life as are named."""
        fields = {"method": "reverse-knn", "k": 1, "sigma_votes": 1.0, "agents": 3, "backbone_fingerprint": fingerprint}
        wide = {"budget_nano": 10**10, "least_similarity": -1.0}
        price = vote_nano(self.ask(**(fields | {"lifetime_budget": wide} | changes)).task)
        life = {"budget_nano": votes * price + price // 2, "least_similarity": -1.0}
        return self.ask(**(fields | {"lifetime_budget": life} | changes))

    def answer(self, ask: Ask) -> float:
        """Return the number of votes in the answer, up to the noise: standard deviation 3."""
        self.send(ask)
        (shares,) = self.shares(ask, 1)
        return float(unshard([share.expand() for share in shares]).sum() / ask.task.scale)

    def spends(self) -> list[int]:
        with open_database(self.home / "journal.db", read_only=True) as database, database.read() as connection:
            return sorted(connection.execute(select(life_spends.c.spent)).scalars())

    def answers_in_the_chain(self) -> int:
        verify_journal(self.home)
        with self.ledger() as ledger:
            return sum(entry.kind == "answer" for entry in ledger.entries())


@pytest.fixture
def site(tmp_path: Path, make_shard: Any, relay: Any, start: Any) -> LifeSite:
    batch = QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])
    site = LifeSite(tmp_path / "agent", write(tmp_path / "own"), relay, batch, start)
    site.make()
    return site


def test_an_image_votes_until_its_budget_is_spent_and_the_service_goes_on_answering(
    site: LifeSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with site.run():
        asks = [site.ask_for_life(votes=2, nonce=str(number)) for number in range(4)]
        found = [site.answer(ask) for ask in asks]
        site.relay.wait_for_rest(AGENT)
    # Each within 5 standard deviations of what is left: 60, 60, none, none.
    assert np.allclose(found, [60, 60, 0, 0], atol=16)
    price = vote_nano(asks[0].task)
    assert site.spends() == [2 * price] * RECORDS
    # The ledger took B once, and one nano-unit for each of four rounds.
    assert site.spent() == set_aside_nano(budget_for(EPSILON, 1e-5)) + 4
    # What the log says of each round is the same, no matter which images voted.
    of_round = {
        ask.round.digest: [
            one.getMessage() for one in caplog.records if vars(one).get("round_digest") == ask.round.digest
        ]
        for ask in asks
    }
    first, *others = of_round.values()
    assert first
    assert all(lines == first for lines in others)


def test_another_import_another_backbone_and_a_deletion_give_no_image_a_second_budget(site: LifeSite) -> None:
    ask = site.ask_for_life()
    with site.run():
        assert site.answer(ask) > 30
    # All images are deleted but one, and come back under new ids, embedded by another backbone.
    site.shard.delete(site.shard.record_ids[1:])
    assert len(site.spends()) == RECORDS
    again = write(site.shard.path, ids=8, fingerprint="other")
    assert not np.isin(again.record_ids, site.shard.record_ids).any()
    with site.run():
        assert abs(site.answer(site.ask_for_life(fingerprint="other", nonce="again"))) < 16
    assert site.spends() == [vote_nano(ask.task)] * RECORDS


def test_a_file_that_is_there_twice_is_one_image_and_votes_once(site: LifeSite) -> None:
    write(site.shard.path, ids=5, twice=30)
    with site.run():
        votes = site.answer(site.ask_for_life())
    assert abs(votes - RECORDS) < 16
    assert len(site.spends()) == RECORDS


def test_records_far_from_every_query_spend_nothing(site: LifeSite) -> None:
    ask = site.ask_for_life()
    far = {
        "budget_nano": ask.task.lifetime_budget.budget_nano if ask.task.lifetime_budget else 0,
        "least_similarity": 1.0,
    }
    with site.run():
        assert abs(site.answer(site.ask_for_life(lifetime_budget=far))) < 16
        assert site.spends() == [0] * RECORDS  # as many rows as where all of them vote: writing takes as long
        assert site.answer(ask) > 30


def test_only_records_of_the_classes_asked_about_vote_and_pay(site: LifeSite) -> None:
    ask = site.ask_for_life()
    assert ask.task.lifetime_budget is not None
    about = ask.task.lifetime_budget.model_dump() | {"asked_classes": ("dog",)}
    with site.run():
        site.send(only := site.ask_for_life(lifetime_budget=about))
        (shares,) = site.shares(only, 1)
    found = unshard([share.expand() for share in shares]).sum(axis=0) / only.task.scale
    # Standard deviation of one class: sqrt(9 / 2).
    assert np.allclose(found, [0, RECORDS // 3, 0], atol=11)
    spent = site.spends()
    assert (len(spent), np.count_nonzero(spent)) == (RECORDS, RECORDS // 3)


@pytest.mark.parametrize(
    ("life", "key", "changes", "said"),
    [
        (None, KEY, {}, "budget.life_epsilon"),
        (0.5, KEY, {}, "budget.life_epsilon"),
        (EPSILON, None, {}, NO_DIGESTS),
    ],
)
def test_a_site_that_set_nothing_aside_or_cannot_know_its_images_refuses_at_no_charge(
    site: LifeSite, life: float | None, key: SiteKey | None, changes: dict[str, Any], said: str
) -> None:
    site.life = life
    site.write_policy()
    write(site.shard.path, key=key)
    site.send(site.ask_for_life(**changes))
    with site.run():
        (refusal,) = site.refusals(1)
    assert said in refusal.sentence
    assert site.spent() == (0 if life is None else set_aside_nano(budget_for(life, 1e-5)))


def test_a_requester_that_would_take_more_of_what_images_have_for_life_than_its_share_is_refused_and_told(
    site: LifeSite,
) -> None:
    policy = site.policy()
    limits = policy.budget.model_copy(update={"per_requester": 1e-7})
    (site.home / "policy.toml").write_text(policy_toml(policy.model_copy(update={"budget": limits})))
    task = {"method": "reverse-knn", "k": 1, "lifetime_budget": {"budget_nano": 10**8, "least_similarity": -1.0}}
    site.propose(replace(site.proposal(**task), requester="ada"))
    with site.run():
        (declined,) = site.declined(1)
    (refused,) = SiteConsole(site.home).overview()["refused"]
    assert "budget.per_requester" in declined.refusal.sentence
    assert (refused["requester"], refused["sentence"]) == ("ada", declined.refusal.sentence)
    assert site.spent() == set_aside_nano(budget_for(EPSILON, 1e-5))


def test_a_shard_under_another_site_key_casts_no_votes_for_life(site: LifeSite) -> None:
    with site.run():
        site.answer(site.ask_for_life())
    write(site.shard.path, key=OTHER)
    with site.run():
        site.send(site.ask_for_life(nonce="other"))
        assert OTHER_KEY in site.refusals(1)[0].sentence


def test_a_home_from_a_backup_keeps_the_spends_and_casts_no_votes_for_life_any_more(
    site: LifeSite, tmp_path: Path
) -> None:
    with site.run():
        site.answer(site.ask_for_life())
        site.relay.wait_for_rest(AGENT)
    backup_home(site.home, tmp_path / "backup")
    site.home.rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "backup", site.home)
    accept_restored_journal(site.home, reason="disk lost")
    assert len(site.spends()) == RECORDS
    # Also after a person has raised the cap: nobody knows what was spent since.
    raised = site.policy()
    budget = raised.budget.model_copy(update={"instance_epsilon": 60.0})
    (site.home / "policy.toml").write_text(policy_toml(raised.model_copy(update={"budget": budget})))
    with site.run():
        site.send(site.ask_for_life(nonce="after"))
        assert CLOSED in site.refusals(1)[0].sentence
