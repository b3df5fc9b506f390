"""What the README says is true: its commands exist, its prices are right, its links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PRICE = (ROOT / "docs" / "how-to" / "price.md").read_text()


def test_every_plan_on_the_page_of_prices_prints_what_it_says(labeler, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    commands = re.findall(r"^\$ labeler (plan .*)\n((?:[^$`].*\n|\n)*)", PRICE, flags=re.M)
    assert len(commands) == 2
    for command, printed in commands:
        result = labeler(*shlex.split(command))
        assert result.code == 0
        assert set(printed.split()) <= set(result.out.split())


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "BENCHMARKS.md"])
def test_links_and_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`((?:labeler|feature_store|workers|api|tests|docs)/[\w./-]+)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name


def test_the_readme_is_short_and_names_commands_that_are_there() -> None:
    from workers.commands.catalog import CATALOG

    assert len(README.split()) <= 1_200
    assert set(re.findall(r"(?:^|`)labeler (\w+)", README, flags=re.M)) <= CATALOG.keys()


@pytest.mark.long
def test_every_block_of_the_readme_runs_as_pasted_and_git_sees_none_of_it(tmp_path: Path) -> None:
    """One block after the other in one shell, in the order of the page; in a repository that ignores what ours does."""
    section = README.split("## Label a folder")[1].split("**As a service**")[0]
    blocks = re.findall(r"```(\w*)\n(.*?)```", section, re.S)
    assert [kind for kind, _ in blocks] == ["", "", "", "python"]
    pasted = [text if kind == "" else f"python - <<'END'\n{text}END\n" for kind, text in blocks]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    subprocess.run(
        ["bash", "-e", "-c", "git init -q . && git add .gitignore\n" + "".join(pasted)],
        cwd=tmp_path,
        env=env,
        check=True,
    )
    labeled = tmp_path / "try" / "labeled"
    assert {folder.name for folder in labeled.iterdir() if folder.is_dir()} <= set("0123456789")
    assert len(list(labeled.glob("*/*.png"))) == 599
    for job in ("job", "file-job", "notebook-job"):
        assert (tmp_path / "try" / job / "report.html").exists()
    seen = subprocess.run(
        ["git", "status", "--porcelain"], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    assert seen.stdout == "A  .gitignore\n"


@pytest.mark.parametrize(
    "secret", ["site.key", "deep/er/site.key", "a.shard/manifest.json", "x/.a.shard.lock", "try/x"]
)
def test_git_ignores_what_commands_write_about_private_images(secret: str) -> None:
    assert subprocess.run(["git", "check-ignore", "-q", secret], cwd=ROOT, check=False).returncode == 0


def test_the_picture_and_the_lines_of_the_readme_are_of_one_demo() -> None:
    """`make picture` makes both of what `make demo` wrote; the picture's file keeps the lines."""
    picture = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    lines = picture["BLOCK"].search(README)
    assert lines is not None
    with Image.open(picture["PICTURE"]) as image:
        assert image.info[picture["LINES"]] == lines[0]
    assert re.search(r"^picture: demo\b", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.long
def test_every_block_of_the_tutorial_of_text_runs_as_pasted(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "docs" / "tutorials" / "text.md").read_text(), re.S)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    program = "\n".join(text for kind, text in blocks if kind == "python")
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    right, refused = ran.stdout.strip().splitlines()
    assert float(right) > 0.9
    assert re.match(r"shard 'company-c\.shard' embedded the probe otherwise than shard 'company-a\.shard'", refused)
    for kind, text in blocks:
        if kind == "":
            subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "site.shard" / "manifest.json").exists()


def test_the_first_job_s_task_file_is_read(tmp_path: Path) -> None:
    from workers.run.task_file import read_task_file

    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "tutorials" / "first-job.md").read_text(), re.S)
    (tmp_path / "task.toml").write_text(block)
    assert read_task_file(tmp_path / "task.toml").task.epsilon == 0.5


def test_the_backbone_on_its_page_is_read(tmp_path: Path) -> None:
    from feature_store.backbones.spec import read_spec

    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "how-to" / "backbone.md").read_text(), re.S)
    (tmp_path / "backbone.toml").write_text(block)
    assert read_spec(tmp_path / "backbone.toml").architecture == "mobilenetv2_100"
