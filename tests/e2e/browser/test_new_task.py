"""The form that makes a task, in a real browser: votes for life, ballots on a ball and noise by talliers, priced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from api.client import Client
from api.schema import TaskRequest
from labeler.caps import CapsTable
from labeler.ledger.chain import Head
from tests.api.routes.conftest import (
    AGENTS,
    CLASSES,
    FINGERPRINT,
    ConfigOf,
    ServeIn,
    redis_url,
    serve_at_socket,
    socket_config_of,
)
from tests.e2e.browser.conftest import in_both_widths_and_schemes

__all__ = ["redis_url", "serve_at_socket", "socket_config_of"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url_and_token(
    socket_config_of: ConfigOf, serve_at_socket: ServeIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A coordinator that has set something aside for votes for life; its agents have told what they hold."""
    caps = CapsTable(instance_epsilon=3.0, agent_epsilon="unlimited", life_epsilon=1.0)
    config = socket_config_of(tmp_path_factory.mktemp("new-task") / "home")
    facts = {"classes": list(CLASSES), "backbone_fingerprint": FINGERPRINT, "dimension": 64}
    with serve_at_socket(config.model_copy(update={"federation": caps, "agents": caps})) as service:
        for agent in AGENTS:
            service.coordinator.stores.parties.contact(agent, datetime.now(UTC), facts, Head(1, "a" * 64))
        yield service.url, service.tokens["admin"]


def form(page: Page, url: str, token: str) -> None:
    page.goto(f"{url}/dashboard#token={token}")
    page.get_by_role("link", name="New job").click()
    page.locator("#new-task > summary").click()
    page.locator("#task-form details > summary").first.click()
    page.get_by_label("Name", exact=True).fill("for life")
    page.get_by_label("Questions, at most").fill("20")


def test_a_task_for_life_is_priced_warned_of_refused_at_its_field_and_made(
    open_page: Callable[..., Any], url_and_token: tuple[str, str]
) -> None:
    url, token = url_and_token
    visit = open_page("about:blank", width=1400)
    page = visit.page
    form(page, url, token)
    price = page.locator("#task-price")
    method = page.get_by_label("How agents answer")
    expect(method).to_have_value("reverse-knn")
    method.select_option("knn")
    for hidden in ("Radius of an agent's ballot", "Images pay for their votes", "Epsilon of an image's whole life"):
        expect(page.get_by_label(hidden)).to_be_hidden()
    method.select_option("reverse-knn")

    # Of attributes an image may have several, where its nearest images vote and every count is opened.
    attributes = page.get_by_label("Attributes of an image that vote")
    expect(attributes).to_be_hidden()
    method.select_option("knn")
    one_class = price.inner_text()
    attributes.fill("3")
    expect(price).not_to_have_text(one_class)
    page.get_by_label("What is opened").select_option("winner")
    expect(attributes).to_be_hidden()
    page.get_by_label("What is opened").select_option("histogram")
    attributes.fill("")
    method.select_option("reverse-knn")

    # A ball gives a whole agent a price that it otherwise has not.
    expect(price).to_contain_text("no bound")
    page.get_by_label("Radius of an agent's ballot").fill("3")
    expect(price).not_to_contain_text("no bound")

    page.get_by_label("Images pay for their votes").select_option("life")
    expect(page.get_by_label("Radius of an agent's ballot")).to_be_hidden()
    expect(page.get_by_label("Images of one person")).to_be_hidden()
    expect(page.locator("#task-noise-words")).to_have_text("Noise, in votes (sigma)")
    expect(price).to_contain_text("how similar a question has to be")
    page.get_by_label("Noise, in votes").fill("20")
    page.get_by_label("Questions an image votes at").fill("1")
    page.get_by_label("An image votes where").fill("0.4")
    expect(price).to_contain_text("votes under this noise for its whole life")
    expect(price).to_contain_text("of all jobs of votes for life")
    expect(price.locator(".note")).to_have_count(0)  # a price for what was typed before may have had one
    assert visit.axe_problems() == []

    # One job that may take much of an image's life is warned of, as sites may refuse it.
    page.get_by_label("Questions an image votes at").fill("14")
    expect(price.locator(".note").first).to_contain_text(
        re.compile(r"casts up to 14 .* One job may take [45]\d(\.\d)? % of its life, and sites may refuse that"),
    )
    page.get_by_label("Questions an image votes at").fill("1")

    # What is wrong with a field inside is told at that field.
    page.get_by_label("An image votes where").fill("7")
    page.get_by_role("button", name="Make the task").click()
    expect(page.locator("#task-similarity-error")).to_be_visible()
    page.get_by_label("An image votes where").fill("0.4")
    page.get_by_label("Epsilon of an image's whole life").fill("2")
    page.get_by_role("button", name="Make the task").click()
    expect(page.locator("#task-error")).to_contain_text(
        "for the life of an image, but the federation has set aside",
    )
    page.get_by_label("Epsilon of an image's whole life").fill("0.9")
    page.get_by_label("Who adds the noise").select_option("1")
    expect(price).to_contain_text("Should two talliers pool what they know")
    page.get_by_role("button", name="Make the task").click()
    expect(page.locator("#job-task option:checked")).to_contain_text("for life")
    with Client(url, token) as client:
        made = next(one for one in client.tasks() if one.task["name"] == "for life")
    assert made.task["dishonest_talliers"] == 1
    assert made.task["lifetime_budget"]["least_similarity"] == 0.4
    assert made.price.instance_epsilon == pytest.approx(0.9, rel=1e-2)
    assert visit.script_errors == []


