"""Plant one bug at a time in the package, and report those that the tests do not find.

    python tools/mutation.py --count 200 --seed 0 [--only lattice/] [--report survivors.txt]

A bug is another operator, a constant off by one, a condition the other way round, or `and` for
`or`. Text, errors and annotations are left as they are. Every module has its turn before any has a
second one. The tests of a module are `tests/test_NAME.py`, those of its folder, and the files that
import it, shortest first; the first failure ends them. Bugs are planted in a copy of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    "lattice/cpu/": ["lattice", "lattice_loss", "rnnt_loss", "distillation"],
    "lattice/": ["lattice", "lattice_loss", "variants"],
    "decoding/cpu/": ["decoding", "stream_search"],
    "decoding/": ["decoding", "open_search"],
    "kernels/simd/": ["simd", "lattice", "lstm"],
    "kernels/": ["backends"],
    "audio/": ["features", "audio_stream"],
    "alignment/": ["phone_hmm", "alignment"],
    "data/": ["manifest", "corpus"],
    "model/": ["model", "transcripts"],
    "training/": ["training", "recipe"],
    "analysis/": ["analysis"],
    "export/": ["export"],
    "http/": ["web", "serving"],
    "web/": ["web"],
    "serving/": ["serving"],
    "cli/": ["cli", "cli_search"],
    "settings": ["recipe", "cli"],
    "": ["model", "training"],
}
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
    start: int  # offsets in the file's bytes
    end: int
    text: str

    def plant(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        before = source[self.start : self.end].decode()
        line = source.splitlines()[self.line - 1].decode().strip()
        return f"{self.path}:{self.line}: {before!r} -> {self.text!r} in: {line}"


# --- Bugs ---------------------------------------------------------------------------------------


def bugs(path: str, source: bytes) -> Iterator[Bug]:
    """Yield every bug that can be planted in a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def bug(node: ast.expr, text: str) -> Bug:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Bug(path, node.lineno, start, end, text)

    def between(left: ast.expr, right: ast.expr, text: str) -> Bug | None:
        """Replace the operator between two expressions."""
        start = starts[(left.end_lineno or 0) - 1] + (left.end_col_offset or 0)
        end = starts[right.lineno - 1] + right.col_offset
        found = re.search(rb"(?:not\s+in|is\s+not|and|or|in|is|[-+*/%<>=!&|]+)", source[start:end])
        if found is None or b"#" in source[start:end]:
            return None
        return Bug(path, right.lineno, start + found.start(), start + found.end(), text)

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


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code, without errors, printed text, annotations and decorators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func) in ("print", "cast", "TypeVar"):
            continue
        if isinstance(child, ast.arg):  # its annotation
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
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
        if OUT_OF_REACH.search(name) or only not in name:
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


# --- Tests --------------------------------------------------------------------------------------


def tests_of(path: str) -> list[str]:
    """Return the test files of a module: named after it, of its folder, and importing it."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    *_, parent, stem = f".{module}".split(".")
    names = [f"test_{stem}", f"test_{parent}_{stem}", f"test_{stem}s"]
    named = [f"tests/{name}.py" for name in names]
    package, _, last = f"{PACKAGE}.{module}".rpartition(".")
    forms = rf"from {re.escape(package)}(\.{last} import| import .*\b{last}\b)"
    files = sorted((ROOT / "tests").glob("test_*.py"), key=lambda file: file.stat().st_size)
    importing = [f"tests/{file.name}" for file in files if re.search(forms, file.read_text())]
    of_folder = next(names for prefix, names in TESTS.items() if path.startswith(prefix))
    found = [*named, *(f"tests/test_{name}.py" for name in of_folder), *importing]
    return [file for file in dict.fromkeys(found) if (ROOT / file).exists()]


def found_by_tests(folder: Path, files: list[str], seconds: float) -> str:
    """Run tests in a copy of the checkout, in a forked process; return how they ended.

    PyTorch and the rest have been imported, so that the fork needs to import our package alone.
    """
    child = os.fork()
    if child == 0:
        try:
            _run_tests(folder, files)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", 5: "no tests", 99: "not run"}.get(code, "found")
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "found by the time limit"


def _run_tests(folder: Path, files: list[str]) -> None:
    """Run tests in this process, and end it with their exit code."""
    import pytest

    os.setsid()
    os.chdir(folder)
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    os.environ["PYTHONPATH"] = str(folder)
    options = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    os._exit(int(pytest.main([*options, *files])))


def copy_checkout(folder: Path) -> None:
    names = [PACKAGE, "tests", "recipes", "docs", "benchmarks", "examples", "tools"]
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
    parser.add_argument("--only", default="", help="modules whose path has this in it")
    parser.add_argument("--files", type=int, default=6, help="at most so many test files for each")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit for each bug")
    parser.add_argument("--minutes", type=float, default=600.0, help="limit for all")
    parser.add_argument("--report", type=Path, help="a file for the bugs that were not found")
    parser.add_argument("--list", action="store_true", help="list the bugs, and plant none")
    arguments = parser.parse_args()
    chosen = sample(arguments.count, arguments.seed, arguments.only)
    if arguments.list:
        for bug in chosen:
            source = (ROOT / PACKAGE / bug.path).read_bytes()
            print(bug.describe(source), tests_of(bug.path))
        return
    for name in ("numba", "numpy", "pytest", "soundfile", "torch"):
        __import__(name)
    results: dict[str, int] = {}
    start = time.monotonic()
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        folder = Path(temporary) / "checkout"
        copy_checkout(folder)
        for number, bug in enumerate(chosen, 1):
            if time.monotonic() - start > 60 * arguments.minutes:
                print(f"stopped after {number - 1} of {len(chosen)} bugs")
                break
            path = folder / PACKAGE / bug.path
            source, files = path.read_bytes(), tests_of(bug.path)[: arguments.files]
            began = time.monotonic()
            link_kernels(folder)
            path.write_bytes(bug.plant(source))
            try:
                result = found_by_tests(folder, files, arguments.seconds)
            finally:
                path.write_bytes(source)
            results[result] = results.get(result, 0) + 1
            line = f"{result}: {bug.describe(source)} [{' '.join(files)}]"
            print(f"{number}/{len(chosen)} {time.monotonic() - began:.0f} s {line}", flush=True)
            if result in ("survived", "no tests") and arguments.report is not None:
                with arguments.report.open("a") as report:
                    report.write(line + "\n")
    total = sum(results.values())
    for result, count in sorted(results.items()):
        print(f"{count} of {total} {result} ({count / total:.1%})")


if __name__ == "__main__":
    main()
