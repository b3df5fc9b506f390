"""Parameters that several routes share, with their bounds and an example each."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Query

from api import examples
from api.access import caller, reader
from api.coordinator.ownership import Reader
from api.schema import KEY

MAX_PAGE = 200
MAX_ID_LENGTH = 100

Caller = Annotated[str, Depends(caller)]
"""Id of the token the request came with."""

Who = Annotated[Reader, Depends(reader)]
"""Who asks, for routes whose answer depends on whose a thing is."""

TaskId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=[examples.TASK_ID], description="digest of a task")]
JobId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=[examples.JOB_ID], description="id of a job")]
AgentId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=["hospital-a"], description="id of an agent")]
PartyId = Annotated[
    str, Path(max_length=MAX_ID_LENGTH, examples=["hospital-a"], description="id of an agent or a tallier")
]
TokenId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=[examples.TOKEN_ID], description="id of a token")]

After = Annotated[
    str | None,
    Query(max_length=300, examples=["MjAyNy0wMy0wMQ"], description="`next` of the page before; absent for the first"),
]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, examples=[50], description="items on one page")]

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=f"^{KEY}$",
        examples=["march-photographs-1"],
        description="1 to 200 visible ASCII characters. The same key with the same body gives the same job, however "
        "often it is sent; with another body it is refused.",
    ),
]
