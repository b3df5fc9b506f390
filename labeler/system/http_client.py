"""One HTTP client for all calls to a service: its certificate authority, its use of proxies, and bounded answers."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from labeler.errors import TooLarge

if TYPE_CHECKING:
    import httpx2

KEEP_ALIVE_S = 60.0
"""Lifetime of an idle connection; shorter than that of servers and edge."""


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_client(
    url: str, *, ca_file: str | None, read_s: float, headers: Mapping[str, str] | None = None
) -> httpx2.Client:
    """Return a client for one service. Proxies of the environment apply to the network, never to loopback.

    Args:
        url: checked by the caller; request paths are relative to it.
        ca_file: PEM file of the authority that signed the service's certificate; None for the system's.
        read_s: longest silence while waiting for an answer.

    Raises:
        OSError: the file cannot be read, or holds no certificates.
        ImportError, ValueError: the environment names an unsupported kind of proxy.
    """
    import httpx2  # here, because a console and a coordinator start without it

    base = httpx2.URL(url)
    return httpx2.Client(
        base_url=url,
        headers={"User-Agent": "private-labeler", "Accept-Encoding": "identity", **(headers or {})},
        timeout=httpx2.Timeout(read_s, connect=min(read_s, 10.0), write=min(read_s, 30.0)),
        limits=httpx2.Limits(keepalive_expiry=KEEP_ALIVE_S),
        verify=ssl.create_default_context(cafile=ca_file),
        trust_env=not is_loopback(base.host),
    )


def read_parts(response: httpx2.Response, most_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a streamed answer, whose sender may be broken or hostile.

    Raises:
        TooLarge: there are more bytes, or they are compressed and could unpack to any number.
    """
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise TooLarge(
            f"the answer is compressed ({encoding[:50]!r}), which was not asked for: it could unpack to any size. Is "
            "the URL right, and does no proxy compress?"
        )
    left = most_bytes
    for part in response.iter_raw():
        left -= len(part)
        if left < 0:
            raise TooLarge(f"the answer has more than {most_bytes} bytes, the most that is read. Is the URL right?")
        yield part


def read_whole(response: httpx2.Response, most_bytes: int) -> bytes:
    """Return the whole body of a streamed answer; raises as `read_parts`."""
    data = bytearray()  # one buffer: a list of parts of one byte takes sixty times their size
    for part in read_parts(response, most_bytes):
        data += part
    return bytes(data)