def test_a_task_that_evaluates_a_model_is_not_offered_for_images(
    open_page: Callable[..., Any], url_and_token: tuple[str, str]
) -> None:
    url, token = url_and_token
    with Client(url, token) as client:
        for name, method in (("of images", "reverse-knn"), ("of a model", "evaluate")):
            client.create_task(TaskRequest(name=name, method=method, epsilon=0.1, delta=1e-5, max_queries=20))
    page = open_page("about:blank", width=1400).page
    page.goto(f"{url}/dashboard#token={token}")
    page.get_by_role("link", name="New job").click()
    tasks = page.locator("#job-task")
    expect(tasks).to_contain_text("of images")
    expect(tasks).not_to_contain_text("of a model")


@in_both_widths_and_schemes()
def test_the_form_for_life_reads_in_both_themes_and_widths(
    open_page: Callable[..., Any],
    url_and_token: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    width: int,
    scheme: str,
) -> None:
    visit = open_page("about:blank", width=width, scheme=scheme)
    page = visit.page
    form(page, *url_and_token)
    page.get_by_label("Images pay for their votes").select_option("life")
    page.get_by_label("Questions an image votes at").fill("5")
    page.get_by_label("Noise, in votes").fill("10")
    page.get_by_label("An image votes where").fill("0.4")
    expect(page.locator("#task-price .note").first).to_be_visible()
    visit.keep(Path(tmp_path_factory.getbasetemp()), f"task-for-life-{width}-{scheme}")
    assert visit.axe_problems() == []
    assert visit.naming_problems() == []
    assert visit.overflow_px() <= 0


@pytest.fixture(scope="module")
def nearly_spent(
    socket_config_of: ConfigOf, serve_at_socket: ServeIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, str, str]]:
    """A coordinator with little left, and tasks with room for fewer questions than a form begins with."""
    caps = CapsTable(instance_epsilon=0.3, agent_epsilon="unlimited")
    config = socket_config_of(tmp_path_factory.mktemp("nearly-spent") / "home")
    facts = {"classes": list(CLASSES), "backbone_fingerprint": FINGERPRINT, "dimension": 64}
    with serve_at_socket(config.model_copy(update={"federation": caps, "agents": caps})) as service:
        for agent in AGENTS:
            service.coordinator.stores.parties.contact(agent, datetime.now(UTC), facts, Head(1, "a" * 64))
        with Client(service.url, service.tokens["admin"]) as client:
            wanted = {"method": "knn", "delta": 1e-5, "k": 1}
            dear = client.create_task(TaskRequest(name="dear", epsilon=0.5, max_queries=40, **wanted))
            short = client.create_task(TaskRequest(name="short", epsilon=0.1, max_queries=12, **wanted))
        yield service.url, service.tokens["admin"], dear.task_id, short.task_id


@in_both_widths_and_schemes(quick=2)
def test_what_a_form_holds_when_it_opens_can_be_sent(
    open_page: Callable[..., Any],
    nearly_spent: tuple[str, str, str, str],
    screenshots: Path,
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    url, token, dear, short = nearly_spent
    visit = open_page("about:blank", width=width, scheme=scheme)
    page = visit.page
    page.goto(f"{url}/dashboard#token={token}")
    page.get_by_role("link", name="New job").click()
    price, questions = page.locator("#job-price"), page.get_by_label("How many questions")

    # A task has 12 questions left, the budgets cover fewer than 20, and three images are no more than three questions.
    page.locator("#job-task").select_option(short)
    expect(questions).to_have_value("12")
    expect(price).to_contain_text("The budgets cover it")
    page.locator("#job-task").select_option(dear)
    expect(questions).to_have_value(re.compile(r"^1?\d$"))
    expect(price).to_contain_text(f"{questions.input_value()} questions")
    expect(price).to_contain_text("The budgets cover it")
    visit.keep(screenshots, f"prefilled-job-{width}-{scheme}")
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"a picture")
    page.locator("#job-files").set_input_files([tmp_path / f"{number}.png" for number in range(3)])
    expect(questions).to_have_value("3")
    # What somebody types stays, also where it is refused.
    questions.fill("19")
    expect(price).to_contain_text("It would be refused")
    expect(price).to_contain_text(re.compile(r"Ask at most 1\d questions, or make a task with more noise"))
    expect(questions).to_have_value("19")

    page.locator("#new-task > summary").click()
    task = page.locator("#task-price")
    noise = page.locator("#task-noise")
    assert float(noise.input_value()) <= 0.3
    expect(task).to_contain_text("The budgets cover it")
    page.get_by_label("Set by").select_option("the noise")
    expect(task).to_contain_text("The budgets cover it")
    assert float(noise.input_value()) > 1
    visit.keep(screenshots, f"prefilled-task-{width}-{scheme}")
    assert visit.axe_problems() == []
    assert visit.overflow_px() <= 0
    assert visit.script_errors == []
