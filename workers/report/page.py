"""report.html: one page without scripts that loads nothing, not even from the same folder.

The template holds the words and the look; this module prepares what it fills in. Jinja2 escapes every
value, because class names and file names come from strangers, and the page's content security policy
forbids scripts and requests in case something slips through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from labeler.epsilon_words import say_epsilon, say_estimate
from labeler.jobs import AnswerStatus
from workers.report import thumbnails, words
from workers.report.canvas import OTHER_COLOR, Picture, class_colors
from workers.report.model import AnsweredQuery, JobReport

_MOST_BARS = 12
_MOST_CLASSES = 30
_OPEN_TILES = 48

STATUS_WORDS = {
    AnswerStatus.ANSWERED: "answered",
    AnswerStatus.ABSTAINED: "too unclear",
    AnswerStatus.REFUSED_BUDGET: "budget spent",
    AnswerStatus.FAILED_QUORUM: "agents missing",
}


def render_page(report: JobReport, pictures: dict[str, Picture]) -> str:
    """The page as text; `pictures` as from `draw_pictures`."""
    environment = Environment(
        loader=PackageLoader("workers", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": words.say_percent, "count": words.count}
    shown = thumbnails.choose(report)
    tallest = _tallest(report, [query for _, query in shown])
    tiles = [_tile(report, number, query, tallest) for number, query in shown]
    return environment.get_template("report.html.j2").render(
        report=report,
        pictures=pictures,
        headline=words.headline(report),
        warnings=words.all_warnings(report),
        cards=_cards(report),
        tiles=tiles,
        open_tiles=tiles[:_OPEN_TILES],
        folded_tiles=tiles[_OPEN_TILES:],
        has_truth=report.label_accuracy is not None,
        has_groups=any(query.group_size > 1 for query in report.queries),
        has_bars=tallest > 0,
        delta=words.say_delta(report.privacy.delta),
        classes=_class_rows(report),
        meaning=words.what_epsilon_means(report),
        price_rows=_price_rows(report),
        price_lines=(*words.noise_in_words(report.task), *words.without_a_bound(report), *report.notes),
        kept=words.never_revealed(report),
        released=words.was_released(report),
        curve=[
            (say_estimate(point.epsilon, digits=3), words.say_percent(point.accuracy), point) for point in report.curve
        ],
        references=[
            (say_estimate(point.epsilon, digits=3), words.say_percent(point.accuracy), point.name)
            for point in report.references
        ],
        settings=_settings(report),
    )


def _cards(report: JobReport) -> list[dict[str, str]]:
    price, agent = report.privacy.instance, report.privacy.agent
    cards = [
        {
            "name": "epsilon, one image",
            "figure": say_epsilon(price.epsilon),
            "unit": f"at delta {words.say_delta(report.privacy.delta)}" if price.epsilon is not None else price.reason,
        },
        {
            "name": "questions labelled",
            "figure": f"{report.answered:,}",
            "unit": f"of {len(report.queries):,} asked about {words.count(report.public_images, 'public image')}",
        },
    ]
    if report.label_accuracy is not None:
        right, known = report.scored
        unit = f"{right:,} of {known:,} with a known truth"
        cards.append({"name": "labels right", "figure": words.say_percent(report.label_accuracy), "unit": unit})
    if report.student is not None and report.student.accuracy is not None:
        tested = f" on {words.count(report.student.test_images, 'unseen image')}" if report.student.test_images else ""
        figure = words.say_percent(report.student.accuracy)
        cards.append({"name": "student right", "figure": figure, "unit": f"{report.student.kind}{tested}"})
    cards.append(
        {
            "name": "agents took part",
            "figure": f"{report.contributors:,}",
            "unit": f"of {report.task.agents:,}; {report.task.quorum:,} needed",
        }
    )
    if (person := report.privacy.person) is not None:
        most = words.count(report.privacy.records_per_person or 1, "image")
        unit = person.reason or f"all images of one person at one agent, of which at most {most} vote"
        cards.append({"name": "epsilon, one person", "figure": say_epsilon(person.epsilon), "unit": unit})
    cards.append(
        {
            "name": "epsilon, whole agent",
            "figure": say_epsilon(agent.epsilon),
            # The first half says what is missing; the whole of it stands where the price is explained.
            "unit": agent.reason.split(";")[0] or "everything one agent sent",
        }
    )
    return cards


def _tile(report: JobReport, number: int, query: AnsweredQuery, tallest: float) -> dict[str, Any]:
    images = [thumbnails.open_picture(png, query.query_id) for png in query.thumbnails[: thumbnails.MAX_PER_QUERY]]
    answered = query.status is AnswerStatus.ANSWERED
    mark = {True: "right", False: "wrong", None: "unmarked" if answered else "none"}[query.is_right]
    name = report.class_name(query.label) if answered else "no label"
    said = f"answered {name}" if answered else STATUS_WORDS[query.status]
    truth = report.class_name(query.truth) if query.truth is not None and mark in ("wrong", "none") else None
    what = "image asked about" if query.group_size == 1 else f"one of {query.group_size:,} images asked about"
    return {
        "number": number,
        "images": [
            {
                "uri": thumbnails.data_uri(image),
                "alt": f"Question {number}, {what}, {query.source}: {said}",
                "is_tiny": thumbnails.is_tiny(image),
                "width": image.width,
                "height": image.height,
            }
            for image in images
        ],
        "mark": mark,
        "name": name,
        "truth": truth,
        "source": query.source,
        "group_size": query.group_size,
        "why": None if answered else STATUS_WORDS[query.status],
        "bars": _bars(query, tallest) if tallest else [],
        "answer_place": query.label,
    }


def _tallest(report: JobReport, queries: list[AnsweredQuery]) -> float:
    """The most votes any class has in the released sums shown, the common scale of all bars; 0 for no bars."""
    if report.task.num_classes > _MOST_BARS:
        return 0.0
    return max([0.0, *(float(query.noisy_votes.max()) for query in queries if query.noisy_votes is not None)])


def _bars(query: AnsweredQuery, tallest: float) -> list[float]:
    """Heights in percent of the released noisy votes; noise below zero shows as none."""
    if query.noisy_votes is None:
        return []
    heights: list[float] = np.round(4 + 96 * np.clip(query.noisy_votes / tallest, 0, 1), 1).tolist()
    return heights


def _class_rows(report: JobReport) -> dict[str, Any]:
    """The most frequent released labels with their counts, and how many classes are left out."""
    labels = np.array([query.label for query in report.queries])
    counts = np.bincount(labels[labels >= 0], minlength=report.task.num_classes)
    right = np.array([query.is_right is True for query in report.queries])
    known = np.array([query.is_right is not None for query in report.queries])
    right_counts = np.bincount(labels[right], minlength=report.task.num_classes)
    known_counts = np.bincount(labels[known], minlength=report.task.num_classes)
    order = np.argsort(-counts, kind="stable")[:_MOST_CLASSES]
    if report.task.num_classes <= _MOST_CLASSES:
        order = np.arange(report.task.num_classes)
    colors = class_colors(labels.tolist(), report.task.num_classes)
    most = max(1, int(counts.max()))
    rows = [
        {
            "name": report.class_name(label),
            "color": colors.get(label, OTHER_COLOR),
            "count": int(counts[label]),
            "width": round(100 * int(counts[label]) / most, 1),
            "right": f"{right_counts[label]:,} of {known_counts[label]:,}" if known_counts[label] else "–",
        }
        for label in order.tolist()
    ]
    return {"rows": rows, "left_out": report.task.num_classes - len(rows)}


def _price_rows(report: JobReport) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "instance": (say_epsilon if row.is_reported else say_estimate)(row.instance_epsilon, digits=5),
            "agent": (say_epsilon if row.is_reported else say_estimate)(row.agent_epsilon, digits=5),
            "is_reported": row.is_reported,
        }
        for row in report.privacy.breakdown
    ]


def _settings(report: JobReport) -> list[tuple[str, str]]:
    task = report.task
    traits = task.traits
    unit = "votes" if traits.counts else "times what one record can change"
    opened = {"histogram": f"the noisy sum of {traits.sums}", "winner": "only the winning class"}[task.release]
    rows = [
        ("Task", task.name),
        ("Classes", f"{task.num_classes:,}"),
        ("What an agent answers with", f"{traits.answer} ({task.method}{words.neighbors(task)})"),
        ("What is opened", f"{opened} ({task.release})"),
        ("Noise counted on", f"{words.say_number(task.sigma_votes)} {unit} (sigma)"),
        ("Noise in a full sum", "" if traits.has_local_noise else f"{words.say_number(task.total_sigma_votes)} {unit}"),
        ("Agents", f"{task.agents:,}; {task.colluding_agents:,} may collude, {task.max_dropouts:,} may drop out"),
        ("Talliers", str(task.talliers)),
        ("Rows of the model" if traits.asks_for_a_model else "Questions at most", f"{task.max_queries:,}"),
        ("Grid", f"{task.scale:,} units per vote" if traits.counts else ""),
        ("Proof for one image", report.privacy.instance.method),
        ("Proof for a whole agent", report.privacy.agent.method),
        ("Backbone", report.backbone),
        ("Backbone fingerprint", task.backbone_fingerprint),
        ("Task digest", task.digest),
        ("Job", report.job_id),
        ("Made", report.created_at),
    ]
    return [(name, value) for name, value in rows if value] + list(report.versions.items())
