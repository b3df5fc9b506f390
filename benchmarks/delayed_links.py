"""Three hosts on one machine, a delay apart: a network namespace for each tallier, and every packet held back.

Each namespace has one network device whose packets come to this process (a TUN device, as of a VPN); it hands each
to the namespace it is addressed to, DELAY seconds after it came. So the kernel's own TCP runs over a link with that
delay, its handshakes and its slow start included, which a relay of byte streams would hide. `tc netem` does the same
in a kernel that has it. Making namespaces takes the rights of root.

**Rounds** are counted where they pass: a wave is a run of packets with data from one tallier to another behind a
pause of more than half the delay. Talliers that wait for one another send one wave per round; the most waves of any
of the six links is the number of rounds, connecting and closing included. A message longer than TCP sends at once
comes in several waves, so rounds are counted with few queries. More queries change no dependency between messages
until there is no room for all chunks at once (workers.winner.tournament).
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import selectors
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.rows import BenchRow
from benchmarks.winner_party import measure, write_trio
from benchmarks.winner_reference import reference_winners
from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.randomness import os_source
from labeler.sharing import split
from labeler.winner import WinnerTerms
from workers.progress import ProgressCallback, silent
from workers.winner.engine import NUM_PARTIES, Address

DELAY_S: Final = 0.05
SIZES: Final = ((50, 10), (500, 10), (500, 2), (500, 100))
FEW_QUERIES: Final = 3
"""Of which every message fits into what TCP sends at once."""

TERMS: Final = WinnerTerms(scale=100, lowest=-15_150, highest=19_350, row_total=None, threshold=None)
"""Sums of three agents with k = 50 and sigma = 25 on the usual grid."""

_TUN_DEVICE = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_HEADER = 0x0001 | 0x1000
_SUBNET = "10.213.71"
_PORT = 7_100
_PACKET_BYTES = 65_536
_TCP = 6


@dataclass
class DelayedLinks:
    """The links between three namespaces; `waves` and `data_bytes` count what passed since `reset`.

    Attributes:
        delay_s: from one tallier to another.
        namespaces: their names, in tallier order.
        addresses: of the talliers.
    """

    delay_s: float
    namespaces: tuple[str, ...]
    addresses: tuple[Address, ...]
    _last: dict[tuple[int, int], float] = field(default_factory=dict)
    _waves: dict[tuple[int, int], int] = field(default_factory=dict)
    data_bytes: int = 0

    @property
    def waves(self) -> int:
        """Most waves of any link."""
        return max(self._waves.values(), default=0)

    def reset(self) -> None:
        """Count from nothing."""
        self._last, self._waves, self.data_bytes = {}, {}, 0

    @property
    def prefixes(self) -> list[tuple[str, ...]]:
        """What the command of each tallier stands behind to run in its namespace."""
        return [("ip", "netns", "exec", name) for name in self.namespaces]

    def passed(self, source: int, target: int, packet: bytes, now_s: float) -> None:
        """Count a packet, if it carries data."""
        count = _data_bytes(packet)
        if not count:
            return
        link = source, target
        if now_s - self._last.get(link, -1.0) > self.delay_s / 2:
            self._waves[link] = self._waves.get(link, 0) + 1
        self._last[link] = now_s
        self.data_bytes += count


def bench_winner_delay(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Seconds and rounds of winners among talliers 50 ms apart.

    Raises:
        InvalidSetting: this machine lets nobody make namespaces with devices of their own.
    """
    rows = []
    with delayed_links(DELAY_S) as links:
        for step, (queries, classes) in enumerate(SIZES):
            progress("Talliers apart", step, len(SIZES))
            seconds = min(_run(links, queries, classes) for _ in range(3 if full else 1))
            megabytes = links.data_bytes / 1e6
            _run(links, FEW_QUERIES, classes)
            case = f"{queries:,} queries x {classes} classes"
            method = f"three namespaces, {1000 * DELAY_S:g} ms between any two"
            rows += [
                BenchRow(case=case, method=method, metric="seconds", value=seconds, seconds=seconds),
                BenchRow(case=case, method=method, metric="MB on all links together", value=megabytes),
                BenchRow(
                    case=f"{FEW_QUERIES} queries x {classes} classes",
                    method=method,
                    metric="rounds, connecting and closing included",
                    value=links.waves,
                ),
            ]
    progress("Talliers apart", len(SIZES), len(SIZES))
    return rows


