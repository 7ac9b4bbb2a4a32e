"""Shards of a corpus: which inputs each of them has, and its file of JSON lines.

The inputs of a shard are computed in chunks of a fixed size. A chunk's lines depend on its inputs
alone, so that they are the same bytes wherever it is computed, and after a stop. They are appended
to a file beside the final one, which gets its name when it is whole.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from transduce.data.pairs import DataError
from transduce.training.lock import IS_LOCKED, lock_descriptor

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Shard:
    """Every `count`-th input of a corpus, the first of which is input `number`."""

    number: int  # from 1
    count: int

    def __str__(self) -> str:
        return f"{self.number}-of-{self.count}"


class Chunk(NamedTuple):
    """Inputs of a shard that are computed together."""

    shard: Shard
    inputs: list[Any]


class Work(Protocol[Loaded]):
    """What is done with a corpus. It can be pickled, and so can its inputs."""

    @property
    def chunk_size(self) -> int:
        """The inputs that are computed together, and after a stop perhaps again."""

    def inputs(self) -> Iterator[Any]:
        """Yield all inputs of the corpus; for one that cannot be read, the DataError."""

    def load(self) -> Loaded:
        """Load the model."""

    def lines(
        self, loaded: Loaded, inputs: Sequence[Any], progress: Callable[[float], object]
    ) -> list[str]:
        """Return a line of JSON for each input; tell `progress` the shares that are done."""


def parse_shards(written: str) -> list[Shard]:
    """Return the shards that --shard names: 3/16 is the third of 16, all/16 is each of them."""
    found = re.fullmatch(r"(all|\d+)/(\d+)", written)
    count = 0 if found is None else int(found[2])
    numbers = range(1, count + 1)
    if found is not None and found[1] != "all":
        numbers = range(int(found[1]), int(found[1]) + 1)
    if not count or not 1 <= numbers[0] <= count:
        raise ValueError(
            f"--shard is {written}; give its number and how many there are, such as 3/16, or all/16"
        )
    return [Shard(number, count) for number in numbers]


def chunks(inputs: Iterable[Any], done: Mapping[Shard, int], size: int) -> Iterator[Chunk]:
    """Yield the inputs of the shards in chunks; leave out the first `done` ones of each shard.

    Whole chunks are done. At most a chunk of each shard is held.
    """
    if not done:
        return
    [count] = {shard.count for shard in done}
    shards = {shard.number: shard for shard in done}
    rest = {shard.number: number for shard, number in done.items()}
    held: dict[int, list[Any]] = {number: [] for number in shards}
    for index, one in enumerate(inputs):
        number = index % count + 1
        if number not in shards:
            continue
        if rest[number]:
            rest[number] -= 1
            continue
        held[number].append(one)
        if len(held[number]) == size:
            yield Chunk(shards[number], held[number])
            held[number] = []
    yield from (Chunk(shards[number], inputs) for number, inputs in held.items() if inputs)


def error_line(name: str | None, error: DataError) -> str:
    """Return the line of an input that failed; without a name, its place could not be read."""
    return json.dumps({"input": name, "error": str(error)}, ensure_ascii=False)


def failure_in(line: str) -> str | None:
    """Return the error of a line; None if there is none, or the input was a blank line."""
    if '"error": ' not in line:
        return None
    told = json.loads(line)
    error = told.get("error")
    return None if told["input"] == "" or error is None else str(error)


class ShardFile:
    """The file of a shard: lines are appended to `part`, which becomes `path` when it is whole."""

    def __init__(
        self, folder: Path, shard: Shard, chunk_size: int, overwrite: bool, resume: bool
    ) -> None:
        self.path = folder / f"{shard}.jsonl"
        self.part = folder / f"{shard}.jsonl.part"
        existing = next((path for path in (self.path, self.part) if path.is_file()), None)
        if existing is not None and not (overwrite or resume):
            raise ValueError(
                f"{existing} exists already; give --overwrite to replace it, or --resume to "
                "continue it"
            )
        self.num_lines = self.num_failed = 0
        self.first_error: str | None = None
        self.is_finished = resume and self.path.is_file()
        if self.is_finished:
            with self.path.open("rb") as lines:
                self._count(lines)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self.part.open("ab", buffering=0)
        self._lock()
        with self.part.open("rb") as lines:
            self._file.truncate(0 if overwrite else _whole_chunks(lines, chunk_size))
            lines.seek(0)
            self._count(lines)

    def append(self, lines: Sequence[str]) -> None:
        """Append lines, and wait until they are on the disk."""
        content = "".join(f"{line}\n" for line in lines).encode()
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file.fileno())
        except OSError as error:  # which names no file
            raise OSError(error.errno, error.strerror, str(self.part)) from error
        self._note(lines)

    def finish(self) -> None:
        """Give the file its name, now that it is whole."""
        if sys.platform == "win32":  # which does not rename open files
            self.close()
        os.replace(self.part, self.path)
        self.close()

    def close(self) -> None:
        """Close the file, which another process may then continue."""
        if not self.is_finished:
            self._file.close()

    def _lock(self) -> None:
        """Raise ValueError if another process writes the shard; the lock ends with the process."""
        try:
            lock_descriptor(self._file.fileno())
        except OSError as error:
            if error.errno in IS_LOCKED:
                self._refuse()
        # The process that had the lock may have given the file its name since it was opened.
        if not self.part.exists() or not os.path.samestat(
            os.fstat(self._file.fileno()), self.part.stat()
        ):
            self._refuse()

    def _refuse(self) -> NoReturn:
        self.close()
        raise ValueError(
            f"another process writes {self.part}; wait until it ends, or stop it"
        ) from None

    def _count(self, lines: Iterable[bytes]) -> None:
        self._note(line.decode() for line in lines)

    def _note(self, lines: Iterable[str]) -> None:
        """Count lines, and those that have errors."""
        for line in lines:
            self.num_lines += 1
            error = failure_in(line)
            if error is not None:
                self.num_failed += 1
                self.first_error = self.first_error or error


def _whole_chunks(lines: Iterable[bytes], chunk_size: int) -> int:
    """Return the number of bytes in the lines of whole chunks at the start of a file."""
    kept = at = 0
    for number, line in enumerate(lines, 1):
        at += len(line)
        if number % chunk_size == 0 and line.endswith(b"\n"):
            kept = at
    return kept
