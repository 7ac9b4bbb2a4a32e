"""Plant one bug at a time in the package, and report those that the tests do not find.

    python tools/mutation.py --count 200 --seed 0 [--only lattice/] [--report survivors.txt]
    python tools/mutation.py --replant survivors.txt

A bug is another operator, a constant off by one, a condition the other way round, or `and` for
`or`. Text, errors and annotations are left as they are, and so is what a test could only repeat:
numbers in constants (`SECONDS = 10`), defaults of settings, sizes of figures and fonts, colours of
terminals, and `strict` of zip. Every module has its turn before any has a second one.

The tests of a module are `tests/test_NAME.py`, the files that import it, shortest first, and those
of its folder. Of these, the tests that call the function with the bug are run, quickest first;
which tests call it is found once, and kept in `build/calls`. The first failure ends them, and
counts if the test passes without the bug. Bugs are planted in a copy of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "transduce"
# Without a GPU, or without Ray, no test reaches these.
OUT_OF_REACH = re.compile(
    r"(lstm|lattice|decoding)/(cuda|tensor_cores|utterances)\.py|kernels/nvrtc|audio/batched"
    r"|cli/ray_engine|__main__"
)
# Tests of modules that no test file is named after or imports, and that others reach.
TESTS = {
    "lstm/": ["lstm", "networks"],
    "lattice/cpu/detours": ["alignment"],
    "lattice/cpu/": ["lattice", "lattice_loss", "rnnt_loss", "distillation"],
    "lattice/": ["lattice", "lattice_loss", "variants"],
    "model/signature": ["signature", "model"],
    "decoding/cpu/": ["decoding", "stream_search"],
    "decoding/": ["decoding", "open_search"],
    "kernels/simd/": ["simd", "lattice", "lstm"],
    "kernels/": ["backends"],
    "audio/": ["features", "audio_stream"],
    "alignment/": ["phone_hmm", "alignment"],
    "data/": ["manifest", "corpus", "kinds"],
    "graphones/": ["graphones"],
    "model/formats": ["transcripts", "alignment", "serving"],
    "model/": ["model", "transcripts", "checkpoint"],
    "training/": ["training", "recipe"],
    "analysis/": ["analysis"],
    "export/": ["export"],
    "http/": ["web", "serving"],
    "web/": ["web"],
    "serving/": ["serving"],
    "__init__": ["lines", "promises"],
    "cli/align": ["alignment"],
    "cli/explore": ["web", "cli"],
    "cli/serve": ["serving"],
    "cli/speak": ["speech"],
    "cli/plot": ["analysis", "cli"],
    "cli/train": ["cli", "demo", "graphones"],
    "cli/": ["cli", "cli_search"],
    "settings": ["recipe", "cli"],
    "": ["model", "training"],
}
COSMETIC = ("figsize", "fontsize", "highlight")  # arguments
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.Pow: "*", ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """A change of one place of a file."""

    path: str  # in the package
    line: int
    column: int
    start: int  # offsets in the file's bytes
    end: int
    text: str

    def plant(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        before = source[self.start : self.end].decode()
        line = source.splitlines()[self.line - 1].decode().strip()
        return f"{self.path}:{self.line}:{self.column}: {before!r} -> {self.text!r} in: {line}"


# --- Bugs ---------------------------------------------------------------------------------------


def bugs(path: str, source: bytes) -> Iterator[Bug]:
    """Yield every bug that can be planted in a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def bug(node: ast.expr, text: str) -> Bug:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Bug(path, node.lineno, node.col_offset + 1, start, end, text)

    def between(left: ast.expr, right: ast.expr, text: str) -> Bug | None:
        """Replace the operator between two expressions."""
        start = starts[(left.end_lineno or 0) - 1] + (left.end_col_offset or 0)
        end = starts[right.lineno - 1] + right.col_offset
        found = re.search(rb"(?:not\s+in|is\s+not|and|or|in|is|[-+*/%<>=!&|]+)", source[start:end])
        if found is None or b"#" in source[start:end]:
            return None
        start, end = start + found.start(), start + found.end()
        line = source.count(b"\n", 0, start) + 1
        return Bug(path, line, start - starts[line - 1] + 1, start, end, text)

    for node in _code(ast.parse(source)):
        new: Bug | None = None
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in COMPARISONS:
                new = between(left, right, COMPARISONS[type(operator)])
            case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
                if not any(
                    isinstance(x, ast.Constant | ast.JoinedStr) and _is_text(x)
                    for x in (left, right)
                ):
                    new = between(left, right, OPERATORS[type(operator)])
            case ast.BoolOp(operator, [left, right, *_]):
                new = between(left, right, "or" if isinstance(operator, ast.And) else "and")
            case ast.UnaryOp(ast.Not(), operand):
                new = bug(node, f"({ast.unparse(operand)})")
            case ast.Constant(bool(value)):
                new = bug(node, str(not value))
            case ast.Constant(int(value)):
                new = bug(node, str(value + 1 if value < 16 else 2 * value))
            case ast.Constant(float(value)):
                new = bug(node, str(value * 2 + 1))
        if new is not None:
            yield new


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_chosen(assignment: ast.Assign) -> bool:
    """Return whether a constant is nothing but numbers, which a test could only repeat."""
    names = [
        x.id for target in assignment.targets for x in ast.walk(target) if isinstance(x, ast.Name)
    ]
    computed = (ast.Name, ast.Call, ast.Attribute)
    return all(map(str.isupper, names)) and not any(
        isinstance(x, computed) for x in ast.walk(assignment.value)
    )


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code, without errors, printed text, annotations and decorators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func) in ("print", "cast", "TypeVar"):
            continue
        if isinstance(child, ast.arg):  # its annotation
            continue
        if isinstance(child, ast.keyword) and child.arg in ("strict", *COSMETIC):
            continue
        if isinstance(node, ast.Module) and isinstance(child, ast.Assign) and _is_chosen(child):
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None and not isinstance(child.value, ast.Constant):
                yield child.value
                yield from _code(child.value)
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            child.decorator_list = []
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            child.returns = None
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _code(child)


