"""A site's policy in plain words: what people read who decide about it, on the desk and in the shell."""

from __future__ import annotations

from workers.agent.policy import BudgetTable, Policy


def policy_in_words(policy: Policy) -> list[str]:
    """One sentence for each thing that the policy allows or refuses, in the order of the file."""
    budget, allow = policy.budget, policy.allow
    lines = [
        _cap("one private image", budget.instance_epsilon, budget.delta),
        _cap("this site as a whole", budget.agent_epsilon, budget.delta),
        *_life(budget, allow.life_job_share),
        *_share(budget.per_requester),
        "Every task needs the approval of a person here."
        if allow.approval
        else "Tasks that keep to this policy are answered without asking a person.",
        "Any task may ask, within this policy."
        if allow.tasks == "any"
        else f"Only {len(allow.tasks)} tasks may ask, those named in the policy.",
        f"Ways to answer: {', '.join(allow.methods) or 'none, so everything is refused'}.",
        f"What may be opened of a sum: {', '.join(allow.releases) or 'nothing, so everything is refused'}.",
        f"At most {allow.max_queries_per_day:,} questions are answered in any 24 hours.",
        "It counts on no noise but its own: tasks have to name all other agents as colluding or absent."
        if allow.max_noise_contributors == 1
        else f"It counts on {allow.max_noise_contributors} agents, itself among them, to add their part of the noise.",
    ]
    if allow.max_noise_talliers:
        honest = "one of the three talliers" if allow.max_noise_talliers == 1 else "two of the three talliers"
        lines.append(f"The talliers may add the noise in its place: it counts on {honest} to be honest.")
    if allow.person_epsilon is not None:
        lines.append(
            f"One task may cost one person, with all their records here, at most epsilon {allow.person_epsilon:g}."
        )
    names = ", ".join(sorted(policy.talliers)) or "nobody, so everything is refused"
    return [*lines, f"Shares go to {names}, and to nobody else."]


def _life(budget: BudgetTable, share: float | None) -> list[str]:
    if budget.life_epsilon is None:
        return []
    return [
        "Votes for life: all such tasks that are ever answered cost one private image at most epsilon "
        f"{budget.life_epsilon:g} together, which is set aside; an image that has spent it votes no more, and nobody "
        "is told which has. "
        + (
            "One job may take all that an image has left of it."
            if share is None
            else f"One job may take at most {100 * share:g} % of it from an image."
        )
    ]


def _share(per_requester: float | None) -> list[str]:
    if per_requester is None:
        return []
    return [
        f"One requester may take at most {100 * per_requester:g} % of each of these; who asks says the coordinator."
    ]


def _cap(what: str, epsilon: float | str, delta: float) -> str:
    if isinstance(epsilon, str):
        return f"About {what}: recorded, with no limit."
    return f"About {what}: all answers together at most epsilon {epsilon:g} (delta {delta:g})."
