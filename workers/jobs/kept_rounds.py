"""What the parties of one job keep of a round between its keys and its release: of all of them together, in few syncs.

    .job/keys/             a key of each agent for each round; many rounds are drawn at once (feature_store.erasable);
                           of each tallier, too, where talliers add the noise (labeler.noise)
    .job/answers/ROUND     what each agent answered, encrypted under its key; written once, when all have answered

The rules are those of `labeler.rounds.agent`: keys are durable before anything is computed with them, the answers of a
round before anything of it is summed, and both are erased once its release is stored. A kill in between costs
computing: what was not stored whole is computed again, under the same keys and from the records that the plan names.

A folder that an earlier version began goes on: with keys and answers in a folder for each agent (`.job/secrets/AGENT/`,
`.job/answers/AGENT/`), or with one noise secret for each (`.job/secrets/AGENT`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from feature_store.durable import replace_file
from feature_store.erasable import KeyFolder, keys_in, lock_away, take_out
from labeler.errors import BadData
from labeler.randomness import KEY_BYTES

KEYS_FOLDER = "keys"
ANSWERS_FOLDER = "answers"
EARLIER_FOLDER = "secrets"

Bodies = tuple[bytes, ...]

_KEYS_AT_ONCE = 4096
_LENGTH_BYTES = 8


class KeptRounds:
    """Keys and answers of one job; see the module.

    Args:
        state: folder of the job's state; private to its owner.
        talliers: names of those that draw noise; none where the agents add it.
        secrets: the key of every round, by agent and by tallier that draws noise, of a job that is seeded.

    Raises:
        BadData: an earlier version's secret is damaged.
    """

    def __init__(
        self,
        state: Path,
        agents: Sequence[str],
        *,
        talliers: Sequence[str] = (),
        secrets: Mapping[str, bytes] | None = None,
    ) -> None:
        self._agents = tuple(sorted(agents))
        self._talliers = tuple(talliers)
        self._keys = KeyFolder(state / KEYS_FOLDER)
        self._answers = state / ANSWERS_FOLDER
        self._earlier = {agent: state / EARLIER_FOLDER / agent for agent in self._agents}
        self._secrets = dict(secrets or {})
        self._earlier_keys: dict[str, dict[str, bytes]] = {}
        for agent, path in self._earlier.items():
            if path.is_file():
                self._secrets[agent] = _secret(path, agent)
            elif path.is_dir():
                self._earlier_keys[agent] = keys_in(path)

    def __repr__(self) -> str:
        return f"KeptRounds(agents={len(self._agents)}, <secret>)"

    def begin(self, rounds: Sequence[str]) -> None:
        """Draw the keys of rounds, as many of the first ones as are drawn at once, durably before this returns."""
        at_once = rounds[: max(1, _KEYS_AT_ONCE // len(self._agents))]
        drawn = [name for name in (*self._agents, *self._talliers) if name not in self._secrets]
        wanted = [
            _name(agent, one) for one in at_once for agent in drawn if one not in self._earlier_keys.get(agent, {})
        ]
        if wanted:
            self._keys.draw_all(wanted)

    def keys(self, round_digest: str) -> dict[str, bytes]:
        """The key of each agent that has one."""
        found = {agent: self._key(agent, round_digest) for agent in self._agents}
        return {agent: key for agent, key in found.items() if key is not None}

    def tallier_key(self, tallier: str, round_digest: str) -> bytes:
        """What a tallier draws its noise of a round from.

        Raises:
            BadData: it is gone. Other noise around the same votes would be a second answer.
        """
        key = self._key(tallier, round_digest)
        if key is None:
            raise BadData(
                f"the key of {tallier} for a batch that was charged is gone, so its noise cannot be replayed; start "
                "again in an empty folder, which is charged anew"
            )
        return key

    def answers(self, round_digest: str) -> dict[str, Bodies] | None:
        """What each agent had answered: one body per tallier; None where the answers were not stored.

        Raises:
            BadData: they were changed, or their keys are gone.
        """
        path = self._answers / round_digest
        if path.is_file():
            locked = _apart(path.read_bytes())
            if len(locked) != len(self._agents):
                raise BadData(f"the answers of {len(self._agents)} agents are damaged; start again in an empty folder")
            return {
                agent: self._open(agent, round_digest, one) for agent, one in zip(self._agents, locked, strict=True)
            }
        return self._answers_of_an_earlier_version(round_digest)

    def store(self, round_digest: str, answers: Mapping[str, Bodies]) -> None:
        """Keep the answers of all agents, durably; what was stored first stands."""
        if self.answers(round_digest) is not None:
            return
        keys = self.keys(round_digest)
        locked = [lock_away(keys[agent], round_digest, answers[agent]) for agent in self._agents]
        self._answers.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = b"".join(len(one).to_bytes(_LENGTH_BYTES, "big") + one for one in locked)
        replace_file(self._answers / round_digest, data, mode=0o600)

    def erase(self, rounds: Sequence[str]) -> None:
        """Forget keys and answers of rounds whose releases are stored; what is left of the answers opens nowhere."""
        self._keys.erase_all([_name(party, one) for one in rounds for party in (*self._agents, *self._talliers)])
        for agent, keys in self._earlier_keys.items():
            KeyFolder(self._earlier[agent]).erase_all([one for one in rounds if keys.pop(one, None) is not None])
        for one in rounds:
            (self._answers / one).unlink(missing_ok=True)

    def _key(self, agent: str, round_digest: str) -> bytes | None:
        secret = self._secrets.get(agent) or self._earlier_keys.get(agent, {}).get(round_digest)
        return secret or self._keys.read(_name(agent, round_digest))

    def _open(self, agent: str, round_digest: str, locked: bytes) -> Bodies:
        key = self._key(agent, round_digest)
        if key is None:
            raise BadData(f"the key of {agent} for an answer that was stored is gone; start again in an empty folder")
        return take_out(key, round_digest, locked)

    def _answers_of_an_earlier_version(self, round_digest: str) -> dict[str, Bodies] | None:
        """Only where all agents had answered: what one had not, all compute again, and come to the same."""
        found = {}
        for agent in self._earlier_keys:
            path = self._answers / agent / round_digest
            if not path.is_file() or not path.stat().st_size:
                return None
            # The first part says for whom it was; here the talliers are objects of one process.
            _, *bodies = self._open(agent, round_digest, path.read_bytes())
            found[agent] = tuple(bodies)
        return found if len(found) == len(self._agents) else None


def _name(agent: str, round_digest: str) -> str:
    return f"{agent}.{round_digest}"


def _apart(data: bytes) -> list[bytes]:
    parts = []
    while data:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        parts.append(data[_LENGTH_BYTES:end])
        data = data[end:]
    return parts


def _secret(path: Path, agent: str) -> bytes:
    secret = path.read_bytes()
    if len(secret) != KEY_BYTES or not any(secret):
        raise BadData(f"the noise secret of {agent} is damaged; start in an empty folder")
    return secret
