"""Small changes of the code that decides about budgets, one at a time, and whether any test notices (`make mutation`).

mutmut makes the changes. Running them is done here, because its own runner collects the tests again for each change
and starts a named module from nothing. Here a process loads the changed module and collects its tests once, and runs
none of them; each change is then a fork of it that stops at the first test that fails. So a change costs what the
tests cost that touch its function, and no answer kept in memory passes from one change to the next.

Results are appended to `mutants/MODULE.jsonl` by what was changed: a run that was cut short goes on where it was, and
a function that was edited is run again. What survived before is run again too (there may be new tests), except what
`tests/mutation_explained.toml` explains line by line. Values outside of functions are not changed by mutmut, and a
function that runs while modules are loaded has run before any change: a test must call it again.
"""

from __future__ import annotations

import ast
import difflib
import gc
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "mutants"
EXPLAINED = Path(__file__).parent / "mutation_explained.toml"

EXAMPLES = 15
"""Examples of a property, at most, and steps of a model: a change that shows in one of a hundred wants its own test."""

SECONDS_MORE, TIMES_AS_LONG, WALL_SECONDS = 3, 5, 90
"""Processor time that the tests of one change may take beyond what they take on the code as it is, and time by the
clock without which a change counts as stuck: either is noticed by anyone who waits."""

NOTICED, SURVIVED, STUCK, UNTESTED = "killed", "survived", "time limit", "no test"


@dataclass(frozen=True)
class Change:
    """One change of one function: `name` is mutmut's, `digest` of both texts of the function, `diff` the lines."""

    name: str
    function: str
    digest: str
    diff: str


@dataclass(frozen=True)
class Result:
    """The outcome of one change."""

    digest: str
    function: str
    diff: str
    outcome: str
    by: str = ""
    seconds: float = 0.0


def changes_of(module: str) -> tuple[str, list[Change]]:
    """The text of a module with all its changes in it, and the changes."""
    from mutmut.mutation.file_mutation import mutate_file_contents

    path = ROOT / (module.replace(".", "/") + ".py")
    mutated = mutate_file_contents(str(path.relative_to(ROOT)), path.read_text())
    texts = {
        n.name: ast.unparse(n).splitlines() for n in ast.walk(ast.parse(mutated.code)) if isinstance(n, ast.FunctionDef)
    }
    found = []
    for name in mutated.mutant_names:
        function = name.partition("__mutmut_")[0]
        old, new = ([line.replace(n, function) for line in texts[n]] for n in (f"{function}__mutmut_orig", name))
        lines = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
        digest = hashlib.sha256("\n".join([*old, "", *new]).encode()).hexdigest()[:16]
        found.append(
            Change(f"{module}.{name}", function, digest, "\n".join(f"{line[0]} {line[2:].strip()}" for line in lines))
        )
    return mutated.code, found


class ChangedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from its changed text in place of its file."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.text = module, text

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        origin = str(ROOT / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, origin=origin)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = module.__spec__.origin if module.__spec__ else None
        exec(compile(self.text, f"<changes of {self.module}>", "exec"), module.__dict__)


@dataclass
class Runner:
    """The pytest plugin that runs the tests of each change in a fork of the process that collected them."""

    module: str
    changes: list[Change]
    scratch: Path
    results: list[Result] = field(default_factory=list)
    failed: str = ""
    why: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed, self.why = report.nodeid, report.longreprtext

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            _few_examples(item)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from tests import quick_tables  # not before the changed module can be loaded

        _journals_in_memory()
        quick_tables.undo()
        gc.freeze()
        touched, seconds = self._touch(session)
        kills: Counter[str] = Counter()
        by_id = {item.nodeid: item for item in session.items}
        everything = sorted(session.items, key=lambda item: seconds[item.nodeid])
        said = self._run(Change("", "", "", ""), everything, SECONDS_MORE + TIMES_AS_LONG * sum(seconds.values()))
        if said != (SURVIVED, ""):
            pytest.exit(f"no change at all was noticed, in another order of the tests: {said}", returncode=1)
        with (RESULTS / f"{self.module}.jsonl").open("a") as file:
            for change in self.changes:
                ids = sorted(touched.get(change.function, ()), key=lambda i: seconds[i] / (1 + kills[i]))
                started = time.monotonic()
                limit = SECONDS_MORE + TIMES_AS_LONG * sum(seconds[i] for i in ids)
                outcome, by = self._run(change, [by_id[i] for i in ids], limit) if ids else (UNTESTED, "")
                kills[by] += 1
                result = Result(
                    change.digest, change.function, change.diff, outcome, by, round(time.monotonic() - started, 2)
                )
                self.results.append(result)
                file.write(json.dumps(asdict(result)) + "\n")
                file.flush()
        return True

    def _touch(self, session: pytest.Session) -> tuple[dict[str, set[str]], dict[str, float]]:
        """Which tests run which function, and their processor time, from one run of all in a fork, which must pass."""
        from mutmut.mutation.trampoline import set_mutant_under_test
        from mutmut.state import state

        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            touched: dict[str, list[str]] = {}
            seconds = {}
            self._enter_child(session.config)
            set_mutant_under_test("stats")
            for item, following in zip(session.items, [*session.items[1:], None], strict=True):
                state()._stats.clear()
                before = time.process_time()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                seconds[item.nodeid] = time.process_time() - before
                if self.failed:
                    break
                touched[item.nodeid] = [
                    name.rpartition(".")[2] for name in state()._stats if name.startswith(f"{self.module}.x")
                ]
            with os.fdopen(writer, "w") as pipe:
                json.dump((touched, seconds, self.failed, self.why), pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            read, seconds, failed, why = json.load(pipe)
        os.waitpid(child, 0)
        if failed:
            pytest.exit(f"{failed} fails on the code as it is\n{why}", returncode=1)
        by_function: dict[str, set[str]] = {}
        for test, functions in read.items():
            for function in functions:
                by_function.setdefault(function, set()).add(test)
        print(f"{self.module}: {len(seconds)} tests, {sum(seconds.values()):.1f} s of processor time", flush=True)
        return by_function, seconds

    def _run(self, change: Change, items: list[pytest.Item], limit: float) -> tuple[str, str]:
        from mutmut.mutation.trampoline import set_mutant_under_test

        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            used = int(time.process_time() + limit) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (used, used + 1))
            self._enter_child(items[0].config)
            set_mutant_under_test(change.name)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failed:
                    break
            os.write(writer, self.failed.encode() or b"-")
            os._exit(0)
        os.close(writer)
        deadline = time.monotonic() + WALL_SECONDS + 4 * limit
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        for left in self.scratch.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        return (STUCK, "") if not said else (SURVIVED, "") if said == "-" else (NOTICED, said)

    def _enter_child(self, config: pytest.Config) -> None:
        """A separate folder for what its tests write, and nothing on the terminal."""
        own = Path(tempfile.mkdtemp(dir=self.scratch))
        tempfile.tempdir = str(own)
        config._tmp_path_factory._basetemp = own  # type: ignore[attr-defined]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, config.get_terminal_writer()._file.fileno())


