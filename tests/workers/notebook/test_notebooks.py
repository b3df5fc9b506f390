"""The notebooks of the tutorials open in Jupyter, run cell by cell as they stand, and say what their words say."""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


def executed(name: str) -> dict[str, Any]:
    """What the cells of a notebook define: each runs in one namespace, its last expression is shown as Jupyter does."""
    defined: dict[str, Any] = {}
    for cell in nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, cell.id, "exec"), defined)  # the notebook's own cells
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), cell.id, "eval"), defined)
            assert getattr(shown, "_repr_html_", shown.__repr__)()
    return defined


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_in_jupyter_holds_no_output_and_links_to_pages_that_are_there(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.metadata.kernelspec.language) == (4, "python")
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None), cell.id
        for target in re.findall(r"\]\(([^)#:]+)\)", cell.source):
            assert (path.parent / target).exists(), target


def test_the_first_notebook_labels_most_images_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    defined = executed("notebook")
    assert len(defined["right"]) == 240
    # 16 clusters of four digits at epsilon 0.5; 0.9 to 0.99 over twenty runs.
    assert defined["share"] > 0.75
    assert defined["price"].epsilon <= 0.5
    assert "epsilon" in defined["job"].privacy_card
    assert len(list(defined["sorted_into"].glob("*/*.png"))) == len(defined["again"]) == len(defined["data"]) == 240


@pytest.mark.long
def test_hugging_face_reads_what_the_first_notebook_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `formats` is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    defined = executed("notebook")
    found = datasets.load_dataset(str(defined["hugging_face"]), split="train", cache_dir=str(tmp_path / "cache"))
    names = found.features["label"]
    assert [names.int2str(label) for label in found["label"]] == defined["labels"]["label_name"].to_pylist()
    assert found[0]["image"].size == (8, 8)


def test_choosing_shows_what_its_words_say() -> None:
    defined = executed("choosing")
    by_k, by_queries, by_epsilon = defined["by_k"], defined["by_queries"], defined["by_epsilon"]
    assert len({found.epsilon for found in by_k.values()}) == 1, "one image's price does not depend on k"
    agents = [found.agent_epsilon for found in by_k.values()]
    assert agents == sorted(agents)
    assert len(set(agents)) == 3
    knn, reverse = zip(*by_queries.values(), strict=True)
    assert knn == tuple(sorted(knn))
    assert len(set(reverse)) == 1, "a record is asked k times, however many questions there are"
    noise = [found.sigma_votes for found in by_epsilon.values()]
    assert noise == sorted(noise, reverse=True)
