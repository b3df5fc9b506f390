"""Private evaluation: its price, its question, its cells against brute force, and what its intervals cover."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.errors import BadData
from labeler.evaluation import Evaluation, area_under, choose_bands, choose_layout, say, share
from labeler.methods.evaluate import LAYOUTS, Layout, Scored, edges_of, even_edges
from labeler.methods.sensitivity import largest_change, squared_sensitivity
from labeler.planning import price
from labeler.privacy_card import card_in_words, joined_cards, privacy_card
from tests.labeler.tasks import make_task
from tests.oracles import evaluation as oracle

NAMES = ("a", "b", "c")


task = partial(
    make_task, classes=NAMES, method="evaluate", sigma_votes=40.0, delta=1e-05, max_queries=60, colluding_agents=1
)


@pytest.mark.parametrize(
    "caps",
    [{}, {"max_agent_records": 7}, {"records_per_person": 3}, {"max_agent_records": 2, "records_per_person": 3}],
)
def test_an_evaluation_costs_what_reverse_knn_costs_with_k_1_whatever_the_model(caps: dict[str, int]) -> None:
    found, other = task(**caps), task(method="reverse-knn", **caps)
    for level in ("instance", "agent", *(("person",) if "records_per_person" in caps else ())):
        for cells in (1, 60):
            assert squared_sensitivity(found, level, cells) == squared_sensitivity(other, level, cells)
        assert largest_change(found, level) == largest_change(other, level)
        assert price(found).statement(level).epsilon == price(other).statement(level).epsilon


def test_the_price_is_golden() -> None:
    """One count moves by one vote: the exact Gaussian number of D = 1 at sigma 40, found with scipy."""
    stated = price(task()).instance
    assert squared_sensitivity(task(), "instance", 60) == 1
    assert stated.continuous_epsilon == pytest.approx(0.0749417, abs=1e-7)
    assert stated.continuous_epsilon <= stated.epsilon < 1.01 * stated.continuous_epsilon


@settings(max_examples=60)
@given(
    st.binary(min_size=1, max_size=4000),
    st.sampled_from([2, 3, 4, 7, 64, 1280]),
    st.sampled_from(LAYOUTS),
    st.integers(1, 8),
)
def test_a_model_travels_as_rows_that_pass_for_features(
    data: bytes, dimension: int, layout: Layout, bands: int
) -> None:
    one = Scored(data, even_edges(3, bands), layout)
    rows = one.rows(dimension, num_classes=3)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert np.abs(lengths - 2048).max() <= math.sqrt(dimension) / 2  # what rounding a unit vector can do
    assert rows.size * 3 // dimension >= math.prod(one.shape(3))
    back = Scored.of_rows(rows)
    assert (back.model, back.edges, back.layout) == (data, one.edges, layout)


def test_features_that_carry_no_model_are_refused() -> None:
    rng = np.random.default_rng(1)
    for rows in (rng.integers(-300, 300, (9, 16)), rng.integers(-30000, 30000, (9, 16)), np.zeros((3, 16))):
        with pytest.raises(BadData, match="carry a released model"):
            Scored.of_rows(rows.astype(np.int16))
    cut = Scored(bytes(5000), (), "bands").rows(16, num_classes=2)[:-3]
    with pytest.raises(BadData, match="carry a released model"):
        Scored.of_rows(cut)
    with pytest.raises(BadData, match="ascending"):
        Scored(b"m", (0.5, 0.5))
    with pytest.raises(BadData, match="between 0 and 1"):
        Scored(b"m", (float("nan"),))


RECORD = st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 0.34, 0.5, 0.75, 1.0, float("nan")]))


@settings(max_examples=100)
@given(st.lists(RECORD, max_size=12), st.sampled_from(LAYOUTS), st.sampled_from([(), (0.5,), (0.34, 0.5, 0.75)]))
def test_cells_are_those_of_brute_force_and_one_record_is_one_vote(
    records: list[tuple[int, int, float]], layout: Layout, edges: tuple[float, ...]
) -> None:
    asked = Scored(b"m", edges, layout)
    shape = asked.shape(3)

    def histogram(some: list[tuple[int, int, float]]) -> Any:
        truth, predicted = (np.array([one[at] for one in some], dtype=np.int64) for at in (0, 1))
        stated = np.array([one[2] for one in some], dtype=np.float64)
        cells = asked.cells(truth, predicted, stated, num_classes=3)
        return np.bincount(cells, minlength=math.prod(shape)).reshape(shape)

    whole = histogram(records)
    wanted = np.zeros(shape, dtype=np.int64)
    for cell, votes in oracle.count(layout, edges, 3, records).items():
        wanted[cell] = votes
    assert np.array_equal(whole, wanted)
    for gone in range(len(records)):
        change = whole - histogram(records[:gone] + records[gone + 1 :])
        assert np.square(change).sum() == 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=6))
def test_the_area_is_that_of_every_pair(bins: list[tuple[int, int]]) -> None:
    counts = np.array(bins, dtype=np.float64).T
    first, second = ([place for place, one in enumerate(row) for _ in range(int(one))] for row in counts)
    if first and second:
        assert area_under(counts) == pytest.approx(float(oracle.auroc(first, second)))


def world(layout: Layout, *, classes: int, bands: int, rare: float) -> Any:
    """Chances of each cell, shape (predicted, band, true): surer bands are more often right, one class is rare."""
    chances = np.zeros((classes, bands, classes))
    for truth in range(classes):
        for said in range(classes):
            right = said == truth
            chances[said, :, truth] = np.linspace(0.5, 3, bands) if right else np.linspace(2, 0.3, bands) / 5
        chances[:, :, truth] /= chances[:, :, truth].sum()
    return chances * np.array([1 - rare, *[rare / (classes - 1)] * (classes - 1)])


def laid_out(counts: Any, layout: Layout) -> Any:
    """A histogram (predicted, band, true) in another layout."""
    same = np.eye(len(counts))[:, None, :]
    of_right = np.stack([(counts * (1 - same)).sum(axis=0), (counts * same).sum(axis=0)])
    return {"confusion": counts, "classes": of_right, "bands": of_right.sum(axis=2)}[layout]


def evaluated(layout: Layout, counts: Any, sigma: float, names: tuple[str, ...] = ("a", "b")) -> Evaluation:
    """A model that three agents evaluated: a histogram whose second axis are the bands."""
    return Evaluation(Scored(b"m", even_edges(len(names), counts.shape[1]), layout), names, counts, sigma, 3)


def read(counts: Any, layout: Layout, sigma: float, *, classes: int) -> dict[str, Any]:
    found = evaluated(layout, counts, sigma, tuple(map(str, range(classes))))
    several = {"balanced": found.balanced_accuracy(), "auroc": found.auroc()}
    each = {f"recall {n}": one for n, one in enumerate(found.recall())}
    each |= {f"band {n}": one for n, one in enumerate(found.bands())}
    return {"accuracy": found.accuracy()} | {name: one for name, one in several.items() if one} | each


@pytest.mark.parametrize(
    ("layout", "classes", "records", "rare", "draws"),
    [
        ("confusion", 2, 4797, 0.3, 100),
        pytest.param("confusion", 2, 4797, 0.09, 1000, marks=pytest.mark.long),
        pytest.param("classes", 2, 4797, 0.4, 1000, marks=pytest.mark.long),
        pytest.param("classes", 5, 20_000, 0.5, 1000, marks=pytest.mark.long),
        pytest.param("bands", 10, 3000, 0.5, 1000, marks=pytest.mark.long),
    ],
)
def test_intervals_cover_what_they_say(
    layout: Layout, classes: int, records: int, rare: float, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """95 % intervals at the noise of epsilon 0.1, against both truths: of these records, and of all like them.

    A number fails where its share of draws lies below 0.93 by more than 4.5 binomial deviations: with 14 numbers and
    two intervals a false alarm has a chance below 1e-4 where 0.93 holds.
    """
    rng, sigma, bands = np.random.default_rng(5), 45.0, 5
    chances = world(layout, classes=classes, bands=bands, rare=rare)
    further = read(laid_out(chances * 1e9, layout), layout, 1e-9, classes=classes)
    hits: dict[str, list[tuple[bool, bool]]] = {}
    for _ in range(draws):
        counts = laid_out(rng.multinomial(records, chances.ravel()).reshape(chances.shape).astype(float), layout)
        monkeypatch.setattr("labeler.evaluation.DRAWS", 2)
        these = read(counts, layout, 1e-9, classes=classes)
        monkeypatch.setattr("labeler.evaluation.DRAWS", 400)
        noisy = counts + rng.normal(0, sigma, counts.shape)
        for name, one in read(noisy, layout, sigma, classes=classes).items():
            truths = (these[name].value, further[name].value)
            inside = [
                low - 1e-9 <= truth <= high + 1e-9
                for truth, (low, high) in zip(truths, (one.noise, one.sampling), strict=True)
            ]
            hits.setdefault(name, []).append((inside[0], inside[1]))
    for name, covered in hits.items():
        for share_of in np.mean(covered, axis=0):
            assert share_of >= 0.93 - 4.5 * math.sqrt(0.93 * 0.07 / draws), (name, covered)


def test_where_noise_drowns_a_share_nothing_is_said_of_it() -> None:
    one = share(3.0, 2.0, 10, 10, 45.0)
    assert one.is_drowned
    assert one.noise == one.sampling == (0.0, 1.0)
    counts = np.zeros((2, 2, 2))
    counts[0, :, 0] = 4000
    said = evaluated("confusion", counts, 45.0).to_json()
    assert [row["drowned"] for row in said["recall"]] == [False, True]
    assert said["balanced_accuracy"]["drowned"]
    assert said["auroc"]["drowned"]
    assert any("drowns 3 of 4 cells" in line for line in say(said))


def test_without_noise_a_share_is_wilsons() -> None:
    """Wilson 1927 for 81 of 263, as printed by every statistics package: 0.2553 to 0.3662."""
    assert share(81, 182, 1, 1, 0.0).sampling == pytest.approx((0.2553, 0.3662), abs=1e-3)


def test_an_interval_has_a_width_where_noise_takes_the_estimate_out_of_bounds() -> None:
    for right, wrong in ((1000.0, -60.0), (-60.0, 1000.0)):
        one = share(right, wrong, 10, 10, 5.0)
        assert one.value == float(right > wrong)
        for low, high in (one.noise, one.sampling):
            assert 0.005 < high - low < 0.1
    # More malignant images were found than there are: the area comes out above one.
    counts = np.array([[[500.0, -12.0], [460.0, -9.0]], [[20.0, 40.0], [20.0, 60.0]]])
    area = evaluated("confusion", counts, 5.0, ("benign", "malignant")).auroc()
    assert area is not None
    assert (area.value, area.noise[1], area.sampling[1]) == (1.0, 1.0, 1.0)
    assert 0.8 < area.sampling[0] <= area.noise[0] < 0.999


@pytest.mark.parametrize(("records", "sigma"), [(20_000, 60.0), (2000, 5.0), (800, 30.0)])
def test_each_number_lies_in_its_intervals_and_sampling_never_makes_one_narrower(records: int, sigma: float) -> None:
    rng = np.random.default_rng(8)
    for rare in (0.1, 0.5):
        chances = world("confusion", classes=2, bands=5, rare=rare)
        counts = rng.multinomial(records, chances.ravel()).reshape(chances.shape) + rng.normal(0, sigma, chances.shape)
        for name, one in read(counts, "confusion", sigma, classes=2).items():
            if not one.is_drowned:
                assert one.sampling[0] <= one.noise[0] <= one.value <= one.noise[1] <= one.sampling[1], name


def test_balanced_accuracy_is_the_mean_of_the_recalls_that_stand_beside_it() -> None:
    counts = np.array([[[1000.0, -60.0]], [[200.0, 560.0]]])  # of b noise finds more than there are
    found = evaluated("confusion", counts, 40.0)
    recalls = [one.value or 0.0 for one in found.recall()]
    assert recalls == [pytest.approx(1000 / 1200), 1.0]
    balanced = found.balanced_accuracy()
    assert balanced is not None
    assert balanced.value == pytest.approx(np.mean(recalls))


def test_the_layout_is_the_finest_that_noise_leaves_useful() -> None:
    assert choose_layout(2, sigma=45.0, records=4797) == "confusion"
    assert choose_layout(10, sigma=45.0, records=4797) == "bands"
    assert choose_layout(10, sigma=45.0, records=20_000) == "classes"
    assert choose_layout(10, sigma=1.0, records=4797) == "confusion"


def test_a_band_states_what_is_right_there_and_never_less_than_a_lower_one() -> None:
    counts = np.array([[300.0, 500.0, 400.0, 5.0], [700.0, 1500.0, 1100.0, 15.0]])
    # 0.70, 0.75, 0.733 (goes with 0.75), and 20 records, which noise drowns.
    (stated,) = evaluated("bands", counts, 20.0).recalibrated()
    assert stated == pytest.approx([0.7, *[2615 / 3520] * 3], abs=1e-4)
    (all_right,) = evaluated("bands", np.array([[0.0] * 4, [1000.0] * 4]), 20.0).recalibrated()
    assert all_right == pytest.approx([1 - 0.02 / 4] * 4)  # a quarter of the deviation of 1,000 records
    (beyond,) = evaluated("bands", np.array([[-300.0] * 4, [1000.0] * 4]), 20.0).recalibrated()
    assert all(0.99 < one < 1 for one in beyond)  # more right than there are
    (drowned,) = evaluated("bands", np.full((2, 4), 5.0), 20.0).recalibrated()
    assert len(set(drowned)) == 1


def test_of_two_classes_each_predicted_one_states_what_is_right_of_it() -> None:
    counts = np.array([[[900.0, 100.0], [1900.0, 100.0]], [[200.0, 300.0], [100.0, 300.0]]])
    found = evaluated("confusion", counts, 5.0)
    assert np.array(found.recalibrated()) == pytest.approx(np.array([[0.9, 0.95], [0.6, 0.75]]), abs=1e-3)
    rare = counts * np.array([1, 0.01])[:, None, None]  # hardly ever predicted: what is right of both stands for it
    first, second = evaluated("confusion", rare, 5.0).recalibrated()
    assert first == pytest.approx([0.9, 0.95], abs=1e-3)
    assert second == pytest.approx([0.9, 0.95], abs=5e-3)
    assert "for b" in "".join(say(found.to_json()))
    wrong = counts[:, :, ::-1] * np.array([0, 1])[:, None, None] + counts * np.array([1, 0])[:, None, None]
    assert len(evaluated("confusion", wrong, 5.0).recalibrated()) == 1  # said to be b, and mostly a


def test_there_are_as_many_bands_as_noise_leaves_useful() -> None:
    assert choose_bands(2, sigma=38.0, records=4797) == 3
    assert choose_bands(2, sigma=38.0, records=8000) == 5
    assert choose_bands(10, sigma=38.0, records=4797) == 5
    assert choose_bands(10, sigma=38.0, records=200) == 1


def test_edges_of_bands_are_quantiles_of_what_is_stated_of_public_images() -> None:
    assert edges_of(np.linspace(0.2, 1.0, 401), 5, 4) == pytest.approx((0.4, 0.6, 0.8))
    assert edges_of([], 2, 3) == even_edges(2, 3) == pytest.approx((2 / 3, 5 / 6))
    assert edges_of([1.0, 1.0, 1.0], 2, 3) == ()
    assert edges_of([0.9, 0.9, float("nan")], 2, 3) == (0.9,)


def test_the_card_of_a_measured_model_holds_only_against_whom_both_of_its_parts_hold() -> None:
    """A model whose noise the talliers added, or that counts on two colluders, and an evaluation that counts on one."""
    evaluated = privacy_card(task(), price(task()), is_seeded=False)
    same = joined_cards(evaluated, evaluated, confidence="c")
    assert same["holds_against"] == evaluated["holds_against"]
    assert same["guarantees"]["instance"]["epsilon"] == 2 * evaluated["guarantees"]["instance"]["epsilon"]
    for counted in ({"dishonest_talliers": 1, "colluding_agents": 2}, {"colluding_agents": 2}):
        asked = task(method="reverse-knn", agents=3, **counted)
        model = privacy_card(asked, price(asked), is_seeded=False, not_covered="Some are not.")
        for joined in (joined_cards(model, evaluated, confidence="c"), joined_cards(evaluated, model, confidence="c")):
            assert joined["colluding_agents"] == 1
            assert "dishonest_talliers" not in joined
            assert joined["not_covered"] == "Some are not."
            assert model["holds_against"] in joined["holds_against"]
            assert evaluated["holds_against"] in joined["holds_against"]
            assert "only against whom both hold" in card_in_words(joined)
