"""Batches of an epoch, computed in threads ahead of the steps that need them; batches by length."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import torch

from transduce.audio.augmentation import Augmenter
from transduce.audio.cache import read_ahead
from transduce.data.batches import Batch, Batches, Example, UnreadExamples, lengths_of, pair_of
from transduce.data.pairs import Audio, DataError
from transduce.kernels.openmp import one_thread
from transduce.model.signature import Signature, frame_reader

# Threads that compute frames: more of them wait for Python's lock (GIL) more than they compute.
MOST_THREADS = 8
# Computed ahead of the step that needs them: memory against waiting.
MOST_AHEAD = 256  # examples
FRAMES_AHEAD = 500_000  # an hour of sound, some 100 MB
# In a batch of a network that does not learn.
MOST_SEQUENCES = 1024
CELLS = {"cpu": 200_000, "cuda": 5_000_000}  # of padded lattice; each takes 100 bytes


class Loaded(NamedTuple):
    """A batch, and the indices of its examples."""

    ids: list[int]  # without those that could not be read
    batch: Batch  # of another example if `ids` is empty


class Loader:
    """Loads batches of training examples; changes their sound, if there is an augmenter."""

    def __init__(
        self,
        examples: Sequence[Example],
        signature: Signature,
        augmenter: Augmenter | None = None,
        num_processes: int = 1,  # on this machine, which share its cores
        skip_bad: bool = False,  # leave out examples that cannot be read, and collect the errors
        convert: bool = False,  # resample sound, and average channels, instead of refusing
    ) -> None:
        self.examples, self.signature, self.augmenter = examples, signature, augmenter
        self.convert = convert
        self.skipped: list[DataError] | None = [] if skip_bad else None
        self.num_threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_processes))

    def load(self, epoch: int, batches: Iterable[Sequence[int]]) -> Generator[Loaded, None, None]:
        """Yield the padded batch of each list of example indices, as they are in an epoch.

        The sound of an example depends on the seed, the epoch and its index alone.
        """
        if self.augmenter is None and not isinstance(self.examples, UnreadExamples):
            for ids in batches:
                yield Loaded(list(ids), Batch.of([self.examples[i] for i in ids]))
            return
        order = [list(ids) for ids in batches]
        mean = max(1.0, float(lengths_of(self.examples)[0].mean()))
        ahead = max(self.num_threads, min(MOST_AHEAD, int(FRAMES_AHEAD / mean)))
        threads = ThreadPoolExecutor(self.num_threads)
        try:
            read = partial(self._example_or_error, epoch)
            examples = read_ahead(threads, read, chain(*order), ahead)
            for ids in order:
                yield self._loaded(epoch, ids, list(islice(examples, len(ids))))
        finally:
            threads.shutdown(cancel_futures=True)

    def _loaded(self, epoch: int, ids: list[int], found: list[Example | DataError]) -> Loaded:
        """Leave bad examples out of a batch, or raise the first error."""
        errors = [error for error in found if isinstance(error, DataError)]
        if errors and self.skipped is None:
            raise errors[0]
        if self.skipped is not None:
            self.skipped += errors
        good = [i for i, one in zip(ids, found, strict=True) if isinstance(one, Example)]
        examples = [one for one in found if isinstance(one, Example)]
        return Loaded(good, Batch.of(examples or [self._any_example(epoch)]))

    def _any_example(self, epoch: int) -> Example:
        """Return the first example that can be read."""
        error = None
        for index in range(len(self.examples)):
            found = self._example_or_error(epoch, index)
            if isinstance(found, Example):
                return found
            error = error or found
        raise DataError(f"no pair can be read; the first error is: {error}")

    def _example_or_error(self, epoch: int, index: int) -> Example | DataError:
        try:
            with one_thread():
                if self.augmenter is None:
                    return self.examples[index]
                return self._changed(self.augmenter, epoch, index)
        except DataError as error:
            return error

    def _changed(self, augmenter: Augmenter, epoch: int, index: int) -> Example:
        """Read the sound of an example, change it, and compute its frames."""
        pair = pair_of(self.examples, index)
        assert isinstance(pair.source, Audio)
        reader = frame_reader(self.signature.features, convert=self.convert)
        change = partial(augmenter, epoch=epoch, index=index)
        frames = reader.read(pair.source, pair.origin, change)
        return self.signature.example(pair, with_labels=True, frames=frames)


def load_by_length(
    examples: Sequence[Example], device: torch.device
) -> Iterator[tuple[list[int], Batch]]:
    """Yield all examples once, in batches on a device, with their indices."""
    sizes = [example.num_frames * (example.num_labels + 1) for example in examples]
    batches = Batches(
        examples, max(CELLS[device.type], *sizes), seed=0, max_sequences=MOST_SEQUENCES
    )
    for ids in batches.by_length():
        yield ids, next(batches.load([ids])).to(device)
