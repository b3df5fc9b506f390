"""Worlds of Office-Caltech10: one domain is the server, three are agents; 70 % of the server's images are public."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.data_sets import Split
from benchmarks.office_caltech import DOMAINS, PUBLIC_SHARE, data_folder, embed_domains
from benchmarks.rivals.world import World
from workers.progress import ProgressCallback

COLLUDING: Final = 1
"""Agents that may pool what they know, as in a new task."""


def office_domains(data: Path | None, progress: ProgressCallback) -> dict[str, Split]:
    """The four domains as MobileNetV2 features, in the order of file names.

    Raises:
        InvalidSetting: the data are not there.
    """
    shards = embed_domains(data_folder(data), progress)
    found = {}
    for domain, shard in shards.items():
        order = np.argsort(np.array(shard.sources), kind="stable")
        rows = np.ascontiguousarray(shard.features[order]).astype(np.float32) / np.float32(2048)
        found[domain] = Split(rows, np.asarray(shard.labels)[order].astype(np.int64))
    return found


def office_world(domains: Mapping[str, Split], server: str, split: int, *, colluding_agents: int = COLLUDING) -> World:
    """The world of `labeler bench office-caltech`: the same split of the server's images."""
    asked = domains[server]
    order = np.random.default_rng([split, DOMAINS.index(server)]).permutation(len(asked))
    public, test = np.split(order, [int(PUBLIC_SHARE * len(order))])
    return World(
        name=f"office {server} {split}",
        holdings=[domains[domain] for domain in DOMAINS if domain != server],
        public=asked.inputs[public],
        test=Split(asked.inputs[test], asked.labels[test]),
        num_classes=10,
        colluding_agents=colluding_agents,
    )