def sample(count: int, seed: int, only: str) -> list[Bug]:
    """Draw bugs, one module after the other in random order, until there are enough."""
    draw, by_module = random.Random(seed), []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = path.relative_to(ROOT / PACKAGE).as_posix()
        if OUT_OF_REACH.search(name) or not re.search(only, name):
            continue
        found = list(bugs(name, path.read_bytes()))
        draw.shuffle(found)
        if found:
            by_module.append(found)
    chosen: list[Bug] = []
    while by_module and len(chosen) < count:
        draw.shuffle(by_module)
        chosen += [found.pop() for found in by_module]
        by_module = [found for found in by_module if found]
    return chosen[:count]


def replanted(report: Path) -> list[Bug]:
    """Return the bugs that a report lists and that can still be planted."""
    chosen = []
    for line in report.read_text().splitlines():
        path = line.split(": ")[1].split(":")[0]
        source = (ROOT / PACKAGE / path).read_bytes()
        chosen += [bug for bug in bugs(path, source) if line.endswith(bug.describe(source))]
    return chosen


# --- Tests --------------------------------------------------------------------------------------


def tests_of(path: str, most: int = 4) -> list[str]:
    """Return the test files of a module: named after it, importing it, and of its folder."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    *_, parent, stem = f".{module}".split(".")
    names = [f"test_{stem}", f"test_{parent}_{stem}", f"test_{stem}s"]
    named = [f"tests/{name}.py" for name in names]
    package, _, last = f"{PACKAGE}.{module}".rpartition(".")
    forms = rf"from {re.escape(package)}(\.{last} import| import .*\b{last}\b)"
    files = sorted((ROOT / "tests").glob("test_*.py"), key=lambda file: file.stat().st_size)
    importing = [f"tests/{file.name}" for file in files if re.search(forms, file.read_text())]
    of_folder = next(names for prefix, names in TESTS.items() if path.startswith(prefix))
    found = [*named, *importing[:most], *(f"tests/test_{name}.py" for name in of_folder)]
    return [file for file in dict.fromkeys(found) if (ROOT / file).exists()]


class Checkout:
    """A copy of the checkout, in which tests run."""

    def __init__(self, folder: Path, calls: Path) -> None:
        self.folder = folder
        self._calls = calls  # a folder that lasts: which functions each test calls
        self._passes: dict[str, bool] = {}  # tests that have run without a bug
        calls.mkdir(parents=True, exist_ok=True)
        copy_checkout(folder)

    def result(self, bug: Bug, seconds: float) -> str:
        """Plant a bug, run its tests file by file, and return how they end."""
        has_run = False
        for file in tests_of(bug.path):
            result = self._result(bug, self.tests(bug, file, seconds), seconds)
            if result not in ("survived", "no tests"):
                return result
            has_run |= result == "survived"
        return "survived" if has_run else "no tests"

    def _result(self, bug: Bug, tests: list[str], seconds: float) -> str:
        """Plant a bug, and return how the tests end; leave out tests that fail without it."""
        path = self.folder / PACKAGE / bug.path
        source = path.read_bytes()
        while True:
            chosen = [test for test in tests if self._passes.get(test, True)]
            if not chosen:
                return "no tests"
            link_kernels(self.folder)
            path.write_bytes(bug.plant(source))
            try:
                result, failed = self._run(chosen, 2 * seconds)
            finally:
                path.write_bytes(source)
            if not failed:
                return result
            if failed not in self._passes:
                link_kernels(self.folder)
                self._passes[failed] = self._run([failed], 2 * seconds)[0] == "survived"
            if self._passes[failed]:
                return f"{result} by {failed}"

    def tests(self, bug: Bug, file: str, seconds: float) -> list[str]:
        """Return the tests of a file that call the function of a bug, the quickest first.

        Calls of compiled functions cannot be seen: tests that call others of their folder are
        taken, as are those that call any function of the file for a bug outside of functions.
        """
        function, compiled = enclosing_function((ROOT / PACKAGE / bug.path).read_bytes(), bug.line)
        if compiled:
            called = re.compile(re.escape(bug.path.rpartition("/")[0]) + "/")
        else:
            called = re.compile(re.escape(f"{bug.path}:") + (f"{function}$" if function else ""))
        chosen, total = [], 0.0
        for test, (took, functions) in sorted(self.calls(file).items(), key=lambda one: one[1][0]):
            if any(map(called.match, functions)) and total + took < seconds:
                total += took
                chosen.append(test)
        return chosen

    def calls(self, file: str) -> dict[str, tuple[float, list[str]]]:
        """Return how long each test of a file takes, and the functions that it calls."""
        content = hashlib.sha256((self.folder / file).read_bytes())
        for path in sorted((self.folder / PACKAGE).rglob("*.py")):
            content.update(path.read_bytes())
        kept = self._calls / f"{Path(file).stem}-{content.hexdigest()[:16]}.json"
        if not kept.exists():
            link_kernels(self.folder)
            self._run([file], 600.0, kept)
            if not kept.exists():  # the file takes too long
                kept.write_text("{}")
        result: dict[str, tuple[float, list[str]]] = json.loads(kept.read_text())
        return result

    def _run(self, tests: list[str], seconds: float, calls: Path | None = None) -> tuple[str, str]:
        """Run tests in a forked process; return how they ended, and the test that failed.

        PyTorch and the rest have been imported, so that the fork need import our package alone.
        """
        failed = self.folder / "failed.txt"
        failed.write_text("")
        child = os.fork()
        if child == 0:
            try:
                _run_tests(self.folder, tests, calls)
            except BaseException:
                traceback.print_exc()
                os._exit(99)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                result = {0: "survived", 5: "no tests", 99: "not run"}.get(code, "found")
                return result, failed.read_text()
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "out of time", ""


def enclosing_function(source: bytes, line: int) -> tuple[int, bool]:
    """Return the first line of the function around a line, or 0, and whether it is compiled."""
    found, compiled = 0, False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            if found < first <= line <= (node.end_lineno or 0):
                names = " ".join(ast.unparse(x) for x in node.decorator_list)
                found = first
                compiled |= bool(re.search(r"compiled|njit|intrinsic|overload", names))
    return found, compiled


class _Runner:
    """Run tests in the given order, and write down the first that fails."""

    def __init__(self, folder: Path, tests: list[str]) -> None:
        self._failed = folder / "failed.txt"
        self._rank = {test: rank for rank, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._rank.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed.read_text():
            self._failed.write_text(report.nodeid)


class _Calls:
    """Write down which functions of the package each test calls, itself or in its fixtures."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._package = f"{folder / PACKAGE}/"
        self._kept = kept
        self._seen: set[CodeType] = set()
        self._by_fixture: dict[str, set[CodeType]] = {}
        self._by_test: dict[str, tuple[float, list[str]]] = {}

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._seen.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        before, self._seen = self._seen, set()
        try:
            return (yield)
        finally:
            self._by_fixture.setdefault(fixturedef.argname, set()).update(self._seen)
            self._seen |= before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._seen, start = set(), time.monotonic()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            took = time.monotonic() - start
            for name in getattr(item, "fixturenames", ()):
                self._seen |= self._by_fixture.get(name, set())
            self._by_test[item.nodeid] = (
                took,
                [
                    f"{code.co_filename.removeprefix(self._package)}:{code.co_firstlineno}"
                    for code in self._seen
                    if code.co_filename.startswith(self._package)
                ],
            )

    def pytest_sessionfinish(self) -> None:
        self._kept.write_text(json.dumps(self._by_test))


