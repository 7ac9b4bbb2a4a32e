"""Inputs -> examples, in groups that are searched at once; sounds are read ahead in threads.

On the CPU a thread reads a sound and computes its frames. On a GPU threads read sounds, the GPU
computes the frames of a whole group in few batches, and both happen while the group before is
searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Generic, NamedTuple, TypeVar

import torch

from transduce.audio import windows
from transduce.audio.cache import read_ahead
from transduce.audio.sound import LongSound
from transduce.audio.windows import Window
from transduce.data.batches import Example
from transduce.data.pairs import DataError
from transduce.model.signature import Sampled, Signature, Source, Unknown
from transduce.model.transcripts import Transcript

# Threads that read sound: more of them wait for Python's lock (GIL) more than they decode.
MOST_READERS = 6

Read = TypeVar("Read", covariant=True)
Group = TypeVar("Group")


class Part(NamedTuple, Generic[Read]):
    """An input, or a window of one that is long; the DataError if it could not be read.

    Long sound that was searched while it was read is a transcript already.
    """

    read: Read
    share: float  # of the input
    is_last: bool


Ready = Part[Example | Transcript | DataError]
Raw = Part[Example | Sampled | Transcript | DataError]  # as threads read it
AnyPart = TypeVar("AnyPart", bound=Raw)


class GroupSizes(NamedTuple):
    """The bounds of groups."""

    first: int  # inputs in the first group; each group may have twice as many as the one before
    most: int  # inputs in any group
    frames: int  # a group ends with the input that reaches them


@dataclass(frozen=True)
class Reader:
    """A reader of inputs, as a model with some signature takes them, for some device."""

    signature: Signature
    device: torch.device  # of the frames of sound
    unknown: Unknown = "refuse"
    step: float | None = None  # seconds that windows of long sound have a multiple of; None: whole
    convert: bool = True  # resample, and average channels, instead of refusing
    streamed: Callable[[Source], Transcript] | None = None  # transcribes long sound, if not windows

    def groups(self, sources: Iterable[Source], sizes: GroupSizes) -> Iterator[Sequence[Ready]]:
        """Yield the parts of the inputs, in order, in groups.

        For a GPU, one group is read while the caller handles the one before it. An input with
        several parts may be in several groups.
        """
        groups = map(self._framed, in_groups(self._parts(sources), sizes))
        return groups if self._on_cpu or self.signature.sources is not None else _ahead(groups)

    @property
    def _on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def _parts(self, sources: Iterable[Source]) -> Iterator[Raw]:
        """Yield the parts of each input; read files of sound ahead, two for each thread.

        Of long sound only the first window is read ahead.
        """
        if self.signature.sources is not None:
            yield from (Part(self._read(source), 1.0, True) for source in sources)
            return
        threads = min(MOST_READERS, torch.get_num_threads())
        with ThreadPoolExecutor(threads) as readers:
            for parts in read_ahead(readers, self._parts_of, sources, 2 * threads):
                rest = 1.0
                for part in parts:
                    if part.is_last or isinstance(part.read, DataError):  # which ends the input
                        yield Part(part.read, rest, True)
                        break
                    yield part
                    rest -= part.share

    def _parts_of(self, source: Source) -> Iterator[Raw]:
        """Return the parts of an input, the first of which has been read."""
        longest = None if self.step is None else windows.LONGEST
        try:
            return iter([Part(self._read(source, longest), 1.0, True)])
        except LongSound:
            assert self.step is not None
            if self.streamed is not None:
                return iter([Part(self._transcript(source, self.streamed), 1.0, True)])
            parts = map(self._part, self.signature.windows(source, self.step))
            return chain([next(parts)], parts)

    @staticmethod
    def _transcript(
        source: Source, streamed: Callable[[Source], Transcript]
    ) -> Transcript | DataError:
        try:
            return streamed(source)
        except DataError as error:
            return error

    def _part(self, window: Window[Source]) -> Raw:
        return Part(self._read(window.sound), window.share, window.is_last)

    def _read(self, source: Source, longest: float | None = None) -> Example | Sampled | DataError:
        """Read an input; raise LongSound if it is sound of more than `longest` seconds."""
        signature = self.signature
        try:
            sampled = signature.sampled(source, convert=self.convert, longest=longest)
            if sampled is None:
                return signature.example(source, unknown=self.unknown)
        except DataError as error:
            return error
        return signature.framed([sampled], self.device)[0] if self._on_cpu else sampled

    def _framed(self, parts: Sequence[Raw]) -> list[Ready]:
        """Compute the frames of all sounds in a group."""
        sampled = [part.read for part in parts if isinstance(part.read, Sampled)]
        framed = iter(self.signature.framed(sampled, self.device))
        return [
            Part(next(framed) if isinstance(read, Sampled) else read, share, is_last)
            for read, share, is_last in parts
        ]


def in_groups(parts: Iterable[AnyPart], sizes: GroupSizes) -> Iterator[list[AnyPart]]:
    """Cut the sequence of parts into groups."""
    size, num_inputs, num_frames = min(sizes.first, sizes.most), 0, 0
    held: list[AnyPart] = []
    for part in parts:
        held.append(part)
        num_inputs += part.is_last
        num_frames += part.read.num_frames if isinstance(part.read, Example | Sampled) else 0
        if num_inputs == size or num_frames >= sizes.frames:
            yield held
            size, num_inputs, num_frames = min(2 * size, sizes.most), 0, 0
            held = []
    yield held


def _ahead(groups: Iterator[Group]) -> Iterator[Group]:
    """Yield the groups; compute the next one in a thread meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        results = read_ahead(thread, lambda _: next(groups, None), repeat(None), 1)
        while (group := next(results)) is not None:
            yield group