def _run(links: DelayedLinks, queries: int, classes: int) -> float:
    """Seconds from the shares to the winners of all three, in processes that run already."""
    sums = np.random.default_rng(queries).integers(TERMS.lowest, TERMS.highest + 1, (queries, classes))
    shares = [share.expand() for share in split(sums, num_talliers=NUM_PARTIES, source=os_source(), field=TERMS.field)]
    with tempfile.TemporaryDirectory() as folder:
        write_trio(Path(folder), shares, TERMS, addresses=links.addresses)
        links.reset()
        took = measure(Path(folder), prefixes=links.prefixes)
    if not np.array_equal(took.winners, reference_winners(shares, field=TERMS.field)):
        raise ProtocolViolation("the winners differ from those of the reference")
    return took.seconds


@contextmanager
def delayed_links(delay_s: float) -> Iterator[DelayedLinks]:
    """Three namespaces that reach one another with this delay; gone afterwards.

    Args:
        delay_s: in each direction, so that an answer takes twice as long.

    Raises:
        InvalidSetting: not root, no `ip`, or no TUN devices.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or not _TUN_DEVICE.exists():
        raise InvalidSetting(f"network namespaces of this bench take root, the program ip, and {_TUN_DEVICE}")
    names = tuple(f"labeler-{os.getpid()}-{party}" for party in range(NUM_PARTIES))
    hosts = [f"{_SUBNET}.{party + 1}" for party in range(NUM_PARTIES)]
    links = DelayedLinks(delay_s, names, tuple(Address(host, _PORT) for host in hosts))
    with ExitStack() as owned:
        devices = []
        for name, host in zip(names, hosts, strict=True):
            _ip("netns", "add", name)
            owned.callback(_ip, "netns", "delete", name)
            device = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
            owned.callback(os.close, device)
            request = struct.pack("16sH14x", f"lab{os.getpid()}".encode()[:15], _IFF_TUN_NO_HEADER)
            interface = fcntl.ioctl(device, _TUNSETIFF, request)[:16].rstrip(b"\0").decode()
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "address", "add", f"{host}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "txqueuelen", "10000", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            devices.append(device)
        stop = threading.Event()
        thread = threading.Thread(target=_carry, args=(devices, links, stop), name="delayed-links")
        thread.start()
        owned.callback(thread.join)
        owned.callback(stop.set)
        yield links


def _carry(devices: list[int], links: DelayedLinks, stop: threading.Event) -> None:
    """Hand every packet on once its time has come, in the order they came."""
    order = itertools.count()
    waiting: list[tuple[float, int, int, bytes]] = []
    with selectors.DefaultSelector() as selector:
        for party, device in enumerate(devices):
            selector.register(device, selectors.EVENT_READ, party)
        while not stop.is_set():
            pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else links.delay_s
            for key, _ in selector.select(pause_s):
                while packet := _read(key.fd):
                    target = _target(packet)
                    if target is None:
                        continue
                    now_s = time.monotonic()
                    links.passed(key.data, target, packet, now_s)
                    heapq.heappush(waiting, (now_s + links.delay_s, next(order), target, packet))
            now_s = time.monotonic()
            while waiting and waiting[0][0] <= now_s:
                _, _, target, packet = heapq.heappop(waiting)
                # A full queue loses the packet, as on any link; TCP sends it again.
                try:
                    os.write(devices[target], packet)
                except BlockingIOError:
                    continue


def _read(device: int) -> bytes:
    try:
        return os.read(device, _PACKET_BYTES)
    except BlockingIOError:
        return b""


def _target(packet: bytes) -> int | None:
    """The tallier a packet is addressed to; None where it is for nobody (IPv6 looks for neighbours)."""
    host = ".".join(str(byte) for byte in packet[16:20])
    subnet, _, last = host.rpartition(".")
    is_ours = packet[0] >> 4 == 4 and subnet == _SUBNET and 1 <= int(last) <= NUM_PARTIES
    return int(last) - 1 if is_ours else None


def _data_bytes(packet: bytes) -> int:
    """Bytes a TCP packet carries beside its headers."""
    if packet[9] != _TCP:
        return 0
    head = 4 * (packet[0] & 15)
    return len(packet) - head - 4 * (packet[head + 12] >> 4)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidSetting(f"this machine lets nobody make network namespaces: {done.stderr.strip()}")
