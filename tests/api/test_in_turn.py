"""Long work of many names: whose turn it is, and that who only looks waits for none of it."""

from __future__ import annotations

import threading

import anyio
import pytest

from api.in_turn import InTurn


def test_who_asks_for_much_waits_behind_its_own_and_holds_up_no_other() -> None:
    in_turn, may_end = InTurn(), threading.Event()
    done: list[str] = []

    async def ask(name: str, piece: str) -> None:
        def work() -> None:
            if name == "greedy":
                may_end.wait()
            done.append(piece)

        await in_turn.run(name, work)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(ask, "greedy", f"greedy {number}")
            await anyio.wait_all_tasks_blocked()
            await ask("modest", "modest 0")
            await ask("another", "another 0")
            may_end.set()

    anyio.run(main)
    assert done == ["modest 0", "another 0", *(f"greedy {number}" for number in range(8))]
    assert not in_turn._turns, "names that wait for nothing are forgotten"


def test_what_a_piece_raises_is_raised_and_the_next_has_its_turn() -> None:
    async def main() -> None:
        in_turn = InTurn(threads=1)
        with pytest.raises(ZeroDivisionError):
            await in_turn.run("somebody", lambda: 1 // 0)
        assert await in_turn.run("somebody", lambda: "done") == "done"

    anyio.run(main)
