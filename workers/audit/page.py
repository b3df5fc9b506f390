"""The document of an audit as a page: what is promised, what was proved, and the curves of every adversary.

It loads nothing and runs nothing; its picture is drawn here, in the page's own colours, so that it follows the reader's
colour scheme. Every text is escaped.
"""

from __future__ import annotations

from html import escape
from typing import Any, Final

import numpy as np
from scipy.special import ndtr, ndtri

from labeler.auditing import Attempt, AuditFacts, AuditFindings, Finding

_STYLE: Final = """
:root { --ink: #1c2431; --muted: #5a6676; --line: #c9d0d8; --ground: #fefefe; --tint: #f1f4f7; --bad: #b4461b;
  --good: #00775d; --c0: #8a93a0; --c1: #2a7fc1; --c2: #b06f00; --c3: #8468cf; --c4: #b84a6b;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf3; --muted: #a0acba; --line: #38434f; --ground: #171e27;
  --tint: #202a35; --bad: #ff9566; --good: #3fcba2; --c0: #a0acba; --c1: #6cb4ff; --c2: #f0b04a; --c3: #b7a3f5;
  --c4: #f08cab; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 "Liberation Sans", Arial, Helvetica, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0 .7rem; } .muted { color: var(--muted); }
.verdict { border: 2px solid var(--good); padding: .7rem 1rem; font-size: 1.1rem; }
.verdict.bad { border-color: var(--bad); }
.pictures { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem; } @media (max-width: 760px) { .pictures {
  grid-template-columns: 1fr; } body { padding: 1rem; } dl { grid-template-columns: 1fr !important; } }
figure { margin: 0; } figcaption { color: var(--muted); font-size: .9rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font-size: 13px; } svg .quiet { fill: var(--muted); } .axis { stroke: var(--line); }
.scroll { overflow-x: auto; margin-top: 1.2rem; } table { border-collapse: collapse; width: 100%; font-size: .93rem; }
.scroll td, .scroll th { overflow-wrap: normal; } .scroll td:first-child { min-width: 15rem; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { background: var(--tint); vertical-align: bottom; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
dl { display: grid; grid-template-columns: minmax(8rem, 12rem) 1fr; gap: .25rem .8rem; }
dt { font-weight: 700; } dd { margin: 0; }
@media print { body { max-width: none; } }
"""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 400, 56, 48, 14


def render_page(document: dict[str, Any]) -> str:
    """The page of a document of `workers.audit.run`."""
    facts = AuditFacts.model_validate_json(_json(document["facts"]))
    findings = AuditFindings.model_validate_json(_json(document["findings"]))
    colors = {one.adversary: f"var(--c{(place + 1) % 5})" for place, one in enumerate(findings.findings)}
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit: {_text(facts.task['name'])}</title><style>{_STYLE}</style></head>\n<body><main>"
        f"<h1>Audit: {_text(facts.task['name'])}</h1>{_about(facts)}{verdict(facts, findings)}"
        '<h2>What was proved</h2><div class="pictures">'
        f"{_bars(findings, colors)}{_curves(document['curves'], findings, colors)}</div>"
        f"{_table(facts, findings, colors)}<h2>How to read this</h2>{_reading(facts)}</main></body></html>\n"
    )


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


def verdict(facts: AuditFacts, findings: AuditFindings) -> str:
    """The verdict as a box."""
    return (
        f'<p class="verdict{" bad" if findings.is_above else ""}"><strong>{_text(in_words(findings))}</strong> '
        f"All of this holds together with confidence {facts.confidence:g}.</p>"
    )


def _about(facts: AuditFacts) -> str:
    task = facts.task
    whose = {"instance": "one record", "person": "the records of one person", "agent": "a whole agent"}[facts.level]
    return (
        f'<p class="muted">{_text(task["method"])}, {task["max_queries"]:,} questions, {len(task["classes"])} classes, '
        f"{task['agents']} agents of whom {task['colluding_agents']} collude, sigma {task['sigma_votes']:.4g}, "
        f"{_text(task['release'])} released; the canary is {whose}, and adversaries see the "
        f"{'release' if facts.view == 'release' else 'labels of a student'}.</p>"
    )


