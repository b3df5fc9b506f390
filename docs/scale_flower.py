"""The sum of `labeler bench scale` in Flower's simulation, measured once beside ours; see docs/scale.md.

Flower's pins conflict with the project's, so it has its own environment, and the ballots it has to find travel
in a file:

    python docs/scale_flower.py prepare 1000 federation.npz      here: deals the digits, and sums by benchmarks.scale
    uv venv flower && uv pip install -p flower/bin/python "flwr[simulation]<1.42" numpy
    flower/bin/python docs/scale_flower.py run federation.npz    there: one ClientApp per agent, one query, one sum

The same records, queries and votes of the nearest record; sums must be equal. Flower's clients add no noise and split
nothing into shares, and what they send is put together as it is.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

QUERIES, RECORDS = 100, 20


def prepare(agents: int, path: str) -> None:
    """Deal the digits, and sum the ballots as the product casts them."""
    from benchmarks.scale.rounds import Federation, ballots_of, group_size
    from checks.audit.run import digits_pool
    from labeler.tally import QueryBatch
    from labeler.task import parse_task

    pool = digits_pool(seed=0)
    federation, batch = Federation.dealt(pool, agents, records=RECORDS, seed=0), QueryBatch(pool.public[:QUERIES])
    task = parse_task(
        {"name": "twin", "classes": list(pool.classes), "k": 1, "sigma_votes": 100.0, "delta": 1e-6,
         "max_queries": QUERIES, "agents": agents}
    )  # fmt: skip
    began, cpu = time.perf_counter(), time.process_time()
    total, size = np.zeros((QUERIES, task.num_classes), np.int64), group_size(task, batch, federation)
    for start in range(0, agents, size):
        total += ballots_of(task, batch, federation.part(slice(start, start + size))).sum(axis=0)
    told = {"ballots_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    np.savez(
        path, features=pool.features, labels=pool.labels, places=federation.places, queries=batch.features, total=total
    )
    sys.stdout.write(json.dumps({"agents": agents, **told}) + "\n")


_DATA: dict[str, Any] = {}


def _held(path: str) -> dict[str, Any]:
    if not _DATA:
        with np.load(path) as file:
            _DATA.update({name: file[name] for name in file.files})
    return _DATA


def run(path: str) -> None:
    """One round in Flower's simulation: every client answers one query, the server adds."""
    from flwr.app import ArrayRecord, Message, MessageType, RecordDict  # type: ignore[import-not-found]
    from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
    from flwr.serverapp import ServerApp  # type: ignore[import-not-found]
    from flwr.simulation import run_simulation  # type: ignore[import-not-found]

    data = _held(path)
    agents = len(data["places"])
    client, server, told = ClientApp(), ServerApp(), {}

    @client.query()  # type: ignore[untyped-decorator]
    def answer(message: Any, context: Any) -> Any:
        held = _held(path)
        places = held["places"][context.node_config["partition-id"]]
        similarities = held["queries"].astype(np.float32) @ held["features"][places].astype(np.float32).T
        # The first of equals is the one of the smallest id.
        votes = np.eye(10, dtype=np.int64)[held["labels"][places[similarities.argmax(axis=1)]]]
        return Message(RecordDict({"votes": ArrayRecord([votes])}), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def add(grid: Any, _: Any) -> None:
        while len(nodes := list(grid.get_node_ids())) < agents:
            time.sleep(0.05)
        # The first round starts what computes, and is not counted.
        for asked in (nodes[:2], nodes):
            told["ready"] = time.perf_counter()
            about = {"content": RecordDict(), "message_type": MessageType.QUERY, "group_id": str(len(asked))}
            asks = [Message(dst_node_id=node, **about) for node in asked]
            total = np.zeros_like(data["total"])
            for reply in grid.send_and_receive(asks):
                total += reply.content["votes"].to_numpy_ndarrays()[0]
        told["done"], told["equal"] = time.perf_counter(), bool((total == data["total"]).all())

    began = time.perf_counter()
    one_core = {"client_resources": {"num_cpus": 1}}
    run_simulation(server_app=server, client_app=client, num_supernodes=agents, backend_config=one_core)
    found = {
        "agents": agents,
        "round_s": told["done"] - told["ready"],
        "with_start_s": told["done"] - began,
        "equal_sums": told["equal"],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(int(sys.argv[2]), sys.argv[3])
    else:
        run(sys.argv[2])
