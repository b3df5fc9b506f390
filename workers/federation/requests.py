"""What a supervisor asks of the coordinator it started: is everybody there.

The standard library's client is enough for that, on loopback, and spares the supervisor a larger one.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

from labeler.errors import Unavailable

_TIMEOUT_S = 10.0


class CoordinatorDoor:
    """The coordinator as its supervisor reaches it."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host = host
        self._port = port
        self._token = token

    def what_is_missing(self, *, since: datetime, without: Collection[str] = ()) -> str:
        """What is not there yet, in words; empty when nothing is missing.

        Args:
            since: a party counts as there once it was heard of after this.
            without: parties that need not be there.
        """
        try:
            status, document = self._ask("/readyz")
            if status != http.client.OK:
                failed = [
                    f"{one.get('name')} ({one.get('detail')})" for one in document.get("checks", ()) if not one["ok"]
                ]
                return ", ".join(failed) or f"the coordinator is not ready (status {status})"
            parties = self._ask("/v1/parties")[1].get("parties", ())
        except Unavailable as error:
            return str(error)
        silent = [
            party["party_id"]
            for party in parties
            if party["state"] == "active" and party["party_id"] not in without and not _heard_of(party, since)
        ]
        return f"not heard of yet: {', '.join(silent)}" if silent else ""

    def _ask(self, path: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            raise Unavailable("the coordinator does not answer") from None
        finally:
            connection.close()
        try:
            document = json.loads(content)
        except ValueError:
            document = None
        return answer.status, document if isinstance(document, dict) else {}


def _heard_of(party: dict[str, Any], since: datetime) -> bool:
    contact = party.get("last_contact")
    return contact is not None and datetime.fromisoformat(contact) >= since
