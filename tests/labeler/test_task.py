"""Tasks: what is refused, and what the digest covers."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labeler.errors import InvalidTask, UnsafeGrid
from labeler.methods.grid import MAX_WINNER_WIDTH
from labeler.methods.sensitivity import integer_event
from labeler.noise import MAX_COMPARISON_BITS, MIN_SHARE_SIGMA_GRID, DiscreteGaussian
from labeler.setting import LEVELS
from labeler.sharing import comparison_bits
from labeler.task import Task, parse_task

FIELDS: dict[str, object] = {
    "name": "digits",
    "method": "knn",
    "classes": ["zero", "one"],
    "k": 50,
    "sigma_votes": 25.0,
    "delta": 1e-4,
    "max_queries": 206,
    "agents": 3,
    "colluding_agents": 1,
}


TRAINING = {"min_records": 200, "regularisation": 0.05, "dimension": 10}
MODEL = {"method": "blind-average", "k": 1, "max_queries": 65, "training": TRAINING}
HEADS = MODEL | {"method": "aux-distill"}
LIFE = {"method": "reverse-knn", "k": 1, "lifetime_budget": {"budget_nano": 10**8, "least_similarity": 0}}
EVALUATE = {"method": "evaluate", "k": 1}
VOTER = {"method": "ensemble", "k": 1}


def task(**changes: object) -> Task:
    return parse_task(FIELDS | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sigma_votes": 0}, "sigma_votes: must be more than 0"),
        ({"sigma_votes": -1.0}, "sigma_votes: must be more than 0"),
        ({"sigma_votes": math.nan}, "sigma_votes: must be a finite number"),
        ({"sigma_votes": math.inf}, "sigma_votes: must be a finite number"),
        ({"delta": 0.0}, "delta: must be more than 0"),
        ({"delta": 1.0}, "delta: must be less than 1"),
        ({"delta": math.nan}, "delta: must be a finite number"),
        ({"k": 0}, "k: must be at least 1"),
        ({"classes": ["only"]}, "classes: must have at least 2 entries"),
        ({"classes": ["a", "a"]}, "classes must be different"),
        ({"colluding_agents": 3}, "too few agents for the collusion stated"),
        ({"colluding_agents": 2, "max_dropouts": 1}, "too few agents for the collusion stated"),
        ({"sigma": 3}, "sigma: unknown field"),
        ({"name": "x\x1b[2K harmless"}, "name: only printable characters"),
        ({"name": "one\nline more"}, "name: only printable characters"),
        ({"name": "right\u202eto left"}, "name: only printable characters"),
        ({"classes": ["a", "b\x07"]}, "classes.1: only printable characters"),
        ({"nonce": "\x00"}, "nonce: only printable characters"),
        ({"nonce": "a\tb"}, "nonce: only printable characters"),
        ({"method": "ensemble"}, "k must be 1"),
        ({"max_agent_records": 5}, "only means something for method reverse-knn"),
        ({"ballot_radius": 5}, "ballot_radius only means something for method reverse-knn"),
        ({"release": "winner", "talliers": 2}, "talliers must be 3 for release winner"),
        ({"abstain_below": 5}, "abstain_below only means something for release winner"),
        ({"release": "winner", "abstain_below": -1}, "abstain_below: must be at least 0"),
        ({"attributes_per_record": 2, "release": "winner"}, "release must be histogram with attributes_per_record"),
        ({"attributes_per_record": 2, "method": "reverse-knn"}, "only means something for method knn"),
        ({"attributes_per_record": 0}, "attributes_per_record"),
        (MODEL | {"release": "winner"}, "release must be histogram for method blind-average"),
        (MODEL | {"k": 2}, "k must be 1"),
        (HEADS | {"training": TRAINING | {"score_share": 1}}, "training.score_share: must be less than 1: labels come"),
        (HEADS | {"training": TRAINING | {"score_share": -0.1}}, "training.score_share: must be at least 0"),
        (HEADS | {"training": TRAINING | {"score_share": 5e-324}}, "score_share: must be 0, or at least 1e-60"),
        (MODEL | {"training": None}, "training must be given"),
        (MODEL | {"grid_scale": 5}, "grid_scale follows"),
        (MODEL | {"method": "knn"}, "training must not be given"),
        (MODEL | {"method": "ensemble"}, "training.learner must be linear or network or adapted for method ensemble"),
        (MODEL | {"training": {"learner": "network"}}, "learner must be softmax or svm or logistic or means for"),
        (HEADS | {"training": TRAINING | {"learner": "svm"}}, "learner must be softmax for method aux-distill"),
        ({"training": {"learner": "linear"}}, "training must not be given for method knn"),
        (VOTER | {"training": {"learner": "network", "min_records": 5}}, "min_records means nothing for learner net"),
        (VOTER | {"training": {"learner": "adapted", "axes": 2}}, "axes means nothing for learner adapted, which trai"),
        (VOTER | {"training": {"learner": "linear", "radius": 2.0}}, "radius means nothing for learner linear"),
        (VOTER | {"training": {"learner": ["network"]}}, "training.learner"),
        (
            VOTER | {"attributes_per_record": 2, "release": "winner"},
            "release must be histogram with attributes_per_rec",
        ),
        (HEADS | {"max_queries": 50}, "training.dimension must be below the 10 public negatives"),
        (MODEL | {"training": TRAINING | {"min_records": 0}}, "training.min_records"),
        (MODEL | {"training": TRAINING | {"regularisation": math.nan}}, "training.regularisation"),
        (MODEL | {"training": TRAINING | {"momentum": 1}}, "training.momentum: unknown field"),
        (EVALUATE | {"release": "winner"}, "release must be histogram"),
        (
            EVALUATE | {"lifetime_budget": LIFE["lifetime_budget"]},
            "lifetime_budget only means something for method reverse-knn",
        ),
        (EVALUATE | {"attributes_per_record": 2}, "attributes_per_record only means something"),
        (LIFE | {"method": "knn"}, "of knn nobody has proved"),
        (LIFE | {"max_agent_records": 100}, "a budget of its own"),
        (LIFE | {"records_per_person": 2}, "a budget of its own"),
        (
            LIFE | {"lifetime_budget": {"budget_nano": 9, "least_similarity": 0, "asked_classes": ["c"]}},
            "classes of the task",
        ),
        (LIFE | {"ballot_radius": 10}, "every count of an agent moves"),
        (LIFE | {"lifetime_budget": {"budget_nano": 0, "least_similarity": 0.5}}, "budget_nano"),
        (LIFE | {"lifetime_budget": {"budget_nano": 5, "least_similarity": 1.5}}, "least_similarity"),
        ({"dishonest_talliers": 1, "talliers": 2}, "talliers must be 3 where they add the noise"),
        ({"dishonest_talliers": 3}, "dishonest_talliers"),
        ({"dishonest_talliers": 0}, "dishonest_talliers"),
        ({"dishonest_talliers": 1, "max_dropouts": 3}, "at least one agent must contribute"),
        ({"dishonest_talliers": 1, "colluding_agents": 4}, "no more can collude than there are"),
        (HEADS | {"dishonest_talliers": 1}, "its noise is in the model from which each agent answers"),
    ],
)
def test_a_field_out_of_bounds_is_refused_in_a_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidTask, match=r"^task refused: ") as refusal:
        task(**changes)
    assert said in str(refusal.value)


def test_a_grid_too_coarse_to_prove_anything_is_refused() -> None:
    with pytest.raises(UnsafeGrid, match="Leave grid_scale out, or set it to 6 or more"):
        task(grid_scale=5)
    assert task(grid_scale=6).share_sigma_grid >= MIN_SHARE_SIGMA_GRID


def test_a_grid_finer_than_the_sampler_is_refused() -> None:
    with pytest.raises(UnsafeGrid, match="the exact sampler reaches 100000"):
        task(grid_scale=2**20)


def test_a_sum_that_could_wrap_is_refused() -> None:
    with pytest.raises(UnsafeGrid, match="could reach"):
        task(sigma_votes=0.001, agents=1_000_000, k=1_000_000)


def test_the_noise_of_colluders_and_dropouts_is_made_up_for_by_the_others() -> None:
    agreed = task(agents=10, colluding_agents=2, max_dropouts=3)
    assert agreed.noise_contributors == 5
    assert agreed.quorum == 7
    assert agreed.share_sigma_grid * math.sqrt(5) / agreed.scale == pytest.approx(25.0)
    assert agreed.total_sigma_votes == pytest.approx(25.0 * math.sqrt(2))


@pytest.mark.parametrize(
    "changes",
    [
        {field: value}
        for field, value in {"name": "x", "k": 51, "sigma_votes": 25.5, "delta": 1e-5, "nonce": "n"}.items()
    ]
    + [{"classes": ["one", "zero"]}, {"release": "winner"}, {"talliers": 2}, {"grid_scale": 29}]
    + [{"release": "winner", "abstain_below": votes} for votes in (0, 1)],
)
def test_every_field_moves_the_digest(changes: dict[str, object]) -> None:
    assert task(**changes).digest != task().digest


def test_tasks_that_differ_in_name_and_nonce_alone_are_of_one_kind() -> None:
    assert task(name="another", nonce="x").kind == task().kind
    assert task(k=task().k + 1).kind != task().kind
    first = task()
    assert first.kind != first.model_copy(update={"max_queries": first.max_queries + 1}).kind


def test_a_linear_head_is_asked_for_by_naming_it_or_nothing_and_other_learners_are_other_tasks() -> None:
    plain = task(**VOTER)
    named = task(**VOTER, training={"learner": "linear"})
    assert (named, named.digest, named.training) == (plain, plain.digest, None)
    assert "training" not in json.loads(named.model_dump_json(exclude_none=True))
    found = {learner: task(**VOTER, training={"learner": learner}) for learner in ("network", "adapted")}
    assert len({plain.digest, *(one.digest for one in found.values())}) == 3
    for one in found.values():
        assert parse_task(json.loads(one.model_dump_json())).digest == one.digest
        assert parse_task(one.model_dump()) == one
        # A vote is a vote: the price, with its event, is that of the linear head.
        for level in LEVELS:
            assert integer_event(one, level, 10) == integer_event(plain, level, 10)


def test_a_changed_copy_has_its_own_grid_and_digest() -> None:
    original = task()
    before = (original.scale, original.digest)
    copy = original.model_copy(update={"sigma_votes": 1.0})
    assert (copy.scale, copy.digest) == (task(sigma_votes=1.0).scale, task(sigma_votes=1.0).digest)
    assert (original.scale, original.digest) == before


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("records_per_person", {"records_per_person": 2}),
        ("attributes_per_record", {"attributes_per_record": 1}),
        ("ballot_radius", {"method": "reverse-knn", "ballot_radius": 2}),
        ("lifetime_budget", LIFE),
        ("dishonest_talliers", {"dishonest_talliers": 1}),
    ],
)
def test_a_later_field_is_written_and_hashed_only_where_it_is_given(field: str, given: dict[str, object]) -> None:
    asked, plain = task(**given), task(**given | {field: None})
    assert field not in plain.model_dump(mode="json")
    assert asked.digest != plain.digest
    for one in (asked, plain):
        assert parse_task(one.model_dump(mode="json")) == one
        assert parse_task(one.model_dump(mode="json")).digest == one.digest


@pytest.mark.parametrize(
    ("changes", "digest", "written"),
    [
        (
            {},
            "133772627de08e5a29a981fb0c4f0e7560bbef638b19f4098e7595e2bfb12e58",
            "81a1dba508e9309081c66e26d61d25c210740e340aaea0fd21079ee3e891522a",
        ),
        (
            {"release": "winner"},
            "49b6196eca9b1adce1cd6e574d070328ad4e55887506b53fc2f4f64c9e09a4d8",
            "ec114944baf004d1ca7ca4efae29fb31b6de87be6a66d9abb5464a9760907e4a",
        ),
        (
            {"method": "blind-average", "k": 1, "training": TRAINING},
            "c20f7935898a639e1f82fd34d134b20e046161ac6c6b137ec0965d71a33ede3c",
            "ea48db2d91ce3eb002b695567fe5657c32c7f9fedd555774ca30893c5fdc02f5",
        ),
    ],
)
def test_a_task_that_does_not_bound_records_of_a_person_is_written_and_hashed_as_before_it_could(
    changes: dict[str, object], digest: str, written: str
) -> None:
    """Written down when tasks had no `records_per_person`: parties of that version must read the same bytes."""
    found = task(**changes)
    text = json.dumps(found.model_dump(mode="json"), sort_keys=True)
    assert (found.digest, hashlib.sha256(text.encode()).hexdigest()) == (digest, written)


@given(
    agents=st.integers(1, 1000),
    honest=st.floats(0.01, 1),
    k=st.integers(1, 500),
    sigma=st.floats(0.05, 500),
    method=st.sampled_from(["knn", "reverse-knn"]),
    max_agent_records=st.none() | st.integers(1, 10_000),
)
def test_a_winner_has_a_field_wherever_any_grid_that_is_fine_enough_gives_one(
    agents: int, honest: float, k: int, sigma: float, method: str, max_agent_records: int | None
) -> None:
    """And the range of its terms holds the largest and the smallest sum there can be."""
    fields: dict[str, object] = {
        "agents": agents, "colluding_agents": min(agents - 1, int(agents * (1 - honest))), "k": k, "sigma_votes": sigma,
        "method": method, "release": "winner", "max_agent_records": max_agent_records if method != "knn" else None,
    }  # fmt: skip
    try:
        found = task(**fields)
    except UnsafeGrid:
        h = agents - int(str(fields["colluding_agents"]))
        coarsest = math.ceil(MIN_SHARE_SIGMA_GRID / (sigma / math.sqrt(h)))
        for scale in (coarsest, coarsest + 1):
            with pytest.raises(UnsafeGrid):
                task(**fields, grid_scale=scale)
        return
    terms = found.winner_terms
    assert terms is not None
    assert found.share_sigma_grid >= MIN_SHARE_SIGMA_GRID
    reach = DiscreteGaussian(found.share_sigma_grid).reach
    votes = k if method == "knn" else found.vote_clip
    assert votes is not None
    assert votes >= 1
    assert terms.highest == agents * (votes * found.scale + reach)
    assert terms.lowest == -agents * reach
    assert comparison_bits(terms.lowest, terms.highest) <= MAX_COMPARISON_BITS


def test_the_grid_of_a_winner_is_the_histograms_where_it_fits_and_coarser_where_not() -> None:
    assert task(release="winner").scale == task().scale
    many = task(release="winner", agents=100, colluding_agents=0)
    assert MIN_SHARE_SIGMA_GRID < many.share_sigma_grid < 500
    assert many.winner_terms is not None
    with pytest.raises(UnsafeGrid, match="can be computed securely up to 2097150") as refusal:
        task(release="winner", agents=800)
    assert "larger sigma_votes, fewer agents, a smaller k, or release the histogram" in str(refusal.value)
    with pytest.raises(UnsafeGrid, match="smaller sigma_votes, fewer agents, no grid_scale, or release the histogram"):
        task(release="winner", method="reverse-knn", sigma_votes=90_000, grid_scale=1)


def test_a_clip_is_the_largest_that_fits_or_the_bound_of_the_task() -> None:
    reverse = task(release="winner", method="reverse-knn", k=1, sigma_votes=3.6, colluding_agents=0)
    assert reverse.vote_clip is not None
    assert reverse.vote_clip > 800
    assert reverse.winner_terms is not None
    assert reverse.winner_terms.row_total is None
    assert reverse.winner_terms.highest - reverse.winner_terms.lowest + 3 * reverse.scale > MAX_WINNER_WIDTH
    capped = reverse.model_copy(update={"max_agent_records": 50})
    assert capped.vote_clip == 50


def test_the_threshold_is_in_votes_and_its_terms_in_grid_units() -> None:
    agreed = task(release="winner", abstain_below=7)
    assert agreed.winner_terms is not None
    assert agreed.winner_terms.threshold == 7 * agreed.scale
    assert agreed.winner_terms.row_total == agreed.k
    assert task().winner_terms is None


def test_more_agents_than_can_add_the_noise_of_winners_are_told_the_number_and_what_to_do() -> None:
    fields = {
        "name": "t", "classes": ["a", "b"], "method": "ensemble", "k": 1, "delta": 1e-5, "max_queries": 10,
        "release": "winner",
    }  # fmt: skip
    for sigma in (1.0, 25.0, 400.0, 1e5):
        with pytest.raises(UnsafeGrid, match=r"No more than 838 agents .* reaches 1250 .* Use dishonest_talliers = 1"):
            _ = parse_task(fields | {"agents": 839, "sigma_votes": sigma}).scale
    # It is a floor: below it some noise does, and above it the talliers' does.
    assert parse_task(fields | {"agents": 820, "sigma_votes": 2870.0}).winner_terms is not None
    assert parse_task(fields | {"agents": 100_000, "sigma_votes": 25.0, "dishonest_talliers": 1}).scale == 6


@pytest.mark.parametrize("field", ["colluding_agents", "max_dropouts"])
def test_no_refusal_of_a_task_repeats_a_number_of_thousands_of_digits(field: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        parse_task(FIELDS | {field: 10**4000})
    assert len(str(refused.value)) < 300
