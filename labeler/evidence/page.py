"""An evidence document as a page to print: A4, readable in black and white, loading nothing and running nothing.

It is made from the document alone and says nothing that the document does not say. Every text is escaped: names come
from other organisations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from labeler.evidence.document import Evidence, Guarantee, Job, Mechanism, Refusal, TaskFacts, TaskFindings

_STYLE = """
:root { --ink: #111; --muted: #444; --line: #999; --ground: #fff; --tint: #f2f2f2; color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --muted: #b9b9b9; --line: #777; --ground: #161616; --tint: #242424; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 54rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 "Liberation Sans", Arial, Helvetica, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; } p { margin: .3rem 0 .6rem; }
.lead { font-size: 1.05rem; } .muted { color: var(--muted); }
.box { border: 2px solid var(--ink); padding: .6rem .9rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; margin: .4rem 0; font-size: .92rem; }
caption { text-align: left; color: var(--muted); padding-bottom: .2rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem; border: 1px solid var(--line); }
thead th { background: var(--tint); } td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
dl { display: grid; grid-template-columns: minmax(9rem, 12rem) 1fr; gap: .25rem .8rem; margin: .4rem 0; }
dt { font-weight: 700; } dd { margin: 0; } code { font: .88em "Liberation Mono", Consolas, monospace; }
.scroll { overflow-x: auto; } .scroll td, .scroll th { overflow-wrap: normal; }
@media screen { .scroll th code { white-space: nowrap; } }
@media (max-width: 600px) { body { padding: 1rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@page { size: A4; margin: 16mm 15mm 18mm; @bottom-right { content: counter(page) " / " counter(pages); } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2, h3 { break-after: avoid; }
  tr, .box, dl > * { break-inside: avoid; } thead { display: table-header-group; } thead th { background: none; }
  table { font-size: 9pt; } .scroll code { word-break: break-all; } .scroll { overflow: visible; }
  section.task { break-before: page; }
  section.task:first-of-type { break-before: auto; } }
"""

_text = escape
_UNITS = {"image": "one image", "person": "one person", "agent": "one agent"}


def render_page(document: Evidence, *, verify_key: str = "", signature: str = "") -> str:
    """The page.

    Args:
        document: what it shows.
        verify_key, signature: of the file beside it; empty where it is not signed.
    """
    facts = document.facts
    who = "the coordinator" if facts.scope.party == "coordinator" else f"agent {facts.scope.party_id}"
    parts = [
        f"<header><h1>Evidence of privacy</h1><p class=lead>{_text(_headline(document))}</p>",
        _pairs(
            [
                ("Made by", _text(who)),
                ("About", _scope_in_words(document)),
                ("Journal", _journal_in_words(document)),
                ("Head of the chain", _code(facts.journal.head)),
                ("Program", _text(f"{document.software.name} {document.software.version}")),
            ]
        ),
        "</header>",
        _remarks(document.remarks),
        *(_task(one, found) for one, found in zip(facts.tasks, document.tasks, strict=False)),
        _audits(document),
        _accounts(document),
        _meaning(document),
        _signed(verify_key, signature),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Evidence of privacy, {_text(who)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{''.join(part for part in parts if part)}</main></body></html>\n"
    )


def _headline(document: Evidence) -> str:
    facts = document.facts
    if not facts.tasks:
        return "Nothing was asked of anybody in this period."
    if len(facts.tasks) > 1:
        asked = sum(one.cadence.questions_charged for one in document.tasks)
        return f"{len(facts.tasks):,} tasks, {asked:,} questions answered and paid for. Each task's guarantee is below."
    [found] = document.tasks
    stated = next((one for one in found.promised if one.unit == "image"), None)
    if stated is None:
        return "The task is known here by its digest alone; what was spent of it is stated, as it was charged."
    if stated.epsilon is None:
        return f"No bound is proved for one image: {stated.reason}."
    return (
        f"Everything that this task may ever release is differentially private for one image: epsilon at most "
        f"{stated.epsilon}, delta {stated.delta}."
    )


def _scope_in_words(document: Evidence) -> str:
    scope = document.facts.scope
    if scope.task:
        names = [task.task["name"] for task in document.facts.tasks if task.task is not None]
        return f"task {_text(', '.join(map(str, names)))} {_code(scope.task)}{_period(scope.since, scope.until)}"
    return f"all tasks{_period(scope.since, scope.until)}"


def _period(since: str, until: str) -> str:
    if not since and not until:
        return ""
    return f", from {_moment(since) or 'the beginning'} until {_moment(until) or 'now'}"


def _journal_in_words(document: Evidence) -> str:
    journal = document.facts.journal
    return (
        f"verified from entry {journal.first_entry} to entry {journal.entries:,}: chain, steps and balances; read "
        f"{_moment(journal.read_at)}"
    )


def _remarks(remarks: Sequence[str]) -> str:
    if not remarks:
        return "<p class=box>Nothing in the journal contradicts what is stated here.</p>"
    return f"<div class=box><strong>Read this first</strong><ul>{_items(remarks)}</ul></div>"


def _task(facts: TaskFacts, found: TaskFindings) -> str:
    name = "" if facts.task is None else str(facts.task["name"])
    asked = sorted({agent for job in facts.jobs for agent in job.asked})
    cadence, cohort = found.cadence, found.cohort
    refused = ", ".join(f"{_text(agent)} ({times}×)" for agent, times in found.refused) or "nobody"
    pairs = [
        ("Agents of the task", _text(", ".join(facts.participants)) or "not known here"),
        ("Were asked", _text(", ".join(asked)) or "nobody"),
        ("Refused", refused),
        *(
            [("Summed together", _cohort(cohort.fewest_contributors, cohort.most_contributors))]
            * bool(cohort.participants)
        ),
        ("How often", _cadence(found)),
        ("Questions", f"{cadence.questions_charged:,} paid for; {cadence.questions_asked_again:,} numbers asked again"),
        ("Released", f"{_count(cadence.releases, 'round')} opened, once each"),
    ]
    return (
        f'<section class="task"><h2>Task {_text(name)}</h2><p class=muted>{_code(facts.digest)}</p>'
        f"{_guarantees(found)}{_mechanism(found.mechanism)}"
        f"<h3>Who, and how often</h3>{_pairs(pairs)}{_jobs(facts.jobs)}</section>"
    )


def _cohort(fewest: int, most: int) -> str:
    if not most:
        return "no round was summed"
    return f"{fewest:,} agents in every round" if fewest == most else f"{fewest:,} to {most:,} agents"


def _cadence(found: TaskFindings) -> str:
    cadence = found.cadence
    if not cadence.rounds_charged:
        return f"{_count(cadence.jobs, 'job')}; nothing was charged"
    return (
        f"{_count(cadence.jobs, 'job')}, {_count(cadence.rounds_charged, 'round')} on {_count(cadence.days, 'day')}, "
        f"at most {cadence.most_rounds_in_a_day:,} a day; {_moment(cadence.first_at)} to {_moment(cadence.last_at)}"
    )


def _guarantees(found: TaskFindings) -> str:
    spent = {one.unit: one for one in found.spent}
    promised = {one.unit: one for one in found.promised}
    rows = "".join(
        f"<tr><th scope=row>{_UNITS[one.unit]}</th><td class=n>{_epsilon(promised.get(one.unit))}</td>"
        f"<td class=n>{_text(one.participant_epsilon or '')}</td>"
        f"<td class=n>{_epsilon(spent[one.unit]) if one.unit in spent else ''}</td>"
        f"<td class=n>{_text(one.delta)}</td></tr>"
        for one in found.promised or found.spent
    )
    stated = found.promised or found.spent
    neighbours = "; ".join(f"{_UNITS[one.unit]}: {one.neighbours}" for one in stated)
    reasons = sorted({one.reason for one in stated if one.reason})
    return (
        "<h3>What is guaranteed</h3><div class=scroll tabindex=0 role=region aria-label=Guarantees><table><thead><tr>"
        "<th scope=col>Protected</th><th scope=col class=n>Epsilon of the whole task, at most</th>"
        "<th scope=col class=n>if a participant reads it</th><th scope=col class=n>spent here</th>"
        "<th scope=col class=n>Delta</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div><p>With or without {_text(neighbours)}.</p>"
        f"{''.join(f'<p>{_text(reason)}.</p>' for reason in reasons)}"
    )


def _epsilon(one: Guarantee | None) -> str:
    if one is None:
        return "not known here"
    return "<strong>no bound</strong>" if one.epsilon is None else f"<strong>{_text(one.epsilon)}</strong>"


def _mechanism(mechanism: Mechanism | None) -> str:
    if mechanism is None:
        return ""
    pairs = [
        ("Method", f"{_text(mechanism.system)}: each agent contributes {_text(mechanism.contribution)}"),
        ("After", _text(mechanism.source)),
        ("Noise", _text(mechanism.noise)),
        ("Opened", f"{_text(mechanism.release)}, by {mechanism.talliers} talliers of whom each holds a secret share"),
        ("Proof of sensitivity", _code(mechanism.proof)),
        ("Accountant", _text(mechanism.accounting)),
        ("Colluding agents assumed", str(mechanism.colluding_agents)),
        ("Quorum", f"{mechanism.quorum:,} agents; with fewer nothing is opened"),
        ("Holds against", _text(mechanism.holds_against.removeprefix("Holds against ").rstrip("."))),
    ]
    return f"<h3>How, and where the proof is</h3>{_pairs(pairs)}"


def _jobs(jobs: Sequence[Job]) -> str:
    if not jobs:
        return "<p>No job in this scope.</p>"
    rows = "".join(_job_row(job) for job in jobs)
    return (
        "<h3>Every job</h3><div class=scroll tabindex=0 role=region aria-label=Jobs><table><thead><tr>"
        "<th scope=col>Job</th><th scope=col>Submitted</th><th scope=col>Ended as</th>"
        "<th scope=col class=n>Questions</th>"
        "<th scope=col class=n>Agents asked</th><th scope=col>Charged for good</th><th scope=col>Who refused</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _job_row(job: Job) -> str:
    refusals = [*job.refusals, *(refusal for one in job.rounds for refusal in one.refusals)]
    posted = [one for one in job.rounds if one.charge == "posted"]
    charged = (
        f"{len(posted):,} of {_count(len(job.rounds), 'round')}, last {_moment(posted[-1].posted_at)}"
        if posted
        else "nothing"
    )
    state = job.state if not job.problem else f"{job.state}: {job.problem.rpartition(':')[2]}"
    return (
        f"<tr><th scope=row>{_code(job.job_id)}</th><td>{_moment(job.submitted_at)}</td><td>{_text(state)}</td>"
        f"<td class=n>{job.questions:,}</td><td class=n>{len(job.asked):,}</td><td>{charged}</td>"
        f"<td>{'<br>'.join(map(_refusal, refusals))}</td></tr>"
    )


def _refusal(refusal: Refusal) -> str:
    words = refusal.sentence or refusal.reason
    return f"{_text(refusal.agent)} {refusal.said}{': ' * bool(words)}{_text(words)}"


def _audits(document: Evidence) -> str:
    if not document.audits:
        return ""
    rows = "".join(
        f"<tr><th scope=row>{_text(one.adversary)}</th>"
        f"<td>{_UNITS['image' if one.level == 'instance' else 'person']}</td>"
        f"<td class=n>{one.runs:,}</td><td class=n>{_text(one.proved_epsilon)}</td>"
        f"<td class=n>{_text(one.promised_epsilon)}</td><td class=n>{_text(one.proved_advantage)}</td>"
        f"<td class=n>{_text(one.promised_advantage)}</td>"
        f"<td>{'<strong>no</strong>' if one.is_above else 'yes'}</td></tr>"
        for one in document.audits
    )
    confidence = ", ".join(sorted({one.confidence for one in document.audits}))
    return (
        "<section><h2>Attacks on what runs</h2><div class=scroll tabindex=0 role=region aria-label=Audits><table>"
        f"<caption>Lower bounds; all of an audit hold together with confidence {_text(confidence)}</caption>"
        "<thead><tr><th scope=col>Adversary</th><th scope=col>Protected</th><th scope=col class=n>Runs</th>"
        "<th scope=col class=n>Epsilon proved, at least</th><th scope=col class=n>promised, at most</th>"
        "<th scope=col class=n>Advantage proved</th><th scope=col class=n>promised</th>"
        f"<th scope=col>Promise holds against it</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _accounts(document: Evidence) -> str:
    if not document.accounts:
        return ""
    rows = []
    for one in document.accounts:
        spent = one.spent_epsilon or "no bound"
        cap = one.cap_epsilon or "only recorded, not limited"
        unit = _UNITS["image" if one.level == "instance" else "agent"]
        rows.append(
            f"<tr><th scope=row>{_text(one.account)}</th><td>{unit}</td>"
            f"<td class=n>{_text(spent)}</td><td class=n>{_text(cap)}</td></tr>"
        )
    return (
        "<section><h2>Budgets since the first entry</h2><div class=scroll tabindex=0 role=region aria-label=Budgets>"
        f"<table><caption>Everything charged together, final and reserved, at delta {_text(document.facts.delta)}"
        "</caption><thead><tr><th scope=col>Account</th><th scope=col>Protected</th>"
        "<th scope=col class=n>Epsilon spent, at most</th><th scope=col class=n>Epsilon allowed</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _meaning(document: Evidence) -> str:
    pairs = [(name.capitalize(), _text(words)) for name, words in document.meaning]
    return f"<section><h2>How to read this</h2>{_pairs(pairs)}</section>"


def _signed(verify_key: str, signature: str) -> str:
    if not signature:
        return "<section><h2>Signature</h2><p>This copy is not signed.</p></section>"
    pairs = [("Signed with key", _code(verify_key)), ("Signature", _code(signature))]
    return (
        f"<section><h2>Signature</h2>{_pairs(pairs)}<p>The signature is over the file beside this page, not over the "
        "page. Check that file, and compare the key with the one you know this party by: "
        "<code>labeler evidence verify FILE --key KEY</code>; with the journal at hand also "
        "<code>--home HOME</code>.</p></section>"
    )


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values; values are HTML already."""
    return f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{value}</dd>' for name, value in pairs)}</dl>"


def _count(number: int, one: str) -> str:
    return f"{number:,} {one if number == 1 else one + 's'}"


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{_text(line)}</li>" for line in lines)


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _moment(text: str) -> str:
    """A time to the minute."""
    return f"{_text(text[:10])} {_text(text[11:16])} UTC" if text else ""
