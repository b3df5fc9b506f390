"""What a supervisor asks of the coordinator it started: does it live, enrol these parties, is everybody there.

The standard library's client is enough for that, on loopback, and spares the supervisor a larger one.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from labeler.errors import BadData, Unavailable
from workers.federation import Enrolment

_TIMEOUT_S = 10.0


class CoordinatorDoor:
    """The coordinator as its supervisor reaches it.

    Args:
        host, port: where it listens.
        token: an administrator's.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host = host
        self._port = port
        self._token = token

    def is_alive(self) -> bool:
        """Whether the coordinator answers at all."""
        try:
            return self._ask("GET", "/healthz")[0] == http.client.OK
        except Unavailable:
            return False

    def enrol(self, enrolments: Sequence[Enrolment]) -> None:
        """Enrol parties; enrolling the same again changes nothing.

        Raises:
            Unavailable: the coordinator does not answer.
            BadData: it refuses one; its reason is in the error.
        """
        for party in enrolments:
            body: dict[str, Any] = {
                "party_id": party.party_id,
                "role": party.role,
                "verify_key": party.keys.verify_key,
                "seal_key": party.keys.seal_key,
            }
            if party.tallier is not None:
                body["tallier"] = party.tallier
            status, document = self._ask("POST", "/v1/parties", body)
            if status >= http.client.MULTIPLE_CHOICES:
                raise BadData(f"{party.party_id} cannot be enrolled (status {status}): {document.get('detail', '')}")

    def what_is_missing(self, *, since: datetime, without: Collection[str] = ()) -> str:
        """What is not there yet, in words; empty when nothing is missing.

        Args:
            since: a party counts as there once it was heard of after this.
            without: parties that need not be there.
        """
        try:
            status, document = self._ask("GET", "/readyz")
            if status != http.client.OK:
                failed = [
                    f"{one.get('name')} ({one.get('detail')})" for one in document.get("checks", ()) if not one["ok"]
                ]
                return ", ".join(failed) or f"the coordinator is not ready (status {status})"
            parties = self._ask("GET", "/v1/parties")[1].get("parties", ())
        except Unavailable as error:
            return str(error)
        silent = [
            party["party_id"]
            for party in parties
            if party["state"] == "active" and party["party_id"] not in without and not _heard_of(party, since)
        ]
        return f"not heard of yet: {', '.join(silent)}" if silent else ""

    def revoke_own_token(self) -> None:
        """End the token this door was opened with; nothing more can be asked then."""
        token_id = self._ask("GET", "/v1/whoami")[1].get("token_id", "")
        self._ask("DELETE", f"/v1/tokens/{token_id}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self._token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
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
