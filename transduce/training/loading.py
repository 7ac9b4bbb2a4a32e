"""Batches of an epoch, computed in threads ahead of the steps that need them."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from torch.nn.functional import pad

from transduce.audio.augmentation import Augmenter
from transduce.audio.cache import read_ahead
from transduce.data.batches import Batch, Example
from transduce.data.pairs import DataError
from transduce.kernels.openmp import one_thread
from transduce.model.signature import Signature

# Threads that compute frames: more of them wait for Python's lock (GIL) more than they compute.
MOST_THREADS = 8
# Examples computed ahead of the step that needs them: memory against waiting.
AHEAD = 256


class Loader:
    """Loads batches of training examples; changes their sound, if there is an augmenter."""

    def __init__(
        self,
        examples: Sequence[Example],
        signature: Signature,
        augmenter: Augmenter | None = None,
        num_processes: int = 1,  # on this machine, which share its cores
    ) -> None:
        self.examples, self.signature, self.augmenter = examples, signature, augmenter
        self.num_threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_processes))

    def load(self, epoch: int, batches: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
        """Yield the padded batch of each list of example indices, as they are in an epoch.

        The sound of an example depends on the seed, the epoch and its index alone.
        """
        if self.augmenter is None:
            for ids in batches:
                yield Batch.of([self.examples[i] for i in ids])
            return
        order = [list(ids) for ids in batches]
        threads = ThreadPoolExecutor(self.num_threads)
        try:
            examples = read_ahead(threads, partial(self._changed, epoch), chain(*order), AHEAD)
            for ids in order:
                yield Batch.of(list(islice(examples, len(ids))))
        finally:
            threads.shutdown(cancel_futures=True)

    def _changed(self, epoch: int, index: int) -> Example:
        """Read the sound of an example, change it, and compute its frames."""
        assert self.augmenter is not None and self.signature.features is not None
        before = self.examples[index]
        with one_thread():
            sound = self.signature.sampled(before.pair, convert=False)
            assert sound is not None
            wave = self.augmenter(sound.wave, epoch, index)
            # Sound that is played faster may be shorter than a window.
            missing = self.signature.features.window_samples - len(wave)
            [framed] = self.signature.framed([replace(sound, wave=pad(wave, (0, max(0, missing))))])
        if isinstance(framed, DataError):
            raise framed
        return replace(framed, labels=before.labels)
