"""Build hook: the README as a package index can show it, where relative links lead nowhere."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A picture, and the caption in italics below it.
PICTURE = re.compile(r"!\[[^\]]*\]\((?!\w+:)[^)]*\)\s*(?:^\*[^*]+\*\s*)?", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)]*)\)")


class ReadmeHook(MetadataHookInterface):
    """Set the long description, with links to README_ADDRESS if that variable is set."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read the README into the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = index_readme(text, os.environ.get("README_ADDRESS", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def index_readme(text: str, address: str) -> str:
    """Make the relative links of a README absolute, below the address of the project's raw files.

    Without an address, leave out the pictures with their captions, and keep the text of the links.
    """
    if address:
        base = address.rstrip("/") + "/"
        return re.sub(r"\]\((?!\w+:|#)", f"]({base}", text)
    return LINK.sub(r"\1", PICTURE.sub("", text))