def _run_tests(folder: Path, tests: list[str], calls: Path | None) -> None:
    """Run tests in this process, and end it with their exit code."""
    os.setsid()
    os.chdir(folder)
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    os.environ["PYTHONPATH"] = str(folder)
    options = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    plugin = _Runner(folder, tests) if calls is None else _Calls(folder, calls)
    options += ["-x"] * (calls is None)
    os._exit(int(pytest.main([*options, *tests], plugins=[plugin])))


def copy_checkout(folder: Path) -> None:
    names = [PACKAGE, "tests", "recipes", "docs", "benchmarks", "examples", "tools", "website"]
    names += ["notebooks"]
    names += [".ci"] * (ROOT / ".ci").exists()
    skip = shutil.ignore_patterns("__pycache__")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder / path.name)


def link_kernels(folder: Path) -> None:
    """Give a copy of the checkout the compiled kernels of this one; a changed one is compiled."""
    kernels = Path(PACKAGE, "__pycache__", "kernels")
    shutil.rmtree(folder / kernels, ignore_errors=True)
    if (ROOT / kernels).is_dir():
        shutil.copytree(ROOT / kernels, folder / kernels, copy_function=os.link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path matches this")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for the tests of a bug")
    parser.add_argument("--minutes", type=float, default=600.0, help="limit for all")
    parser.add_argument("--report", type=Path, help="a file for the bugs that were not found")
    parser.add_argument("--replant", type=Path, help="plant the bugs of this report")
    parser.add_argument("--list", action="store_true", help="list the bugs, and plant none")
    arguments = parser.parse_args()
    if arguments.replant is not None:
        chosen = replanted(arguments.replant)
    else:
        chosen = sample(arguments.count, arguments.seed, arguments.only)
    if arguments.list:
        for bug in chosen:
            source = (ROOT / PACKAGE / bug.path).read_bytes()
            print(bug.describe(source), tests_of(bug.path))
        return
    for name in ("numba", "numpy", "soundfile", "torch"):
        __import__(name)
    results: dict[str, int] = {}
    start = time.monotonic()
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        checkout = Checkout(Path(temporary) / "checkout", ROOT / "build" / "calls")
        for number, bug in enumerate(chosen, 1):
            if time.monotonic() - start > 60 * arguments.minutes:
                print(f"stopped after {number - 1} of {len(chosen)} bugs")
                break
            source = (ROOT / PACKAGE / bug.path).read_bytes()
            began = time.monotonic()
            result = checkout.result(bug, arguments.seconds)
            kind = result.partition(" by ")[0]
            results[kind] = results.get(kind, 0) + 1
            line = f"{result}: {bug.describe(source)}"
            print(f"{number}/{len(chosen)} {time.monotonic() - began:.0f} s {line}", flush=True)
            if kind != "found" and arguments.report is not None:
                with arguments.report.open("a") as report:
                    report.write(line + "\n")
    total = sum(results.values())
    for result, count in sorted(results.items()):
        print(f"{count} of {total} {result} ({count / total:.1%})")


if __name__ == "__main__":
    main()
