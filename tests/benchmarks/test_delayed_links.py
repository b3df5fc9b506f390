"""Talliers in namespaces of their own: packets take as long as they are told to, and rounds follow the classes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from benchmarks.delayed_links import FEW_QUERIES, DelayedLinks, _run, delayed_links
from labeler.errors import InvalidSetting

DELAY_S = 0.05


@pytest.fixture
def links() -> Iterator[DelayedLinks]:
    """Three namespaces, where this machine has them."""
    try:
        with delayed_links(DELAY_S) as links:
            yield links
    except InvalidSetting as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_an_answer_takes_twice_the_delay_and_the_winners_take_three_rounds_for_every_doubling_of_the_classes(
    links: DelayedLinks,
) -> None:
    name, target = links.namespaces[0], links.addresses[2].host
    began = time.monotonic()
    # A packet of the kernel, answered by the other kernel: a connection that nobody listens for is refused.
    connect = f"import socket; print(socket.socket().connect_ex(({target!r}, 9)))"
    done = subprocess.run(
        ["ip", "netns", "exec", name, "python3", "-c", connect], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 0
    assert time.monotonic() - began > 2 * DELAY_S
    waves = []
    for classes in (2, 8):
        assert _run(links, FEW_QUERIES, classes) > links.waves * DELAY_S
        waves.append(links.waves)
    # Two doublings; a busy machine may split or join a wave.
    assert 4 <= waves[1] - waves[0] <= 9


def test_no_namespace_is_left_behind() -> None:
    try:
        with delayed_links(0.001) as links:
            made = set(links.namespaces)
            assert made <= namespaces()
    except InvalidSetting as error:
        pytest.skip(str(error))
    assert not made & namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
