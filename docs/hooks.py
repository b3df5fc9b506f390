"""MkDocs hooks: generate pages from the project's own sources, rewrite their links, and draw diagrams.

The home page is the README, and the documents of the repository's root become pages. So do the notebooks of the
tutorials. The command reference comes from the commands, the REST reference from the OpenAPI document, the errors from
their classes, and the byte vectors from the file that the tests check. Links in the sources name files of the
repository, so that they also work on the code's host; the hooks rewrite them for the site.

A block of Mermaid becomes an SVG in the page while the site is built. So a page fetches no script, and shows its
diagrams in a closed network and on paper.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
import zlib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
VECTORS = "<!-- the byte vectors of tests/golden/wire_vectors.toml -->"
OF_ROOT = ("ARCHITECTURE.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Draw blocks of Mermaid."""
    fence = {"name": "mermaid", "class": "diagram", "format": diagram}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def diagram(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:  # noqa: ARG001
    """Return a Mermaid diagram as SVG, drawn by Mermaid itself in an embedded engine.

    Raises:
        SuperFencesException: it is no Mermaid. Without this class the block would silently stay text.
    """
    import mermaidx
    from pymdownx.superfences import SuperFencesException

    try:
        svg = str(mermaidx.render(source).svg())
    except RuntimeError as error:
        raise SuperFencesException(f"a diagram cannot be drawn: {error}") from error
    # Styles of a diagram apply within its id, so each on a page needs its own.
    own = re.search(r'<svg[^>]*\bid="([^"]+)"', svg)
    if own is not None:
        svg = svg.replace(own[1], f"diagram-{zlib.crc32(source.encode()):08x}")
    return f'<div class="{css_class}">{svg}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of something else."""
    made = {name: _of_root((ROOT / name).read_text()) for name in OF_ROOT}
    made["index.md"] = _of_root((ROOT / "README.md").read_text())
    made["LICENSE.md"] = "# License\n\n```\n" + (ROOT / "LICENSE").read_text() + "\n```\n"
    made |= {f"tutorials/{path.stem}.md": notebook(path) for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")}
    made |= command_line()
    made |= rest()
    made["reference/errors.md"] = errors()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links out of this folder lead to the pages made of those documents; vectors stand where a page wants them."""
    if VECTORS in markdown:
        markdown = markdown.replace(VECTORS, vectors())
    markdown = re.sub(r"\]\(([\w./-]+)\.ipynb\)(?!\{)", r"](\1.md)", markdown)
    return re.sub(rf"\]\((?:\.\./)+({'|'.join(map(re.escape, OF_ROOT))})", _up(page.file.src_uri), markdown)


def _up(uri: str) -> Any:
    steps = "../" * uri.count("/")
    return lambda found: f"]({steps}{found[1]}"


def _of_root(text: str) -> str:
    """A document of the root as if it lay in this folder."""
    return re.sub(r"\]\(docs/", "](", text).replace("](LICENSE)", "](LICENSE.md)").replace("](README.md", "](index.md")


def notebook(path: Path) -> str:
    """A notebook as a page, its cells in order, with the way to the file itself behind its title."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n[Open it in Jupyter: {path.name}]({path.name}){{download}}\n{rest}\n"


def command_line() -> dict[str, str]:
    """Every command with its options: a page for each group of `labeler --help`, and one that leads there."""
    from workers.commands.catalog import CATALOG, GROUPS, load_commands

    commands, made = load_commands(), {}
    lead = [
        "# Command line\n\nEvery command has `--help` with an example, and most have `--json` for programs. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 75 try again. `labeler --version` tells the version; "
        'a shell completes commands after `eval "$(_LABELER_COMPLETE=source_bash labeler)"` (`source_zsh`, '
        "`source_fish`).\n"
    ]
    for title, names in GROUPS.items():
        page = f"cli/{title.split()[0].lower()}.md"
        parts = [f"# {title}\n"]
        lead += [f"## [{title}]({page})\n", "| command | what |", "|---|---|"]
        for name in names:
            parts += _command([name], commands[name])
            lead.append(f"| [`labeler {name}`]({page}#labeler-{name}) | {CATALOG[name].summary} |")
        made[f"reference/{page}"] = "\n".join(parts)
        lead.append("")
    return made | {"reference/cli.md": "\n".join(lead)}


def _command(words: list[str], command: Any) -> list[str]:
    inner = getattr(command, "commands", {})
    parts = [f"{'#' * (1 + len(words))} labeler {' '.join(words)}\n", _prose(command.help or ""), ""]
    options = [one for one in command.params if getattr(one, "hidden", False) is False]
    if options:
        parts += ["| option | what |", "|---|---|"]
        for one in options:
            names = (
                ", ".join(f"`{name}`" for name in one.opts)
                if one.param_type_name == "option"
                else f"`{one.name.upper()}`"
            )
            required = " (required)" if one.required else ""
            said = (getattr(one, "help", "") or "").replace("|", "\\|").replace("\n", " ")
            parts.append(f"| {names}{required} | {said} |")
        parts.append("")
    for name, below in inner.items():
        parts += _command([*words, name], below)
    return parts


def _prose(text: str) -> str:
    """Help of a command; what would be an empty link or HTML in Markdown is shown as it is typed."""
    return re.sub(r"<(?=[a-z/])", "&lt;", text.replace("\b\n", ""))


def rest() -> dict[str, str]:
    """The REST interface with the files of Swagger UI, of the document of a coordinator that is never asked anything.

    The document is in a script, so that the page works from a folder, too. References in it are read against an
    address that is never asked, because those of files are refused.
    """
    from api.app import create_app
    from api.coordinator.config import read_config
    from api.coordinator.service import Coordinator
    from api.documentation import SWAGGER, SWAGGER_FILES
    from workers.homes.new import make_coordinator_home

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        make_coordinator_home(home)
        settings = home / "coordinator.toml"
        settings.write_text(re.sub(r"(?m)^redis_url.*", 'redis_url = "redis://127.0.0.1:9/0"', settings.read_text()))
        coordinator = Coordinator.open(read_config(settings))
        try:
            document = create_app(coordinator).openapi()
        finally:
            coordinator.stop()
    routes = "\n".join(
        f"* `{method.upper()} {path}`: {way['summary']}"
        for path, ways in document["paths"].items()
        for method, way in ways.items()
    )
    shown = {"spec": document, "dom_id": "#swagger-ui", "supportedSubmitMethods": []}
    page = (
        "# REST\n\nEvery route, and below all of them with examples. A running service shows the latter at `/api`, "
        "without internet, and the document it is made of at `/openapi.json`. Send a token as `Authorization: Bearer "
        f'lab_...`.\n\n{routes}\n\n<link rel="stylesheet" href="swagger-ui.css">\n<div id="swagger-ui"></div>\n'
        '<script src="swagger-ui-bundle.js"></script>\n<script src="rest.js"></script>\n'
    )
    base = '.specActions.updateUrl("https://labels.example.org/openapi.json")'
    made = {"reference/rest.md": page, "reference/rest.js": f"SwaggerUIBundle({json.dumps(shown)}){base}\n"}
    return made | {f"reference/{name}": (SWAGGER / name).read_text() for name in SWAGGER_FILES}


def errors() -> str:
    """The tree of errors, and for each its name in problem documents, its status and its exit code."""
    import labeler.errors as module
    from api.problems import PROBLEMS

    tree = (module.__doc__ or "").split("\n\n")[1]
    rows = []
    for name in re.findall(r"── ([A-Z]\w+)", tree):
        error = getattr(module, name)
        status, title = next(PROBLEMS[kind] for kind in error.__mro__ if kind in PROBLEMS)
        rows.append(
            f"| `{name}` | `urn:labeler:problem:{error.problem_type}` | {status} | {error.exit_code} | {title} |"
        )
    return (
        "# Errors\n\nEverything that is raised on purpose is in one tree. A message says what was wrong, the bound, "
        "what was found and what to do next; never a vote, a share, a private label or a private feature.\n\n"
        f"```\n{tree}\n```\n\n"
        "| error | type in a problem document | HTTP | exit | title |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def vectors() -> str:
    """The byte vectors, of the file that tests/golden/test_wire_vectors.py checks."""
    found = tomllib.loads((ROOT / "tests" / "golden" / "wire_vectors.toml").read_text())
    parts = []
    for kind, ones in found.items():
        parts.append(f"### {kind}\n")
        for one in ones:
            data = one.get("text") or one["hex"] + (f"  then {one['then']}" if "then" in one else "")
            verdict = (
                "read"
                if "refused" not in one
                else f"refused, `{one['refused'][0]}`" + (f": {one['refused'][1]}" if one["refused"][1] else "")
            )
            parts.append(f"**{one['name']}**: {verdict}\n\n```\n{data}\n```\n")
    return "\n".join(parts)
