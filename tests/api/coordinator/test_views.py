"""What people see of other parties' words."""

from __future__ import annotations

from api.coordinator import submission
from api.coordinator.views import MAX_REASON_CHARACTERS, printable
from tests.api.conftest import House


def test_words_of_another_party_are_shown_on_one_line_bounded_and_harmless() -> None:
    assert printable("the policy allows  nothing\n today") == "the policy allows nothing today"
    assert printable("\x1b]0;owned\x07 \x1b[2J\u202e") == "?]0;owned? ?[2J?"
    assert len(printable("x" * 5000)) == MAX_REASON_CHARACTERS
    assert printable("x" * 5000).endswith("...")
    assert printable("x" * MAX_REASON_CHARACTERS) == "x" * MAX_REASON_CHARACTERS


def test_a_refusal_in_a_job_is_shown_that_way(house: House) -> None:
    view = house.submit(house.task(), 5)
    house.jobs.set_batches(view.job_id, [(0, "1" * 64, "2" * 64)])
    house.jobs.change(view.job_id, "collecting", expected={"queued"})
    house.jobs.set_asked(view.job_id, 0)
    house.jobs.report_refusal(view.job_id, 0, "north", "no\x1b[2J " + "x" * 1900, True)
    shown = submission.read_job(view.job_id, stores=house.stores).rounds[0].refused["north"]
    assert shown.startswith("no?[2J xxx")
    assert len(shown) == MAX_REASON_CHARACTERS
