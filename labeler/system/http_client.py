"""One HTTP client for everybody who calls a service: whom it believes, and when it takes a proxy."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2

KEEP_ALIVE_S = 60.0
"""For an idle connection; shorter than servers and edge keep theirs."""


def certificates_for(scheme: str, ca_file: str | None) -> ssl.SSLContext:
    """An authority of one's own, or those of the system; for plain HTTP nobody.

    Reading the system's takes 20 ms of a core, which each command and each party on one machine would spend on
    connections that meet no certificate. Whatever met one through such a context would be refused.

    Args:
        scheme: of the service's URL.
        ca_file: PEM file of the authority that signed the service's certificate; the system's when None.

    Raises:
        OSError: the file cannot be read, or holds no certificates.
    """
    if scheme == "http" and ca_file is None:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return ssl.create_default_context(cafile=ca_file)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own and nobody else's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_client(
    url: str, *, ca_file: str | None, read_s: float, headers: Mapping[str, str] | None = None
) -> httpx2.Client:
    """Make a client of one service. A proxy of the environment is for the network, never for this machine.

    Args:
        url: checked by the caller; paths of requests are below it.
        ca_file: see `certificates_for`.
        read_s: longest silence while waiting for an answer.

    Raises:
        OSError: see `certificates_for`.
        ImportError, ValueError: the environment names a proxy of a kind that is not spoken to.
    """
    import httpx2  # here: a desk and a coordinator start without

    base = httpx2.URL(url)
    return httpx2.Client(
        base_url=url,
        headers={"User-Agent": "private-labeler", **(headers or {})},
        timeout=httpx2.Timeout(read_s, connect=min(read_s, 10.0), write=min(read_s, 30.0)),
        limits=httpx2.Limits(keepalive_expiry=KEEP_ALIVE_S),
        verify=certificates_for(base.scheme, ca_file),
        trust_env=not is_loopback(base.host),
    )
