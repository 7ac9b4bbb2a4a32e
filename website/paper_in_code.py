"""Write the page "The paper in code": every equation beside the lines that compute it.

A line of code that is an equation ends in a comment such as `# Eq. 16`, and a docstring names the
equations of its function. The page is made of these, so that it says where the code is today.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from equations import SECTIONS, Equation, Section

# Files whose code stands beside the equations, the plainest first; the others are listed below it.
PLAINEST = (
    "transduce/lattice/reference.py",
    "transduce/lstm/reference.py",
    "transduce/networks.py",
    "transduce/lattice/loss.py",
)
ALGORITHM = ("transduce/decoding/reference.py", ("beam_steps", "add_prefixes"))
ALGORITHM_TITLE = "Algorithm 1: the beam search"
MENTION = re.compile(r"Eqs?\.\s+(\d+(?:(?:-|, | and )\d+)*)")
COMMENT = re.compile(r"(?:#|//).*?(?=Eqs?\.\s)")

ALGORITHM_IN_WORDS = """\
1. The beam B holds the empty output, with probability 1.
2. For each frame t, A is the beam of the frame before, and B is empty.
3. Each output y in A gets, besides its own probability, that of every prefix of it in A times the
   probability of emitting the labels between them at t.
4. While B has fewer than W outputs that are more probable than the best in A: take that best one
   out of A; put it into B times the probability of null; and put each of its extensions by a label
   into A, times the probability of that label.
5. Keep the W best of B.
6. After the last frame, return the output of the highest ln Pr(y) / |y|.
"""


@dataclass(frozen=True)
class Place:
    """A line of code that computes equations, and the function around it."""

    path: str  # from the root of the repository
    line: int  # from 1
    numbers: tuple[int, ...]
    function: str  # its qualified name; "" outside of functions
    first: int  # line of the function
    last: int


def equation_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of the equations that a text names: `Eqs. 4-8, 12 and 13` names seven."""
    found: list[int] = []
    for mention in MENTION.findall(text):
        for part in re.split(r", | and ", mention):
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def places(root: Path) -> list[Place]:
    """Return every line of code whose comment names an equation, in all sources."""
    package = root / "transduce"
    files = [*package.rglob("*.py"), *package.rglob("*.cu")]
    return [place for path in sorted(files) for place in places_in(root, path)]


def places_in(root: Path, path: Path) -> Iterator[Place]:
    """Yield the lines of a file whose comments name equations."""
    text = path.read_text()
    spans = functions(text) if path.suffix == ".py" else []
    for number, line in enumerate(text.splitlines(), 1):
        comment = COMMENT.search(line)
        if not comment or not line[: comment.start()].strip():  # a comment alone, or a docstring
            continue
        named = equation_numbers(line[comment.start() :])
        around = [span for span in spans if span[1] <= number <= span[2]]
        function, first, last = around[-1] if around else ("", number, number)
        yield Place(str(path.relative_to(root)), number, named, function, first, last)


def functions(text: str) -> list[tuple[str, int, int]]:
    """Return the name, the first and the last line of every function, outer ones first."""
    found: list[tuple[str, int, int]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, ast.FunctionDef):
                    found.append((name, child.lineno, child.end_lineno or child.lineno))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return found


