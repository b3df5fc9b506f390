"""The document of an audit as a page: what is promised, what was proved, and the curves of every adversary.

It loads nothing and runs nothing; its picture is drawn in the page's own colours, so that it follows the reader's
colour scheme. Jinja2 escapes every text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from feature_store.results.page_templates import page_templates
from labeler.auditing import AuditFacts, AuditFindings

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 400, 56, 48, 14
_CANARY = {"instance": "one record", "person": "the records of one person", "agent": "a whole agent"}


def render_page(document: dict[str, Any]) -> str:
    """The page of a document of `workers.audit.run`."""
    facts, findings = read_document(document)
    found = findings.findings
    longest = 1.12 * max(findings.promised_epsilon, *(max(one.epsilon, one.moved_epsilon or 0) for one in found)) or 1.0
    step, scale = min(52, (_HEIGHT - 70) / len(found)), (_WIDTH - 20) / longest
    alphas = np.concatenate([np.linspace(0, 0.02, 20), np.linspace(0.02, 1, 80)])
    least = ndtr(ndtri(np.clip(1 - alphas, 1e-12, 1 - 1e-12)) - findings.promised_mu)
    rows = [
        {
            "attempt": attempt,
            "found": one,
            "color": f"var(--c{(place + 1) % 5})",
            "y": 42 + step * place,
            "bar": round(max(1.5, scale * one.epsilon), 1),
            "moved": None if one.moved_epsilon is None else round(10 + scale * min(one.moved_epsilon, longest), 1),
            "curve": " ".join(_at(x, y) for x, y in document["curves"].get(one.adversary, ())),
        }
        for place, (attempt, one) in enumerate(zip(facts.attempts, found, strict=True))
    ]
    environment = page_templates("workers", "audit")
    return environment.get_template("page.html.j2").render(
        facts=facts,
        findings=findings,
        task=facts.task,
        canary=_CANARY[facts.level],
        verdict=in_words(findings),
        rows=rows,
        step=step,
        bar_limit=round(10 + scale * findings.promised_epsilon, 1),
        bound=" ".join(_at(float(x), float(y)) for x, y in zip(alphas, least, strict=True)),
        at=_at,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        bottom=_BOTTOM,
    )


def read_document(document: dict[str, Any]) -> tuple[AuditFacts, AuditFindings]:
    """What was counted, and what that proves."""
    facts, findings = json.dumps(document["facts"]), json.dumps(document["findings"])
    return AuditFacts.model_validate_json(facts), AuditFindings.model_validate_json(findings)


def in_words(findings: AuditFindings) -> str:
    """The verdict in a sentence."""
    strongest = max(findings.findings, key=lambda one: one.epsilon)
    if findings.is_above:
        broken = ", ".join(one.adversary for one in findings.findings if one.is_above)
        return (
            f"The promise is broken: {broken} proved more than mu {findings.promised_mu:.4g}, for which the task is "
            "charged. What ran is not what was priced."
        )
    return (
        f"Nothing contradicts the promise. The strongest adversary, {strongest.adversary}, proved epsilon "
        f"{strongest.epsilon:.3g} of the {findings.promised_epsilon:.4g} promised."
    )


def _at(x: float, y: float) -> str:
    """Where a pair of error rates stands in the picture of curves."""
    return f"{_LEFT + x * (_WIDTH - _LEFT - 10):.1f},{_TOP + (1 - y) * (_HEIGHT - _TOP - _BOTTOM):.1f}"
