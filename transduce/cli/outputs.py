"""A folder of results, one file for each input."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from transduce.files import write_by_rename


class OutputFolder:
    """The files of results in a folder; without a folder, there are none."""

    def __init__(self, folder: Path | None, suffix: str, overwrite: bool, resume: bool) -> None:
        if (overwrite or resume) and folder is None:
            raise ValueError("--overwrite and --resume go with --output; give a folder")
        if overwrite and resume:
            raise ValueError("--overwrite and --resume exclude each other; give one of them")
        self.folder, self.suffix, self.overwrite, self.resume = folder, suffix, overwrite, resume
        self._names: Counter[str] = Counter()
        self._written = self._kept = 0  # files

    def claim(self, names: Iterable[str]) -> list[Path | None]:
        """Return the file of each input's result; raise ValueError if one exists already.

        A name that is taken gets a number.
        """
        files = [self._file(name) for name in names]
        if not (self.overwrite or self.resume):
            existing = [file for file in files if file is not None and file.is_file()]
            if existing:
                others = f", as do {len(existing) - 1} others" if len(existing) > 1 else ""
                raise ValueError(
                    f"{existing[0]} exists already{others}; give --overwrite to replace it, or "
                    "--resume to keep it"
                )
        self._kept += sum(map(self.is_finished, files))
        return files

    def is_finished(self, file: Path | None) -> bool:
        """Return whether a file is left as it is, because an earlier run has written it."""
        return self.resume and file is not None and file.is_file()

    def write(self, file: Path, text: str) -> None:
        """Write a file of the folder, whole or not at all."""
        write_by_rename(file, (text + "\n").encode())
        self._written += 1

    def report(self) -> None:
        """Say how many files were written, if there is a folder."""
        if self.folder is not None:
            report_files(self.folder, self._written, self._kept)

    def _file(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}-{self._names[name]}"
        return self.folder / (name + self.suffix)


def report_files(folder: Path, written: int, kept: int) -> None:
    """Say on standard error how many files a command wrote into a folder, and kept there."""
    files = f"{written} file{'s' if written != 1 else ''}"
    others = f", and kept {kept} that existed" if kept else ""
    print(f"transduce: wrote {files} into {folder}{others}", file=sys.stderr)
