"""A model whose numbers are numbers: no text that reads like one, and no truth value.

Pydantic takes "5" and true for 5 and 1, kindly. Here whoever writes `k = true` has meant something else, and a number
that was sent as text was made by something that will write 1,000 one day, or 1e-5 with a comma.
"""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationInfo, field_validator


class PlainNumbers(BaseModel):
    """See the module. It looks at fields that hold one number; of a list its items say so themselves."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_text(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str | bool) and info.field_name in _numbers_of(cls):
            found = "a truth value" if isinstance(value, bool) else "a text"
            raise ValueError(f"a number is needed here, without quotes; found {found}")
        return value


@cache
def _numbers_of(model: type[BaseModel]) -> frozenset[str]:
    """Names of the fields in which nothing but a number may stand."""
    return frozenset(name for name, field in model.model_fields.items() if _is_numeric(field.annotation))


def _is_numeric(annotation: Any) -> bool:
    kinds = _kinds(annotation)
    return bool(kinds) and kinds <= {int, float}


def _kinds(annotation: Any) -> frozenset[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return frozenset().union(*(_kinds(part) for part in get_args(annotation))) - {NoneType}
    return frozenset({annotation}) - {NoneType}
