"""The pages of the README and the site: their code, their commands, and what these need.

`python tests/pages.py docs/api.md` runs the examples of a page and renews what they print.
"""

import ast
import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# A marker stands before the block that it is for, or under the title for the whole page.
BLOCK = re.compile(
    r"(?:^<!-- (needs [^>]*) -->\n+)?^```(\w+)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.M | re.S
)
WHOLE_PAGE = re.compile(r"\A# [^\n]*\n+<!-- (needs [^>]*) -->\n")


class Block(NamedTuple):
    """A block of code in a page."""

    page: str  # its path in the repository
    language: str
    code: str
    needs: str  # what a reader needs besides the package, or ""
    title: str  # the name of the file to write it to, or ""


def blocks(page, *languages):
    """Return the blocks of code of a page in some languages."""
    text = page.read_text()
    everywhere = match[1] if (match := WHOLE_PAGE.match(text)) else ""
    return [
        Block(str(page.relative_to(ROOT)), language, code, needs or everywhere, title)
        for needs, language, title, code in BLOCK.findall(text)
        if language in languages
    ]


def commands(block):
    """Return the command lines of a block, without comments."""
    return [line for line, _ in commands_and_outputs(block)]


def commands_and_outputs(block):
    """Return the command lines of a block, each with the output that comments below it show."""
    found, variables = [], {}
    for line in block.code.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
        elif line.startswith("# ") and found:
            found[-1][1].append(line.removeprefix("# "))
        elif line.strip():
            found.append((without_comment(line), []))
    return found


def without_comment(line):
    """Return a command line without the comment at its end."""
    return re.sub(r"\s+#\s.*$", "", line).strip()


def transduce_arguments(line):
    """Return the arguments of every `transduce` command in a line of shell."""
    found = []
    for part in re.split(r"&&|\||;", without_redirection(line)):
        words = shlex.split(part)
        if words[:1] == ["srun"]:
            words = words[words.index("transduce") :]
        elif words[:1] == ["torchrun"]:
            words = words[words.index("-m") + 1 :]
        if words[:1] == ["transduce"]:
            found.append(words[1:])
    return found


def without_redirection(line):
    return re.sub(r"\s[<>]\s*\S+", "", line)


def printed(code, namespace):
    """Run the statements of a block; yield the line after each that prints, and what it prints."""
    namespace.setdefault("__name__", "example")
    for statement in ast.parse(code).body:
        out = io.StringIO()
        with redirect_stdout(out):
            exec(compile(ast.Module([statement], []), "<example>", "exec"), namespace)
        if out.getvalue():
            yield statement.end_lineno, out.getvalue().rstrip("\n").split("\n")


def comment_below(code, line):
    """Return the comment that begins after a line of a block, without its marks."""
    found = []
    for one in code.splitlines()[line:]:
        if not one.startswith("#"):
            break
        found.append(one.removeprefix("#").removeprefix(" "))
    return found


def renewed(page):
    """Return the text of a page, with what its examples print below each statement."""
    namespace = {}

    def renew(match):
        lines = match[2].splitlines()
        for line, output in reversed(list(printed(match[2], namespace))):
            old = len(comment_below(match[2], line))
            lines[line : line + old] = [f"# {one}".rstrip() for one in output]
        return f"{match[1]}{chr(10).join(lines)}\n```"

    return re.sub(r"^(```python\n)(.*?)^```", renew, page.read_text(), flags=re.M | re.S)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = renewed(Path(name))
        Path(name).write_text(text)
