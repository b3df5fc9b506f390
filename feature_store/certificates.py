"""Whom a connection to a service believes."""

from __future__ import annotations

import ipaddress
import ssl


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
