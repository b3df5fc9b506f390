"""Peers of a tallier, with which it computes winners: the address and the certificate of each.

    HOME/winner.pem    own key and certificate, readable by its owner only; made once.
    HOME/peers.toml    own address, and the two others: `labeler tallier init --listen` and `labeler tallier peers`
                       write it, from files that their sites have sent.

The site pins the others itself and never hears of them through the coordinator, who could name itself. The files that
sites exchange are those of the public keys, with the address and the certificate added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from labeler.errors import InvalidSetting
from labeler.system.files import replace_file
from workers.agent.policy import HexKey, PartyId, Settings, toml_value
from workers.party.home import read_settings
from workers.winner.certificates import fingerprint, issue_certificate, read_certificate
from workers.winner.engine import NUM_PARTIES, Address
from workers.winner.links import PROTOCOL_NAME

IDENTITY_FILE = "winner.pem"
PEERS_FILE = "peers.toml"

_Number = Annotated[int, Field(ge=0, le=NUM_PARTIES - 1)]
_Digit = Annotated[str, Field(pattern=r"^[0-2]$")]


class Peer(Settings):
    """Another tallier, as this one's site has pinned it.

    Attributes:
        listen: HOST:PORT where it can be reached.
        certificate: PEM; it identifies the peer.
    """

    tallier_id: PartyId
    listen: str
    verify_key: HexKey
    certificate: str


class PeersFile(Settings):
    """`peers.toml`.

    Attributes:
        listen: HOST:PORT where it listens while winners are computed; one address, never all of them.
        peers: the two others, by number; empty until they are pinned.
    """

    number: _Number
    listen: str
    peers: dict[_Digit, Peer] = Field(default_factory=dict)


class WinnerGroup:
    """The three talliers that compute winners together, as one of them knows them.

    Attributes:
        addresses: in tallier order.
        certificates: in tallier order, PEM.
        verify_keys: in tallier order.
        digest: SHA-256 over the three certificates and the protocol that this version speaks, in hexadecimal. All three
            must have the same: otherwise they could find no winner together, and the coordinator starts no round of
            them.

    Raises:
        InvalidSetting: an address is not valid, or a certificate cannot be read.
    """

    def __init__(self, home: Path, settings: PeersFile, own_verify_key: str) -> None:
        self.number = settings.number
        self.identity_path = home / IDENTITY_FILE
        own = Peer(
            tallier_id="self",
            listen=settings.listen,
            verify_key=own_verify_key,
            certificate=read_certificate(self.identity_path),
        )
        members = [settings.peers[str(number)] if number != self.number else own for number in range(NUM_PARTIES)]
        self.addresses = tuple(address_of(member.listen) for member in members)
        self.certificates = tuple(member.certificate for member in members)
        self.verify_keys = tuple(member.verify_key for member in members)
        prints = [fingerprint(certificate) for certificate in self.certificates]
        self.digest = hashlib.sha256(
            f"labeler-winner-group/2 {PROTOCOL_NAME}\n".encode() + json.dumps(prints).encode()
        ).hexdigest()


def address_of(listen: str) -> Address:
    """Parse HOST:PORT, with an IPv6 address in brackets.

    Raises:
        InvalidSetting: it is not valid, or names all addresses of the machine.
    """
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or len(port) > 5:
        raise InvalidSetting(f"listen must be HOST:PORT, one address and not all of them, found {listen!r}")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def make_identity(home: Path, *, tallier_id: str, number: int, listen: str) -> None:
    """Give a tallier a certificate if it has none, and an address; pinned peers stay.

    Raises:
        InvalidSetting: the address is not valid, or the existing certificate cannot be read.
    """
    address_of(listen)
    path = home / IDENTITY_FILE
    if path.exists():
        read_certificate(path)
    else:
        issue_certificate(tallier_id[:64], path=path, now=datetime.now(UTC))
    known = read_peers(home)
    _write(home, PeersFile(number=number, listen=listen, peers={} if known is None else known.peers))


def public_part(home: Path) -> dict[str, str]:
    """Return the extra fields of a tallier's public key file: `listen` and `certificate`; nothing where it has none.

    Raises:
        InvalidSetting: what is there cannot be read.
    """
    known = read_peers(home)
    return {} if known is None else {"listen": known.listen, "certificate": read_certificate(home / IDENTITY_FILE)}


def pin_peers(home: Path, documents: Sequence[Mapping[str, Any]]) -> dict[int, Peer]:
    """Pin the two other talliers from the files of public keys that their sites have sent.

    Returns:
        The two, by number.

    Raises:
        InvalidSetting: this home has no certificate yet, or the files are not those of the two others.
    """
    known = read_peers(home)
    if known is None:
        raise InvalidSetting(
            "this tallier has no certificate and no address yet: labeler tallier listen HOST:PORT --home HOME"
        )
    peers = {int(document.get("tallier", -1)): _peer(document) for document in documents}
    others = set(range(NUM_PARTIES)) - {known.number}
    if set(peers) != others or len(documents) != len(others):
        first, second = sorted(others)
        raise InvalidSetting(
            f"this is tallier {known.number}: name the files of talliers {first} and {second}, each once; found "
            f"{', '.join(str(number) for number in sorted(peers)) or 'none'}"
        )
    own = fingerprint(read_certificate(home / IDENTITY_FILE))
    prints = [own, *(fingerprint(peer.certificate) for peer in peers.values())]
    if len(set(prints)) != NUM_PARTIES or len({peer.verify_key for peer in peers.values()}) != len(others):
        raise InvalidSetting("two talliers have the same key or certificate; each needs one of its own")
    _write(home, known.model_copy(update={"peers": {str(number): peer for number, peer in sorted(peers.items())}}))
    return peers


def read_peers(home: Path) -> PeersFile | None:
    """Read `peers.toml` of a home; None where there is none.

    Raises:
        InvalidSetting: it cannot be read.
    """
    return read_settings(home, PEERS_FILE, PeersFile) if (home / PEERS_FILE).exists() else None


def read_group(home: Path, *, own_verify_key: str) -> WinnerGroup | None:
    """Read the group a tallier computes winners with; None where its site has pinned none.

    Raises:
        InvalidSetting: what is pinned cannot be used.
    """
    settings = read_peers(home)
    if settings is None or not settings.peers:
        return None
    others = {str(number) for number in range(NUM_PARTIES)} - {str(settings.number)}
    if settings.peers.keys() != others:
        raise InvalidSetting(
            f"{PEERS_FILE} must name talliers {' and '.join(sorted(others))}; run labeler tallier peers"
        )
    return WinnerGroup(home, settings, own_verify_key)


def _peer(document: Mapping[str, Any]) -> Peer:
    if document.get("role") != "tallier" or "certificate" not in document or "listen" not in document:
        raise InvalidSetting(
            f"the file of {document.get('party_id', 'somebody')!r} names no certificate and address of a tallier; "
            "its site makes them with labeler tallier listen HOST:PORT --home HOME"
        )
    listen, certificate = str(document["listen"]), str(document["certificate"])
    address_of(listen)
    fingerprint(certificate)
    return Peer(
        tallier_id=document["party_id"], listen=listen, verify_key=document["verify_key"], certificate=certificate
    )


def _write(home: Path, settings: PeersFile) -> None:
    lines = [
        "# The talliers that compute winners together. Written by `labeler tallier init` and `labeler tallier peers`.",
        f"number = {settings.number}",
        f"listen = {toml_value(settings.listen)}",
    ]
    for number, peer in settings.peers.items():
        lines += ["", f"[peers.{number}]"]
        lines += [f"{name} = {toml_value(value)}" for name, value in peer.model_dump(exclude={"certificate"}).items()]
        lines.append(f'certificate = """\n{peer.certificate.strip()}\n"""')
    replace_file(home / PEERS_FILE, ("\n".join(lines) + "\n").encode(), mode=0o600)
