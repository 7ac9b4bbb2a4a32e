"""What a data set holds, before a training: lengths, symbols, bad lines, the memory of a step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from transduce.architectures import network_sizes
from transduce.audio.cache import read_ahead, read_features
from transduce.audio.sound import Header, read_sound_header
from transduce.data.batches import Batches, Example, describe_step, predicted_bytes
from transduce.data.kinds import read_pairs, recognise
from transduce.data.manifest import read_tsv
from transduce.data.pairs import Audio, DataError, Frames, Notation, Origin, Pair, Symbols, skipping
from transduce.training.recipe import Recipe

READERS = 8  # threads that open files: more hide the latency of a network's disks
KEPT = 5  # sequences of each kind of trouble that are named


class Step(NamedTuple):
    """The largest step of an epoch."""

    num_sequences: int
    num_frames: int
    num_labels: int
    num_bytes: int  # beside the weights
    copies: int  # of each sequence

    def described(self) -> str:
        """Say how many sequences of which lengths it has."""
        return describe_step(self.num_sequences, self.copies, self.num_frames, self.num_labels)


@dataclass
class Trouble:
    """Sequences with the same trouble: their count, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, what: object) -> None:
        self.count += 1
        if len(self.first) < KEPT:
            self.first.append(str(what))


@dataclass
class Inspection:
    """What a data set holds. Sequences that cannot be read are in `unreadable` alone."""

    kind: str
    seconds: array[float] = field(default_factory=lambda: array("d"))  # of sounds
    num_frames: array[int] = field(default_factory=lambda: array("q"))  # of each sequence
    num_labels: array[int] = field(default_factory=lambda: array("q"))
    symbols: Counter[str] = field(default_factory=Counter)
    rates: Counter[int] = field(default_factory=Counter)  # samples a second
    channels: Counter[int] = field(default_factory=Counter)
    unreadable: Trouble = field(default_factory=Trouble)
    unalignable: Trouble = field(default_factory=Trouble)  # by CTC
    oversized: Trouble = field(default_factory=Trouble)  # larger than a step may be
    step: Step | None = None

    def __len__(self) -> int:
        return len(self.num_frames)


