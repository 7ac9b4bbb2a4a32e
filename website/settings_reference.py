"""Write the page "Settings": every setting of a recipe, its default and its comment."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

SECTIONS = {
    "data": "The corpus, its splits and its features",
    "network": "The network",
    "train": "The training",
}


def page() -> str:
    """Return a table for each section of a recipe, and one for each group of settings in it."""
    from transduce.training.recipe import Recipe

    recipe = Recipe()
    parts = []
    for name, title in SECTIONS.items():
        parts.append(f"## {title}: `[{name}]`")
        parts += _tables(getattr(recipe, name), name)
    return "\n\n".join(parts) + "\n"


def _tables(settings: Any, prefix: str) -> list[str]:
    """Return the table of a group of settings, and those of the groups within it."""
    comments = field_comments(type(settings))
    rows, inner = [], []
    for field in fields(settings):
        value, name = getattr(settings, field.name), f"{prefix}.{field.name}"
        if is_dataclass(value):
            inner += _tables(value, name)
        else:
            comment = comments.get(field.name, "").replace("|", "\\|")
            rows.append(f"| `{name}` | {_shown(value)} | {comment} |")
    return ["| setting | default | meaning |\n|---|---|---|\n" + "\n".join(rows), *inner]


def _shown(value: Any) -> str:
    """Return a default as TOML writes it."""
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


def field_comments(cls: type) -> dict[str, str]:
    """Return the comment of each field of a dataclass: at the end of its line, or above it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comments = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = lines[node.lineno - 1 : node.end_lineno]
            found = [match[1] for line in own if (match := re.search(r"  # (.*)$", line))]
            first = node.lineno - 2
            while not found and re.match(r"\s+# ", lines[first]):
                first -= 1
            above = lines[first + 1 : node.lineno - 1] if not found else []
            texts = found or [line.strip().removeprefix("# ") for line in above]
            comments[node.target.id] = " ".join(texts)
    return comments
