"""A settings file that is refused says where: the line and column of what a person has to change."""

from __future__ import annotations

import math
import tomllib
from datetime import datetime
from typing import Annotated, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from labeler.errors import InvalidSetting
from labeler.settings import Place, SettingsText, nearest, problems_of


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    depth: int = 1
    password: str = ""


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}


TEXT = """\
# A comment = 1
name = "x = [inner]"

[inner]   # [many]
  depth = "deep"
text = \"\"\"
[inner]
depth = 3
\"\"\"
[[many]]
depth = 1
[[many]]
depht = [
  1,
  2,
]
[by_name]
"a b".password = 3
c = { depth = 1, passwort = "secret" }
"""


def test_every_refused_field_is_told_with_its_place_and_none_with_its_value() -> None:
    with pytest.raises(InvalidSetting) as refused:
        SettingsText.of(TEXT.encode(), "file x.toml").check(Outer)
    assert str(refused.value) == (
        "file x.toml refused: "
        "line 5, column 3: inner.depth: must be a whole number; "
        "line 6, column 1: inner.text: unknown field; check its spelling against the documented fields; "
        "line 13, column 1: many.1.depht: unknown field; did you mean depth?; "
        "line 18, column 1: by_name.a b.password: must be a text; "
        "line 19, column 18: by_name.c.passwort: unknown field; did you mean password?"
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a = 1\nb = = 2", "line 2, column 5: Invalid value"),
        (b"a = 1\r\nb = 'x", 'line 2: Expected "\'" at the end of the file'),
        (b"a = [1,\n2\n\n", "line 2: Unclosed array at the end of the file"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"a = 1\n# \xe9t\xe9", "line 2 is not UTF-8"),
        (b"[" * 2000, "line 1"),
        (b"k = " + b"9" * 5000, "a number in it has thousands of digits"),
    ],
)
def test_broken_syntax_is_told_with_its_line(data: bytes, said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        SettingsText.of(data, "x.toml")
    assert str(refused.value).startswith("x.toml is not valid TOML: ")
    assert said in str(refused.value)


KEYS = st.text("abc", min_size=1, max_size=3)
VALUES = st.sampled_from(["1", '"a = 1"', "[\n1,\n]", '"""\n[a]\nb = 2\n"""', "{ x = 1 }", "1 # b = 2"])


@given(st.lists(st.tuples(KEYS, st.dictionaries(KEYS, VALUES, max_size=4)), max_size=4, unique_by=lambda one: one[0]))
def test_every_field_is_found_on_the_line_that_sets_it(tables: list[tuple[str, dict[str, str]]]) -> None:
    lines: list[str] = []
    places = {}
    for table, fields in tables:
        lines.append(f"[{table}]")
        places[(table,)] = Place(len(lines), 1)
        for key, value in fields.items():
            places[table, key] = Place(len(lines) + 1, 3)
            lines += f"  {key} = {value}".split("\n")
    text = SettingsText.of("\n".join(lines).encode(), "x")
    assert text.fields == tomllib.loads("\n".join(lines))
    assert {loc: text.place(loc) for loc in places} == places


class Capped(BaseModel):
    """What a policy has: a number or a word, and a list or a word."""

    model_config = ConfigDict(strict=True)

    cap: Annotated[float, Field(gt=0)] | Literal["unlimited"]
    tasks: Annotated[tuple[Annotated[str, Field(min_length=2)], ...], Field(strict=False)] | Literal["any"]
    table: dict[str, int] = {}

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.cap == 7:
            raise ValueError("seven is nobody's cap")
        return self


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('cap = "7"\ntasks = "any"', "line 1, column 1: cap: must be a number, or 'unlimited'"),
        ("cap = -1.0\ntasks = 5", "line 1, column 1: cap: must be more than 0, or 'unlimited'"),
        ("cap = 1.0\ntasks = 5", "line 2, column 1: tasks: must be a list, or 'any'"),
        ('cap = 1.0\ntasks = ["x"]', "tasks.0: must have at least 2 characters"),
        ('cap = 1.0\ntasks = "any"\ntable = 3', "line 3, column 1: table: must be a table"),
        ('cap = 7.0\ntasks = "any"', "x.toml refused: seven is nobody's cap"),
    ],
)
def test_a_refusal_has_no_words_of_the_library_that_checks(text: str, said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        SettingsText.of(text.encode(), "x.toml").check(Capped)
    assert said in str(refused.value)
    for word in ("constrained", "literal[", "tuple", "dictionary"):
        assert word not in str(refused.value)


@pytest.mark.parametrize("text", ["a" + ".a" * 50_000 + " = 1", "a = " + "[" * 900 + "]" * 900, "a = " + "[" * 50_000])
def test_a_field_that_is_nested_without_end_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^task file refused: a field is nested more than 50 levels deep; no "):
        SettingsText.of(text.encode(), "task file")


def test_a_field_that_is_nested_as_settings_are_is_read() -> None:
    text = SettingsText.of(("a" + ".a" * 49 + " = 1").encode(), "task file")
    assert text.place(("a",) * 50) is not None


BACKBONES = ("efficientnet-lite0", "efficientnet-lite2", "pixels")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("pixel", (*BACKBONES, "mixnet_l"), "pixels"),
        ("PIXELS", BACKBONES, "pixels"),
        ("pxiels", BACKBONES, "pixels"),
        ("efficientnet_lite0", BACKBONES, "efficientnet-lite0"),
        ("resnet", ("tresnet_m", "resnet101", "resnet18"), "resnet18"),
        ("dinov2", ("vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_dinov2"), "vit_small_patch14_dinov2"),
        ("reverse_kn", ("knn", "reverse-knn"), "reverse-knn"),
        ("sigma", ("delta", "sigma_votes"), "sigma_votes"),
        ("zebra", BACKBONES, None),
        ("", BACKBONES, None),
    ],
)
def test_the_nearest_name_is_the_one_that_people_meant(word: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(word, known) == meant


class Bounded(BaseModel):
    """One field for each kind of bound."""

    model_config = ConfigDict(extra="forbid", strict=True)

    whole: Annotated[int, Field(ge=1, le=9)] = 1
    real: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    text: Annotated[str, Field(min_length=1, max_length=3)] = "a"
    word: Annotated[str, Field(pattern="^[a-z]+$")] = "a"
    items: Annotated[list[int], Field(min_length=2, max_length=3)] = [1, 2]
    choice: Literal["one", "two"] = "one"
    is_on: bool = True
    at: datetime | None = None
    names: dict[str, int] = {}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("whole", 0, "must be at least 1"),
        ("whole", 10, "must be at most 9"),
        ("whole", 1.5, "must be a whole number"),
        ("whole", "1", "must be a whole number"),
        ("real", 0.0, "must be more than 0"),
        ("real", 1.0, "must be less than 1"),
        ("real", math.nan, "must be a finite number"),
        ("real", "x", "must be a number"),
        ("text", "", "must have at least 1 character"),
        ("text", "abcd", "must have at most 3 characters"),
        ("text", 5, "must be a text"),
        ("word", "A", "must match the pattern ^[a-z]+$"),
        ("items", [1], "must have at least 2 entries, found 1"),
        ("items", [1, 2, 3, 4], "must have at most 3 entries"),
        ("items", 5, "must be a list"),
        ("choice", "tow", "must be 'one' or 'two'; did you mean 'two'?"),
        ("choice", 1, "must be 'one' or 'two'"),
        ("is_on", "yes", "must be true or false"),
        ("at", "noon", "must be a date and time, such as 2027-03-01T08:00:00Z"),
        ("names", [], "must be a table of names and values"),
        ("wohle", 1, "unknown field; did you mean whole?"),
    ],
)
def test_a_bound_is_said_in_plain_words(field: str, value: object, said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Bounded.model_validate({field: value})
    assert problems_of(refused.value, model=Bounded) == [((field,), said)]
