"""MkDocs hooks: pages that are generated from the sources, and links into the repository.

The pages in docs/ link to source files as they lie in the repository (`../transduce/x.py`), so that
the links work where the repository is browsed. On the site, such a link leads to a page with the
source, which is made here: the site needs no address of a repository, and no network.
"""

from __future__ import annotations

import ast
import json
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import paper_in_code
import settings_reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Pages at the root of the repository that are pages of the site too.
ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
LANGUAGES = {".py": "python", ".cu": "c++", ".toml": "toml", ".js": "javascript", ".html": "html"}
LINE_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)#L(\d+)\)")
LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^)\s]+)(?=\))")
FENCE = re.compile(r"^(\s*)(```+|~~~+).*?^\1\2\s*$", re.M | re.S)
NEEDS = re.compile(r"<!-- (needs [^>]*?) -->")


# --- Places in the repository, and on the site ----------------------------------------------------


def page_of(path: str) -> str:
    """Return the page of the site, as a path in docs/, for a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def repository_path(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    for path, root_page in ROOT_PAGES.items():
        if page == root_page and path != "README.md":
            return path
    if not page.startswith("source/"):
        return f"docs/{page}"
    path = page.removeprefix("source/")
    for candidate in (path.removesuffix("/index.md"), path, path.removesuffix(".md")):
        if (ROOT / candidate).exists():
            return candidate
    raise LookupError(f"{page} has no file in the repository")


def target_path(link: str, path: str) -> tuple[str, str]:
    """Return the path in the repository, and the anchor, of a link in the file at `path`."""
    target, _, anchor = link.partition("#")
    folder = path if (ROOT / path).is_dir() else str(PurePosixPath(path).parent)
    return os.path.normpath(os.path.join(folder, target)) if target else path, anchor


def outside_code(pattern: re.Pattern[str], replace: Any, markdown: str) -> str:
    """Replace what a pattern matches, except in fenced code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [pattern.sub(replace, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, pattern.sub(replace, markdown[end:])])


def links(markdown: str, path: str) -> set[str]:
    """Return the paths in the repository to which a page links."""
    found: set[str] = set()
    outside_code(LINK, lambda link: found.add(target_path(link[0], path)[0]) or "", markdown)
    return found


# --- Generated pages ------------------------------------------------------------------------------


def source_page(path: str) -> str:
    """Return the page of a source file, or of a folder with the first line of each of its files."""
    excluded = "---\nsearch:\n  exclude: true\n---\n\n"
    if (ROOT / path).is_dir():
        rows = [
            f"| [{file.name}]({file.name}) | {summary(file)} |"
            for file in sorted((ROOT / path).iterdir())
            if file.suffix in (".py", ".cu", ".toml", ".md", ".js", ".html")
        ]
        return f"{excluded}# {path}/\n\n| file | |\n|---|---|\n" + "\n".join(rows) + "\n"
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return excluded + text
    if path.endswith(".ipynb"):
        return notebook_page(path, text)
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f'{excluded}# {path}\n\n````` {{ .{language} linenums="1" }}\n{text}\n`````\n'


def notebook_page(path: str, text: str) -> str:
    """Return the cells of a notebook as Markdown, with a link to the notebook itself."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    name = PurePosixPath(path).name
    download = f'<a href="{name}" download>{name}</a>, without outputs.'
    return "\n\n".join([parts[0], download, *parts[1:]]) + "\n"


def summary(file: Path) -> str:
    """Return the first line of a module's docstring, or ""."""
    if file.suffix != ".py":
        return ""
    lines = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
    return lines[0].replace("|", "\\|") if lines else ""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, and of every source file that a page links to."""
    for path, page in ROOT_PAGES.items():
        if path != "README.md":
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    waiting = {
        target
        for file in files.documentation_pages()
        for target in links(generated_parts(file.content_string), repository_path(file.src_uri))
    }
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        page = page_of(path)
        if path in done or files.get_file_from_path(page) or not (ROOT / path).exists():
            continue  # mkdocs itself reports a link to a file that does not exist
        done.add(path)
        content = source_page(path)
        files.append(File.generated(config, page, content=content))
        if path.endswith(".ipynb"):  # to download
            notebook = (ROOT / path).read_text()
            files.append(File.generated(config, f"source/{path}", content=notebook))
        waiting |= links(content, path)
    return files


@cache
def generated_part(name: str) -> str:
    """Return a part of a page that is made from the sources."""
    makers = {
        "the paper in code": lambda: paper_in_code.page(ROOT),
        "commands": command_reference,
        "settings": settings_reference.page,
    }
    return makers[name]()


def generated_parts(markdown: str) -> str:
    """Fill in the parts of a page that are made from the sources."""
    return re.sub(r"<!-- generated: (.*?) -->", lambda m: generated_part(m[1]), markdown)


def command_reference() -> str:
    """Return the help of every command, as Markdown."""
    from transduce.cli import app

    text = app.generate_docs(flatten_commands=True)
    text = text[text.index("\n# transduce ") + 1 :]  # without the title and the list of commands
    text = re.sub(r"^# transduce ", "## ", text, flags=re.M)
    return re.sub(r"^Example: (.*)$", r"Example: `\1`", text, flags=re.M)


# --- Pages ----------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in generated parts, and lead links into the repository to pages of the site."""
    path = repository_path(page.file.src_uri)
    here = str(PurePosixPath(page.file.src_uri).parent)
    markdown = generated_parts(markdown)

    def to_line(link: re.Match[str]) -> str:
        """Return HTML: mkdocs cannot check the anchors of lines, which the highlighter makes."""
        target, _ = target_path(link[2], path)
        there = os.path.relpath(page_of(target), here).removesuffix(".md")
        return f'<a href="{there}.html#__codelineno-0-{link[3]}">{link[1]}</a>'

    def to_page(link: re.Match[str]) -> str:
        target, anchor = target_path(link[0], path)
        if not (ROOT / target).exists():
            return link[0]
        there = os.path.relpath(page_of(target), here)
        return f"{there}#{anchor}" if anchor else there

    markdown = outside_code(LINE_LINK, to_line, markdown)
    markdown = outside_code(LINK, to_page, markdown)
    return outside_code(NEEDS, lambda m: f'<p class="needs">N{m[1][1:]}.</p>', markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Lead from each picture to its file, so that it can be enlarged on a small screen."""
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