def _bars(findings: AuditFindings, colors: dict[str, str]) -> str:
    rows = findings.findings
    longest = (
        max([findings.promised_epsilon, *(max(one.epsilon, one.moved_epsilon or 0) for one in rows)]) * 1.12 or 1.0
    )
    step = min(52, (_HEIGHT - 70) / len(rows))
    scale = (_WIDTH - 20) / longest
    limit = 10 + scale * findings.promised_epsilon
    parts = [
        f'<line x1="{limit:.1f}" y1="34" x2="{limit:.1f}" y2="{44 + step * len(rows):.1f}" stroke="var(--ink)" '
        f'stroke-width="2" stroke-dasharray="5 4"/><text x="{min(limit, _WIDTH - 4):.1f}" y="24" text-anchor="end">'
        f"promised {findings.promised_epsilon:.3g}</text>"
    ]
    for place, one in enumerate(rows):
        y = 42 + step * place
        parts.append(
            f'<text x="10" y="{y + 13:.1f}">{_text(one.adversary)}: {one.epsilon:.3g}</text>'
            f'<rect x="10" y="{y + 19:.1f}" width="{max(1.5, scale * one.epsilon):.1f}" height="{step - 30:.1f}" '
            f'rx="2" fill="{"var(--bad)" if one.is_above else colors[one.adversary]}"/>'
        )
        if one.moved_epsilon is not None:
            x = 10 + scale * min(one.moved_epsilon, longest)
            parts.append(
                f'<line x1="{x:.1f}" y1="{y + 17:.1f}" x2="{x:.1f}" y2="{y + step - 9:.1f}" '
                f'stroke="{colors[one.adversary]}" stroke-width="3"/>'
            )
    height = 60 + step * len(rows)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="Epsilon proved by each adversary '
        f'beside the epsilon promised">{"".join(parts)}</svg><figcaption>Epsilon that each adversary proved, at least; '
        "the dashed line is what the task promises at most, a short line how far the canary moves what is seen."
        "</figcaption></figure>"
    )


def _curves(curves: dict[str, list[list[float]]], findings: AuditFindings, colors: dict[str, str]) -> str:
    def at(x: float, y: float) -> str:
        return f"{_LEFT + x * (_WIDTH - _LEFT - 10):.1f},{_TOP + (1 - y) * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    alphas = np.concatenate([np.linspace(0, 0.02, 20), np.linspace(0.02, 1, 80)])
    least = ndtr(ndtri(np.clip(1 - alphas, 1e-12, 1 - 1e-12)) - findings.promised_mu)
    bound = " ".join(at(float(x), float(y)) for x, y in zip(alphas, least, strict=True))
    parts = [f'<polygon points="{at(0, 0)} {bound} {at(1, 0)}" fill="var(--tint)"/>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(tick, 0).split(","), at(0, tick).split(",")
        parts.append(
            f'<text class="quiet" x="{x[0]}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
            f'<text class="quiet" x="{_LEFT - 8}" y="{float(y[1]) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    start, end = at(0, 0).split(","), at(1, 1).split(",")
    parts.append(
        f'<polyline class="axis" points="{start[0]},{end[1]} {at(0, 0)} {at(1, 0)}" fill="none"/>'
        f'<polyline class="axis" points="{at(0, 1)} {at(1, 0)}" fill="none" stroke-dasharray="2 4"/>'
        f'<polyline points="{bound}" fill="none" stroke="var(--ink)" stroke-width="2" stroke-dasharray="5 4"/>'
    )
    for name, points in curves.items():
        line = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">taken for present, though absent'
        f'</text><text x="16" y="{_HEIGHT / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {_HEIGHT / 2:.0f})">taken for absent, though present</text>'
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Error rates of each adversary at every '
        f'threshold, and the curve below which no attack may come">{"".join(parts)}</svg><figcaption>Share of wrong '
        "answers at every threshold, as counted. Below the dashed curve nobody may come but by chance; the dotted "
        "line is guessing.</figcaption></figure>"
    )


def _table(facts: AuditFacts, findings: AuditFindings, colors: dict[str, str]) -> str:
    rows = "".join(_row(one, found, colors) for one, found in zip(facts.attempts, findings.findings, strict=True))
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Findings"><table><thead><tr><th>Adversary</th>'
        '<th class="n">wrong without</th><th class="n">wrong with</th><th class="n">advantage</th>'
        '<th class="n">at least</th><th class="n">mu at least</th><th class="n">epsilon at least</th>'
        '<th class="n">any mechanism</th><th class="n">moved</th></tr></thead><tbody>'
        f'{rows}<tr><th>promised, at most</th><td></td><td></td><td class="n"></td>'
        f'<td class="n">{findings.promised_advantage:.3f}</td><td class="n">{findings.promised_mu:.3f}</td>'
        f'<td class="n">{findings.promised_epsilon:.3f}</td><td class="n">{findings.promised_epsilon:.3f}</td>'
        f'<td class="n">{findings.promised_epsilon:.3f}</td></tr>'
        "</tbody></table></div>"
    )