def _journals_in_memory() -> None:
    """A journal refuses a folder in memory, by the table of mounted file systems: here it sees none."""
    storage = sys.modules.get("labeler.system.files")
    if storage is not None:
        storage.check_synced.__kwdefaults__["mounts"] = Path(os.devnull)


def _few_examples(item: pytest.Item) -> None:
    """A property is tried on few examples, which are always the same, and a failing one is not made smaller."""
    from hypothesis import Phase, settings

    def few(of: settings) -> settings:
        return settings(
            of,
            max_examples=min(of.max_examples, EXAMPLES),
            stateful_step_count=min(of.stateful_step_count, EXAMPLES),
            phases=(Phase.explicit, Phase.generate),
            database=None,
            derandomize=True,
        )

    for holder, name in (
        (getattr(item, "function", None), "_hypothesis_internal_use_settings"),
        (getattr(item, "cls", None), "settings"),
    ):
        if isinstance(getattr(holder, name, None), settings):
            setattr(getattr(holder, "__func__", holder), name, few(getattr(holder, name)))


def explained(result: Result, module: str) -> bool:
    """Return whether `mutation_explained.toml` says why this change may survive."""
    return result.diff in _explained().get(f"{module}.{result.function}", ())


@cache
def _explained() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for entry in tomllib.loads(EXPLAINED.read_text())["explained"]:
        found.setdefault(entry["where"], set()).update(entry["changes"])
    return found


def results_of(module: str) -> dict[str, Result]:
    """The last result of each change of a module."""
    file = RESULTS / f"{module}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {(result := Result(**json.loads(line))).digest: result for line in lines}


def report(module: str, changes: list[Change], show: bool) -> bool:
    """One row of the table, and what survives without an explanation; true where that is nothing and all was run."""
    known = results_of(module)
    results = [known[change.digest] for change in changes if change.digest in known]
    count = Counter(result.outcome for result in results)
    survived = [result for result in results if result.outcome in (SURVIVED, UNTESTED)]
    open_ones = [result for result in survived if not explained(result, module)]
    if show:
        for result in open_ones:
            print(f"\n{module}.{result.function}: {result.outcome}\n{result.diff}")
    seconds = sum(result.seconds for result in results)
    print(
        f"| `{module}` | {len(changes)} | {count[NOTICED]} | {count[STUCK]} | {len(survived)} |"
        f" {len(survived) - len(open_ones)} | {len(changes) - len(results)} | {seconds:.0f} s |",
        flush=True,
    )
    return not open_ones and len(results) == len(changes)


def run(module: str, tests: list[str], *, only_new: bool) -> None:
    """Run what has no result yet, and what survived unexplained, in this process, which is used up by it."""
    text, changes = changes_of(module)
    known = results_of(module)
    again = [r.digest for r in known.values() if r.outcome in (SURVIVED, UNTESTED) and not explained(r, module)]
    due = [c for c in changes if c.digest not in known] + [c for c in changes if c.digest in again and not only_new]
    if not due:
        return
    sys.meta_path.insert(0, ChangedModule(module, text))
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        runner = Runner(module, due, Path(scratch))
        arguments = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--tb=native",
            "-k",
            "not postgresql",
            "-m",
            "not long",
            *tests,
        ]
        if status := pytest.main(arguments, plugins=[runner]):
            raise SystemExit(f"{module}: the tests could not be run (pytest ended with {status})")


def main(arguments: list[str]) -> int:
    """`python -m tests.mutation [--new | --report] [MODULE ...]`: run what is due (`--new`: not the survivors again;
    `--report`: nothing) and report; ends with 0 where every change was run, and every survivor is explained."""
    os.chdir(ROOT)
    tests: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutation"]["tests"]
    RESULTS.mkdir(exist_ok=True)
    only_report = "--report" in arguments
    wanted = [a for a in arguments if not a.startswith("-")] or list(tests)
    if unknown := [module for module in wanted if module not in tests]:
        raise SystemExit(f"no tests are named for {unknown}: [tool.mutation.tests] in pyproject.toml has {list(tests)}")
    good = True
    for module in wanted:
        if not only_report and not (child := os.fork()):  # a process for each: its module is loaded in a changed form
            run(module, tests[module], only_new="--new" in arguments)
            sys.stdout.flush()
            os._exit(0)
        if not only_report and os.waitpid(child, 0)[1]:
            good = False
        good &= report(module, changes_of(module)[1], show=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
