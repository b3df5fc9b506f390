"""A record for the public registry of deployments of differential privacy, from an evidence document of one task.

Its fields and choices are those of the registry's schema (opendp/deployments-registry-data). Every number comes from
the document, whose numbers follow from a verified journal. Fields that no journal knows say `TO_FILL`; the record's
notes list them. The notes also answer what NIST SP 800-226 asks of a guarantee, from epsilon to how data were
collected, or name a party that can.

A registry is public: no agent, requester or job is named here, whatever the document names.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

from labeler.errors import InvalidSetting
from labeler.evidence.document import Evidence, Guarantee, Mechanism, TaskFindings
from labeler.methods import METHODS

TO_FILL: Final = "To be filled in by whoever publishes."

UNITS: Final = {"image": "record (one image)", "person": "person (at one agent)", "agent": "agent (one organisation)"}

Section = dict[str, Any]


def registry_record(document: Evidence) -> Section:
    """Return the record, as nested fields: text, whole numbers, decimals, lists of text.

    Raises:
        InvalidSetting: the document is not about exactly one known task, so there is not one deployment.
    """
    mechanism = document.tasks[0].mechanism if len(document.tasks) == 1 else None
    if mechanism is None or document.facts.scope.party != "coordinator":
        raise InvalidSetting(
            "a record of the registry is about one task, from a coordinator's journal, and this evidence is about "
            f"{len(document.tasks)}; name one (--task), and the coordinator's home or service"
        )
    [facts], [found] = document.facts.tasks, document.tasks
    task = facts.task or {}
    stated = next((one for one in found.promised if one.unit == "image"), found.promised[0])
    cadence = found.cadence
    record: Section = {
        "url_slug": f"{_slug(str(task.get('name', '')))}-{found.digest[:12]}",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": str(task.get("name", "")),
                "data_curators": [TO_FILL],
                "intended_use": TO_FILL,
                "data_product_type": METHODS[task["method"]].rows_about("Dataset", "Machine learning model"),
                "data_product_region": TO_FILL,
                "description": (
                    f"Labels of public images in {len(task.get('classes', ()))} classes, by private labeled images of "
                    f"{found.cohort.participants} organisations that share none of them. Each contributes "
                    f"{mechanism.contribution}; what is opened is {mechanism.release}."
                ),
                "publication_date": (cadence.first_at or facts.created_at)[:10] or TO_FILL,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": "Sets of records at each organisation: a feature of one image, made by a public "
                "function of that image alone, and its label from the public list of classes.",
                "unprotected_quantities": "The task's settings with its names of classes, who took part or refused, "
                "when, and the bounds on records that organisations declare. None is computed from records.",
            },
            "privacy_loss": _privacy_loss(found, stated),
            "deployment_model": _model(document, found, mechanism),
            "accounting": {
                "post_processing": dict(document.meaning)["exports"],
                "composition": f"{mechanism.accounting}. {_budgets(document)}",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "Questions are chosen among public images alone. All "
                "settings were fixed in the task, whose digest every party signs, before anybody was asked. What was "
                "chosen after earlier releases is post-processing of them.",
                "mechanisms": f"{mechanism.system}. Noise: {mechanism.noise}. Sensitivity: proved at "
                f"`{mechanism.proof}`. Program: {document.software.name} {document.software.version}.",
                "justification": f"{mechanism.source}\n{_audits(document)}",
            },
            "administrative": {
                "sources": f"Signed evidence of task {found.digest}. Journal: {document.facts.journal.entries} "
                f"entries, head {document.facts.journal.head}.",
                "notes": _notes(document, found),
                "registry_authors": [TO_FILL],
            },
        },
    }
    if stated.epsilon is not None:
        parameters = {"epsilon": Decimal(stated.epsilon), "delta": Decimal(stated.delta)}
        record["deployment"]["privacy_loss"]["privacy_parameters"] = parameters
    return record


def as_yaml(fields: Section, *, depth: int = 0) -> str:
    """Return the record as YAML: text in double quotes, or in a block if it has several lines."""
    lines = []
    for key, value in fields.items():
        indent = "  " * depth
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{as_yaml(value, depth=depth + 1)}")
        elif isinstance(value, list):
            lines.append(f"{indent}{key}:\n" + "".join(f"{indent}  - {_scalar(one)}\n" for one in value))
        elif isinstance(value, str) and "\n" in value:
            block = "".join(f"{indent}  {line}\n" if line else "\n" for line in value.strip().split("\n"))
            lines.append(f"{indent}{key}: |\n{block}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: str | int | Decimal) -> str:
    if not isinstance(value, str):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    escaped = (letter if letter.isprintable() and letter not in '"\\' else f"\\U{ord(letter):08x}" for letter in value)
    return f'"{"".join(escaped)}"'


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "task"


def _said(one: Guarantee) -> str:
    if one.epsilon is None:
        return f"no bound: {one.reason}"
    against = "" if one.participant_epsilon is None else f"; {one.participant_epsilon} against one participant"
    return f"epsilon at most {one.epsilon}, delta {one.delta}{against}"


def _privacy_loss(found: TaskFindings, stated: Guarantee) -> Section:
    spent = "; ".join(f"{UNITS[one.unit]}: {_said(one)}" for one in found.spent)
    return {
        "privacy_unit": UNITS[stated.unit],
        "privacy_unit_details": "\n".join(f"- {UNITS[one.unit]}: {one.neighbours}" for one in found.promised),
        "privacy_parameters_details": "\n".join(
            [f"- {UNITS[one.unit]}, of all that may ever be asked: {_said(one)}" for one in found.promised]
            + [f"- Charged so far: {spent or 'nothing'}"]
        ),
    }


def _model(document: Evidence, found: TaskFindings, mechanism: Mechanism) -> Section:
    cadence, cohort = found.cadence, found.cohort
    once = cadence.releases <= 1
    return {
        "model_name": "Federated",
        "model_name_details": f"{mechanism.noise[:1].upper()}{mechanism.noise[1:]}. Only sums of at least "
        f"{mechanism.quorum} organisations are opened, by {mechanism.talliers} talliers of whom each holds a secret "
        "share.",
        "actors": "\n".join(
            [
                f"- {cohort.participants} organisations, which trust nobody with their records or their budgets; "
                f"{mechanism.colluding_agents} of them may pool what they know",
                f"- {mechanism.talliers} talliers, which see secret shares and not what they add up to",
                "- a coordinator, which sees sums that are noised already, and keeps the journal",
                f"- readers of what is released. {mechanism.holds_against}",
            ]
        ),
        "release_type": "One release" if once else "Many releases",
        "release_type_details": f"Rounds opened, once each: {cadence.releases}; days: {cadence.days}; "
        f"questions paid for: {cadence.questions_charged}; asked twice: {cadence.questions_asked_again}. "
        "The bound is on all that the task may ever ask; no budget is ever reset.",
        "access_type": "Interactive",
        "access_type_details": f"Requesters ask under the task's price until its questions are used up. "
        f"{_budgets(document)} Every answer may be read by everybody: that requesters do not collude is not assumed.",
    }


def _budgets(document: Evidence) -> str:
    """Return the spending and the limits of accounts, without saying whose they are."""
    said = []
    for level, unit in (("instance", "one image"), ("agent", "one organisation")):
        found = [one for one in document.accounts if one.level == level]
        spent = [None if one.spent_epsilon is None else Decimal(one.spent_epsilon) for one in found]
        caps = [Decimal(one.cap_epsilon) for one in found if one.cap_epsilon is not None]
        if not found:
            continue
        most = "no bound" if None in spent else f"epsilon {max(one for one in spent if one is not None)}"
        cap = f"epsilon {max(caps)}" if len(caps) == len(found) else "recorded and not limited"
        said.append(f"{unit}: {most} of {cap}")
    delta = document.facts.delta
    most_of_all = "the most that an account has spent or set aside"
    return f"Over all tasks of the journal (delta {delta}), {most_of_all}: {'; '.join(said)}."


def _audits(document: Evidence) -> str:
    if not document.audits:
        return "No audit stands in this evidence."
    return "\n".join(
        f"- An attack ({one.adversary}) proved epsilon {one.proved_epsilon} of {one.promised_epsilon} promised, at "
        f"confidence {one.confidence}."
        for one in document.audits
    )


def _notes(document: Evidence, found: TaskFindings) -> str:
    """Return the questions of SP 800-226 that no other field answers: answered, unanswered, and to be filled in."""
    meaning, cadence = dict(document.meaning), found.cadence
    answers = (
        (
            "Are guarantees mixed, or compared across units?",
            "each unit has its own bound above; none is derived from another",
        ),
        (
            "What is the query model?",
            f"questions charged: {cadence.questions_charged}; rounds: {cadence.rounds_charged}, in a day at "
            f"most {cadence.most_rounds_in_a_day}; charges are reserved before anybody is asked",
        ),
        (
            "Could the implementation leak beside the mechanism?",
            "by design votes, noise and sums are integers, and answers leave on a public clock; "
            + ("an audit is stated above" if document.audits else "no audit stands in this evidence"),
        ),
        ("Could a refusal, a repeat or an export leak?", f"{meaning['refusals']} {meaning['repeats']}"),
        ("Can the record of what was spent be changed?", meaning["chain"]),
        ("How useful and how biased is the product?", "no journal knows; see the job's report, where truth is known"),
        ("How are the records secured at the sites?", "no journal knows; each organisation answers for itself"),
        ("How were the records collected?", "no journal knows; each organisation answers for itself"),
    )
    lines = [
        "What NIST SP 800-226 asks of a guarantee, answered from the verified journal. The fields privacy_loss, "
        "implementation, accounting and deployment_model state epsilon, unit, mechanism, composition and trust.",
        "",
    ]
    lines += [f"- {question} {answer[:1].upper()}{answer[1:].rstrip('.')}." for question, answer in answers]
    if document.remarks:
        lines += ["", "Remarks of the evidence:", "", *(f"- {remark}" for remark in document.remarks)]
    lines += [
        "",
        "To be filled in: data_curators, intended_use, data_product_region, data_product_sector, data_source_type, "
        "registry_authors.",
    ]
    return "\n".join(lines)
