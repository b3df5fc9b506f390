"""What repeats in a log becomes a number."""

from __future__ import annotations

import logging

import pytest

from api.logs import FIRST, MOST_KINDS, WINDOW_S, CountRepeats


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Desk:
    """A logger whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept = Kept()
        self.handler = CountRepeats(self.kept, clock=lambda: self.now)
        self.logger = logging.Logger("labeler.test")
        self.logger.addHandler(self.handler)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_first_few_are_written_and_the_others_counted(desk: Desk) -> None:
    for _ in range(FIRST + 812):
        desk.logger.warning("a connection was %s", "turned away")
    assert desk.kept.lines == FIRST * ["a connection was turned away"]
    desk.now = WINDOW_S
    desk.logger.info("something else")
    assert desk.kept.lines[FIRST:] == [
        "a connection was turned away ... happened 812 more times in 60 s",
        "something else",
    ]


def test_what_is_counted_is_told_at_the_end(desk: Desk) -> None:
    for _ in range(FIRST + 1):
        desk.logger.error("broken")
    desk.handler.close()
    assert desk.kept.lines[-1] == "broken ... happened 1 more times in 60 s"


def test_what_differs_in_anything_but_its_time_is_another_kind(desk: Desk) -> None:
    for number in range(10):
        desk.logger.warning("job fails", extra={"job_id": f"job-{number}"})
    assert len(desk.kept.lines) == 10


def test_exceptions_of_one_place_are_one_kind_whatever_they_say(desk: Desk) -> None:
    for number in range(50):
        try:
            raise ValueError(number)
        except ValueError:
            desk.logger.exception("defect")
    assert len(desk.kept.lines) == FIRST


def test_the_kinds_that_are_remembered_are_bounded(desk: Desk) -> None:
    for number in range(3 * MOST_KINDS):
        desk.logger.warning("kind", extra={"number": number})
    assert len(desk.handler._seen) == MOST_KINDS
