"""The tallier process: keeps its share of every ballot of a round, and adds them up once, when the round is paid for.

What it does about a round, and in which order, says its machine (labeler.rounds.tallier); `workers.tallier.driver`
carries it out for all the mail of a poll at once. Here the two are given a home: journal, keys and the link.

Everything is durable before it is said, and encrypted under a key that no backup holds. After the sum single shares are
deleted from every file of the journal and their key is erased, and so it is of a round that expired without one. It
answers for one set of agents per round for ever, whoever asks and whatever dies: two sums over different agents would
differ by single ballots.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from labeler.ledger.backup import check_home, mark_home
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.system.clock import Clock, now_utc
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from labeler.system.keys import PartyKeys
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE, KEYS_FILE, path_in_home, read_tallier_config
from workers.party.link import PartyLink, converse
from workers.tallier.driver import TallierDriver, TallierJournal
from workers.tallier.peers import read_group
from workers.tallier.winners import WinnerDesk
from workers.winner.session import SecureEngine

log = logging.getLogger("labeler.tallier")


def run_tallier(home: Path, *, stop: threading.Event, clock: Clock | None = None, wait_s: float = 20.0) -> None:
    """Serve as a tallier until told to stop.

    Args:
        stop: ends it within a moment; nothing is lost.
        wait_s: how long the coordinator may hold a poll.

    Raises:
        LabelerError: the home or the journal cannot be used.
    """
    clock = clock or now_utc
    config = read_tallier_config(home)
    with ExitStack() as owned:
        database = open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE)
        owned.callback(database.close)
        ledger = Ledger(database, clock=clock)
        erasable = KeyFolder(home / ERASABLE_FOLDER)
        check_home(database, erasable, has_entries=ledger.verify().seq > 0)
        journal = TallierJournal(database, erasable, ledger)
        mark_home(database, erasable)
        for round_digest in journal.sweep():
            log.warning("round given up: the key of what was held is gone", extra={"round_digest": round_digest})
        keys = PartyKeys.load(home / KEYS_FILE)
        group = read_group(home, own_verify_key=keys.public.verify_key)
        winners = WinnerDesk(group, keys, engine=SecureEngine())
        owned.callback(winners.close)
        link = PartyLink(
            url=config.coordinator_url,
            party_id=config.tallier_id,
            keys=keys,
            coordinator_key=config.coordinator_verify_key,
            home=home,
            database=database,
            journal_head=ledger.known_head,
            check_own=partial(ledger.check_not_behind, witness="the coordinator"),
            facts=lambda: winners.facts,
            stop=stop,
            ca_file=path_in_home(home, config.ca_file),
            wait_s=wait_s,
        )
        owned.callback(link.close)
        driver = TallierDriver(
            link.mail,
            coordinator_key=link.coordinator_key,
            coordinator_seal_key=config.coordinator_seal_key,
            agents=config.agents,
            journal=journal,
            winners=winners,
            clock=clock,
        )
        log.info("tallier ready", extra={"tallier": config.tallier_id})
        converse(link, driver, stop)
        link.mail.settle()
    log.info("tallier stopped", extra={"tallier": config.tallier_id})
