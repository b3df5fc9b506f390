"""What speaks to connections: the fastest event loop and parser that are installed, and their plain twins else.

uvloop and httptools take two fifths less of a core for an answer out of memory than asyncio and h11 do. Neither is
needed: what is promised about connections (api.connections, api.guarded_protocol) holds with each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from api.connections import Crowd
from api.guarded_protocol import GuardedProtocol, Times


@dataclass(frozen=True)
class Wire:
    """What a server is made with."""

    loop: Literal["uvloop", "asyncio"] = "asyncio"
    parser: Literal["httptools", "h11"] = "h11"

    @classmethod
    def present(cls) -> Wire:
        """The fastest of what is installed."""
        return cls(
            loop="uvloop" if find_spec("uvloop") else "asyncio", parser="httptools" if find_spec("httptools") else "h11"
        )

    def protocol(self, crowd: Crowd, times: Times) -> Callable[..., Any]:
        """Makes the protocol of one connection, as uvicorn asks for it."""
        if self.parser == "h11":
            return functools.partial(GuardedProtocol, crowd=crowd, times=times)
        from api.quick_protocol import QuickProtocol  # here: it needs what may be absent

        return functools.partial(QuickProtocol, crowd=crowd, times=times)