class _Skipped(list[DataError]):
    """A list of errors that counts them and keeps the first."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def append(self, error: DataError) -> None:
        self.trouble.add(error)


def inspect_data(
    path: Path,
    target: str,
    notation: Notation,
    recipe: Recipe,
    done: Callable[[float], object] = lambda count: None,
) -> Inspection:
    """Inspect sounds or frames in any format, or a .tsv file of texts; read headers alone.

    Frames, alignments and steps are those of the recipe. Call `done` after each sequence.
    """
    kind = recognise(path)
    is_text = kind is None and path.is_file()
    if kind is None and not is_text:
        what = "a folder without a data set" if path.is_dir() else "not there"
        raise DataError(f"{path} is {what}; give data in one of the formats of docs/data.md")
    found = Inspection("pairs of texts" if kind is None else kind.value)
    skipped = _Skipped(found.unreadable)
    with skipping(skipped):
        pairs: Iterable[Pair] = read_pairs(path, notation, target, skipped)
        if is_text:
            pairs = read_tsv(path, recipe.data.source_notation, notation, skipped)
        for pair, length in _lengths(pairs):
            with skipping(skipped):
                _add(found, pair, length, recipe)
            done(1)
    if len(found):
        found.step = _largest_step(found, recipe)
    return found


def _lengths(pairs: Iterable[Pair]) -> Iterator[tuple[Pair, Header | int | DataError]]:
    """Yield each pair with its header or its number of frames, or the error in place of them."""

    def read(pair: Pair) -> tuple[Pair, Header | int | DataError]:
        source = pair.source
        try:
            if isinstance(source, Audio):
                return pair, read_sound_header(source, pair.origin)
            if isinstance(source, Frames):
                return pair, len(read_features(source, origin=pair.origin))
            return pair, len(source)
        except DataError as error:
            return pair, error

    with ThreadPoolExecutor(READERS) as threads:
        yield from read_ahead(threads, read, pairs, 4 * READERS)


def _add(found: Inspection, pair: Pair, length: Header | int | DataError, recipe: Recipe) -> None:
    """Count a pair; raise a DataError if it cannot be read."""
    if isinstance(length, DataError):
        raise length
    num_frames = length if isinstance(length, int) else _frames_of(pair, length, recipe)
    if isinstance(length, Header):
        found.seconds.append(length.seconds)
        found.rates[length.sample_rate] += 1
        found.channels[length.channels] += 1
    found.num_frames.append(num_frames)
    found.num_labels.append(len(pair.target))
    found.symbols.update(pair.target)
    vectors = -(-num_frames // recipe.network.pooling)
    needed = least_vectors(pair.target)
    if vectors < needed:
        repeats = needed - len(pair.target)
        found.unalignable.add(
            f"{pair.origin}: {len(pair.target)} labels, of which {repeats} repeat the one before, "
            f"need {needed} frames after pooling where there are {vectors}"
        )
    cells = vectors * (len(pair.target) + 1)
    if cells > recipe.train.max_cells:
        found.oversized.add(
            f"{pair.origin}: it has {cells} cells of lattice where a step may have "
            f"{recipe.train.max_cells}; raise train.max_cells, or leave it out"
        )


def least_vectors(target: Symbols) -> int:
    """Return how many transcription vectors CTC needs: one a label, a null between equal ones."""
    return len(target) + sum(first == second for first, second in pairwise(target))


def bin_edges(values: array[float] | array[int], most: int) -> np.ndarray:
    """Return the edges of a histogram of at most so many bins.

    Bins of whole numbers have equally many each, and their edges lie halfway between two.
    """
    if values.typecode == "d":
        return np.histogram_bin_edges(values, most)
    first, last = min(values), max(values)
    width = -(-(last - first + 1) // most)
    return np.arange(first, last + width + 1, width) - 0.5


def _frames_of(pair: Pair, header: Header, recipe: Recipe) -> int:
    settings = recipe.data.features
    num_samples = round(header.seconds * settings.sample_rate)
    if num_samples < settings.window_samples:
        raise pair.origin.error(
            f"there are {1000 * header.seconds:.0f} ms of sound where a window takes "
            f"{1000 * settings.window:.0f}; leave it out"
        )
    return settings.num_frames(num_samples)


class _Lengths(NamedTuple):
    """The lengths of a sequence, in place of an example."""

    pair: Pair
    num_frames: int
    num_labels: int

    def num_vectors(self, pooling: int) -> int:
        return -(-self.num_frames // pooling)


def _largest_step(found: Inspection, recipe: Recipe) -> Step | None:
    """Return the step of the first epoch that takes most memory on the CPU."""
    network, train = recipe.network, recipe.train
    nobody = Pair("", (), (), Origin(Path()))
    fitting = [
        _Lengths(nobody, T, U)
        for T, U in zip(found.num_frames, found.num_labels, strict=True)
        if -(-T // network.pooling) * (U + 1) <= train.max_cells
    ]
    if not fitting:
        return None
    batches = Batches(
        cast(list[Example], fitting),  # of which only the lengths are asked for
        train.max_cells,
        train.seed,
        max_sequences=train.max_sequences,
        pooling=network.pooling,
    )
    sizes = network_sizes(network, recipe.data.features.size, len(found.symbols))
    copies, candidates = 2 if train.consistency else 1, 1 + train.minimum_risk
    shapes = {batches.shape(ids) for ids in batches.epoch(0)}
    steps = [
        Step(
            *(B, T, U),
            predicted_bytes((copies * B, T, U), sizes, candidates=candidates),
            copies,
        )
        for B, T, U in shapes
    ]
    return max(steps, key=lambda step: step.num_bytes)