def described(root: Path) -> dict[int, list[tuple[str, str]]]:
    """Return, for each equation, the file and name of the functions whose docstrings name it."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted((root / "transduce").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            for number in dict.fromkeys(equation_numbers(ast.get_docstring(node) or "")):
                found.setdefault(number, []).append((str(path.relative_to(root)), node.name))
    return found


def plainest(number: int, found: Iterable[Place]) -> Place:
    """Return the place that stands beside an equation: that of the plainest file."""
    own = [place for place in found if number in place.numbers]
    ranked = [place for path in PLAINEST for place in own if place.path == path]
    if not ranked:
        raise LookupError(
            f"no line of {', '.join(PLAINEST)} ends in `# Eq. {number}`; mark the one that "
            "computes it"
        )
    # A line that names this equation alone says more than one that names several.
    return min(ranked, key=lambda place: (PLAINEST.index(place.path), len(place.numbers)))


def algorithm_code(root: Path) -> str:
    """Return the functions of Algorithm 1 as the paper writes it."""
    path, names = ALGORITHM
    text = (root / path).read_text()
    lines, spans = text.splitlines(), {name: span for name, *span in functions(text)}
    if "Algorithm 1" not in "\n".join(lines[slice(spans[names[0]][0] - 1, spans[names[0]][1])]):
        raise LookupError(f"{names[0]} of {path} does not name Algorithm 1")
    return "\n\n\n".join("\n".join(lines[spans[n][0] - 1 : spans[n][1]]) for n in names)


def page(root: Path) -> str:
    """Return the Markdown of all sections and of Algorithm 1."""
    found, names = places(root), described(root)
    titles = [*(section.title for section in SECTIONS), ALGORITHM_TITLE]
    contents = " · ".join(f"[{title}](#{_anchor(title)})" for title in titles)
    parts = [contents, *(_section(root, section, found, names) for section in SECTIONS)]
    path, _ = ALGORITHM
    parts.append(
        f"## {ALGORITHM_TITLE}\n\n"
        f'<div class="equation" markdown>\n\n{ALGORITHM_IN_WORDS}\n</div>\n\n'
        f"{_source_link(path)}\n\n```python\n{algorithm_code(root)}\n```\n\n"
        "[Departures](departures.md) says what the paper leaves open here, and "
        "[cpu/beam.py](../transduce/decoding/cpu/beam.py) has the search in batches, with its "
        "proof."
    )
    return "\n\n".join(parts)


def _section(
    root: Path, section: Section, found: list[Place], names: dict[int, list[tuple[str, str]]]
) -> str:
    """Return the Markdown of a section: equations whose function is the same share its code."""
    groups: list[tuple[Place, list[Equation]]] = []
    for equation in section.equations:
        place = plainest(equation.number, found)
        if groups and (groups[-1][0].path, groups[-1][0].first) == (place.path, place.first):
            groups[-1][1].append(equation)
        else:
            groups.append((place, [equation]))
    parts = [f"## {section.title}"]
    for place, equations in groups:
        shown = "\n".join(_rendered(equation) for equation in equations)
        code = _code(root, place, equations, found)
        parts.append(
            f'<div class="paper" markdown>\n<div class="equation" markdown>\n\n{shown}\n</div>\n'
            f'<div class="computed" markdown>\n\n{code}\n</div>\n</div>'
        )
        parts.append(_elsewhere(place, equations, found, names))
    return "\n\n".join(parts)


def _rendered(equation: Equation) -> str:
    """Return an equation as MathML, with its number and its words."""
    from latex2mathml.converter import convert

    math = convert(equation.tex, display="block")
    return (
        f'<div class="formula" id="eq-{equation.number}">{math}'
        f'<a class="number" href="#eq-{equation.number}">({equation.number})</a></div>\n\n'
        f"{equation.words}\n"
    )


def _code(root: Path, place: Place, equations: list[Equation], found: list[Place]) -> str:
    """Return the function around a place as a code block, with the equations' lines marked."""
    lines = (root / place.path).read_text().splitlines()[place.first - 1 : place.last]
    numbers = {equation.number for equation in equations}
    marked = [
        str(other.line - place.first + 1)
        for other in found
        if (other.path, other.first) == (place.path, place.first) and numbers & set(other.numbers)
    ]
    indent = len(lines[0]) - len(lines[0].lstrip())
    code = "\n".join(line[indent:] for line in lines)
    name = place.function.rpartition(".")[2]
    return (
        f"{_source_link(place.path, place.first)}, `{name}`:\n\n"
        f'``` {{ .python hl_lines="{" ".join(marked)}" }}\n{code}\n```\n'
    )


def _elsewhere(
    beside: Place,
    equations: list[Equation],
    found: list[Place],
    names: dict[int, list[tuple[str, str]]],
) -> str:
    """Return a folded list of all other places that compute or describe the equations."""
    rows = []
    for equation in equations:
        others = [
            _source_link(place.path, place.line, f"{_short(place.path)}:{place.line}")
            for place in found
            if equation.number in place.numbers
            and (place.path, place.first) != (beside.path, beside.first)
        ]
        functions_of = [
            f"`{name}` ({_source_link(path, None, _short(path))})"
            for path, name in names.get(equation.number, [])
        ]
        cells = (str(equation.number), ", ".join(others), ", ".join(functions_of))
        rows.append(f"    | {' | '.join(cells)} |")
    head = "    | Eq. | lines | functions whose docstrings name it |\n    |---|---|---|\n"
    return '??? note "Everywhere else"\n\n' + head + "\n".join(rows)


def _anchor(title: str) -> str:
    """Return the anchor that Markdown gives a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _short(path: str) -> str:
    return path.removeprefix("transduce/")


def _source_link(path: str, line: int | None = None, text: str | None = None) -> str:
    """Return a link to a source file, which the hook turns into one to its page on the site."""
    anchor = f"#L{line}" if line else ""
    return f"[{text or _short(path)}](../{path}{anchor})"
