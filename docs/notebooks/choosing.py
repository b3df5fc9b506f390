"""Choosing k, epsilon and clusters before paying, from public things alone. Run with `marimo edit`, or as a script."""

import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    import labeler

    return labeler, mo


@app.cell
def _(mo):
    mo.md("""
    # Choosing k, epsilon and clusters

    A price is a function of the task alone, so everything on this page costs nothing and reads no private image. What
    may **not** be chosen by looking at private data: k, the classes, sizes, or which images are public.
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    ## k: a question that more records answer drowns less

    With `knn` each question asks the k records nearest to it of every agent. For one image the price does not depend
    on k (one record moves one vote, whatever k is), so a larger k buys votes for nothing, until records answer that
    are not near any more. For a whole agent it does: k votes are k times as far.
    """)
    return


@app.cell
def _(labeler):
    by_k = {k: labeler.plan(method="knn", k=k, queries=200, sigma=25.0, delta=1e-4, agents=3) for k in (1, 10, 50)}
    {k: (found.epsilon, found.agent_epsilon) for k, found in by_k.items()}
    return (by_k,)


@app.cell
def _(mo):
    mo.md("""
    ## Questions: each is paid for with `knn`, all of them once with `reverse-knn`

    With `reverse-knn` every record votes at the k questions nearest to it, so a record is asked k times however many
    questions there are.
    """)
    return


@app.cell
def _(labeler):
    def epsilon(method, queries):
        return labeler.plan(method=method, k=1, queries=queries, sigma=25.0, delta=1e-4, agents=3).epsilon

    by_queries = {queries: (epsilon("knn", queries), epsilon("reverse-knn", queries)) for queries in (20, 200, 2000)}
    by_queries
    return (by_queries,)


@app.cell
def _(mo):
    mo.md("""
    ## Clusters: few questions about many images

    Public images that look alike get one question. Fewer clusters mean more votes in each and so less noise beside
    them; too few put different classes into one. Between as many as there are classes and three times as many is
    a good beginning; the report of a job shows which groups were unclear.

    ## Epsilon: the noise for a price

    Given an epsilon, the plan says how much noise it takes. Votes must stand out of it: with `reverse-knn` and c
    clusters a question gathers about (records of all agents) / c votes. What accuracy may be expected is a guess from
    public numbers; where noise drowns the votes it says what would do.
    """)
    return


@app.cell
def _(labeler):
    by_epsilon = {
        wanted: labeler.plan(method="reverse-knn", epsilon=wanted, queries=20, delta=1e-4, agents=3, records=2000)
        for wanted in (0.1, 0.5, 1.0, 2.0)
    }
    by_epsilon
    return (by_epsilon,)


@app.cell
def _(by_epsilon, mo):
    mo.md(
        "| epsilon for one image | noise nobody can subtract, votes | labels right, of 2,000 records |\n|---|---|---|\n"
        + "\n".join(
            f"| {wanted} | {found.sigma_votes:.1f} | {found.expected_accuracy or found.warning} |"
            for wanted, found in by_epsilon.items()
        )
    )
    return


if __name__ == "__main__":
    app.run()
