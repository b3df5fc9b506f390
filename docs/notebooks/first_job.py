"""A first job: two sites label public digits. Run with `marimo edit docs/notebooks/first_job.py`, or as a script."""

import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import tempfile
    from pathlib import Path

    import marimo as mo
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    import labeler

    return Image, Path, labeler, load_digits, mo, np, tempfile


@app.cell
def _(mo):
    mo.md("""
    # A first job

    Two sites hold private labelled digits; somebody else holds digits without labels and wants some. First the
    folders, as each of them would have them: private ones with a folder per class, public ones without.
    """)
    return


@app.cell
def _(Image, Path, load_digits, np, tempfile):
    classes = ("zero", "one", "two", "three")
    root = Path(tempfile.mkdtemp(prefix="first-job-"))
    digits = load_digits(n_class=len(classes))
    order = np.random.default_rng(0).permutation(len(digits.target))
    parts = {"site-a": order[:250], "site-b": order[250:500], "scans": order[500:700]}
    for part, rows in parts.items():
        for row in rows:
            name = classes[digits.target[row]]
            folder = root / part / ("" if part == "scans" else name)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(folder / f"{row:04d}-{name}.png")
    return classes, root


@app.cell
def _(mo):
    mo.md("""
    The price, before anything is read: what may anybody learn of one private image?
    """)
    return


@app.cell
def _(labeler):
    price = labeler.plan(epsilon=0.5, delta=1e-4, queries=16, agents=2)
    price
    return (price,)


@app.cell
def _(mo):
    mo.md("""
    Each site turns its images into features by itself; only features stay in its shard. (Pixels are enough for digits;
    photographs take the default backbone: leave `backbone` out.) Then the job: one question per group of public
    images that look alike.
    """)
    return


@app.cell
def _(classes, labeler, root):
    sites = [
        labeler.embed(root / part, backbone="pixels:8", classes=classes, quiet=True) for part in ("site-a", "site-b")
    ]
    scans = labeler.embed(root / "scans", backbone="pixels:8", classes=classes, public=True, quiet=True)
    job = labeler.run(sites, scans, root / "job", epsilon=0.5, delta=1e-4, queries=16, quiet=True)
    labels = job.labels("arrow")
    labels.slice(0, 5).to_pylist()
    return job, labels


@app.cell
def _(mo):
    mo.md("""
    Every public image has a label and a confidence. Here we know the truth (it stands in the names), so we can count;
    nobody else can, and the report says how sure the labels are.
    """)
    return


@app.cell
def _(labels):
    right = [
        source.endswith(f"-{label}.png")
        for source, label in zip(labels["source"].to_pylist(), labels["label_name"].to_pylist(), strict=True)
    ]
    share = sum(right) / len(right)
    f"{100 * share:.1f} % of {len(right)} images are labelled right, at epsilon 0.5 for one private image"
    return right, share


@app.cell
def _(job):
    job  # shown in a notebook, it is the report
    return


@app.cell
def _(mo):
    mo.md("""
    The labels for other tools: a data set that `datasets.load_dataset(folder)` reads, class names, pictures and the
    price in its card included. And the student, for images that nobody has asked about.
    """)
    return


@app.cell
def _(job, labeler, root):
    labelled = job.export("hf", root / "labelled", images=root / "scans")
    student = labeler.load_student(job.path / "student.safetensors")
    again = student.label(root / "scans", "arrow", quiet=True)
    labelled.name, again.slice(0, 3).to_pylist()
    return again, labelled


@app.cell
def _(job, mo):
    mo.md(job.privacy_card)
    return


if __name__ == "__main__":
    app.run()