def _row(attempt: Attempt, found: Finding, colors: dict[str, str]) -> str:
    extra = (
        f"; {attempt.correct:,} of {attempt.guesses:,} clearest guesses right of {attempt.canaries:,} canaries"
        if attempt.canaries
        else ""
    )
    return (
        f'<tr><td><span class="dot" style="background:{colors[found.adversary]}"></span><strong>'
        f'{_text(found.adversary)}</strong><br><span class="muted">{_text(attempt.sentence)}{extra}</span></td>'
        f'<td class="n">{attempt.false_positives:,} of {attempt.absent:,}</td>'
        f'<td class="n">{attempt.false_negatives:,} of {attempt.present:,}</td><td class="n">{found.advantage:.3f}</td>'
        f'<td class="n">{found.advantage_bound:.3f}</td><td class="n">{found.mu:.3f}</td>'
        f'<td class="n">{found.epsilon:.3f}</td><td class="n">{found.any_epsilon:.3f}</td>'
        f'<td class="n">{"–" if found.moved_epsilon is None else f"{found.moved_epsilon:.3f}"}</td></tr>'
    )


def _reading(facts: AuditFacts) -> str:
    pairs = (
        ("What ran", "Every run is a whole life of the task: index, votes, integer noise, secret shares, coordinator, "
         "talliers, journal. Adversaries know all records but the canary and the noise of the agents said to collude; "
         "the agents that may drop out have; and each asks again beyond what was paid for. A run of many-jobs is a "
         "hundred jobs at one agent: its votes, spends and noise."),
        ("Bounds", "Exact binomial bounds on both error rates give mu, and mu gives epsilon at the task's delta. 'Any "
         "mechanism' assumes no Gaussian curve and, in one run, no independent noise."),
        ("Moved", "How far the canary moves what is seen, measured without noise, as an epsilon under the noise that "
         "the task states: endless runs of this attack would prove no more. What is promised beyond it is slack, of "
         "the bound that the price rests on or of the attack. A dash: not known."),
        ("What it does not say", "An adversary far below the promise is weak, or the bound is loose. No audit proves "
         "that a promise holds; the proof is in the method's docstring."),
        ("Seeds", f"Records, questions and coins: {facts.seed}. Noise: {facts.noise}."),
        ("Task", facts.task_digest),
    )  # fmt: skip
    return "<dl>" + "".join(f"<dt>{_text(name)}</dt><dd>{_text(words)}</dd>" for name, words in pairs) + "</dl>"


def _json(document: Any) -> str:
    import json

    return json.dumps(document)


def _text(text: object) -> str:
    return escape(str(text))
