"""The frames of pairs, computed once and then kept in a folder."""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transduce.audio.features import Features, FeatureSettings
from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio, DataError, Frames, Origin, Pair
from transduce.files import write_by_rename

# Raised whenever the same settings give other numbers: the cache then starts anew.
VERSION = 1


def read_features(source: Frames, size: int | None = None, origin: Origin | None = None) -> Tensor:
    """The frames [T, D] of a .npy file; a DataError if it is anything else, or D is not `size`."""
    origin, path = origin or Origin(source.path), source.path
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise origin.error(f"{path} is not a .npy file; write it with numpy.save") from None
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise origin.error(f"{path} is not an array of frames by numbers; save one of [T, D]")
    if size is not None and array.shape[1] != size:
        raise origin.error(
            f"{path} has {array.shape[1]} numbers a frame where {size} are wanted; "
            "compute it with the settings of the others"
        )
    if not len(array):
        raise origin.error(f"{path} has no frames; leave the line out")
    with np.errstate(over="ignore"):
        frames = array.astype(np.float32)
    if not np.isfinite(frames).all():
        raise origin.error(f"{path} has a number that is not finite in float32; compute it again")
    return torch.from_numpy(frames)


class FrameReader:
    """The frames of pairs, [T, D] and not normalised: computed once, then kept in a folder.

    The cache is keyed by the audio's bytes, the part and length that are asked for and the
    settings, so neither another path nor a later date makes frames anew, and another setting never
    gives old ones. Files are put in place whole,
    by renaming, so any number of processes may share the folder.
    """

    def __init__(
        self,
        settings: FeatureSettings | None = None,
        cache: str | Path | None = None,
        *,
        convert: bool = False,  # what has another sample rate, or several channels
    ) -> None:
        self.features = Features(settings)
        self.cache = None if cache is None else Path(cache)
        self.convert = convert

    def __call__(self, pair: Pair) -> Tensor:
        """The pair's frames; a DataError if there are none to be had."""
        source = pair.source
        if isinstance(source, Frames):
            return read_features(source, origin=pair.origin)
        if not isinstance(source, Audio):
            raise pair.origin.error("the source is text, not audio; give the source alphabet")
        if self.cache is None:
            return self._computed(source, pair.origin)
        kept = self.cache / f"{self._key(source, pair.origin)}.npy"
        if (frames := _load_if_whole(kept, self.features.settings.size)) is not None:
            return frames
        frames = self._computed(source, pair.origin)
        content = io.BytesIO()
        np.save(content, frames.numpy())
        write_by_rename(kept, content.getvalue())
        return frames

    def all(
        self,
        pairs: Sequence[Pair],
        skipped: list[DataError] | None = None,
        num_threads: int | None = None,
        size: int | None = None,
    ) -> Iterator[tuple[Pair, Tensor]]:
        """Each pair with its frames, in order, several being read at once; bad pairs are skipped
        if there is a list to keep the reasons in. Frames of another size than `size`, or than the
        first ones have, are bad."""
        num_threads = num_threads or os.cpu_count() or 1
        threads = ThreadPoolExecutor(num_threads)
        try:
            results = _in_order(threads, partial(_frames_or_error, self), pairs, 2 * num_threads)
            for pair, frames in zip(pairs, results, strict=True):
                if isinstance(frames, Tensor) and frames.shape[1] != (
                    size := size or frames.shape[1]
                ):
                    frames = pair.origin.error(
                        f"there are {frames.shape[1]} numbers a frame where others have {size}; "
                        "compute them with the same settings"
                    )
                if isinstance(frames, Tensor):
                    yield pair, frames
                elif skipped is None:
                    raise frames
                else:
                    skipped.append(frames)
        finally:
            threads.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _computed(self, audio: Audio, origin: Origin) -> Tensor:
        settings = self.features.settings
        wave = read_wave(audio, settings.sample_rate, origin, convert=self.convert)
        if len(wave) < settings.window_samples:
            raise origin.error(
                f"{audio.path} has {1000 * len(wave) / settings.sample_rate:.0f} ms of sound where "
                f"a window takes {1000 * settings.window:.0f}; leave the line out"
            )
        frames: Tensor = self.features(wave[None])[0][0]
        if not frames.isfinite().all():
            raise origin.error(f"{audio.path} has samples that are not finite; convert it again")
        return frames

    def _key(self, audio: Audio, origin: Origin) -> str:
        try:
            content = audio.path.read_bytes()
        except OSError as error:
            raise origin.error(
                f"{audio.path} cannot be read ({error.strerror}); check it"
            ) from None
        # With the duration, so that a wrong one is found out and not hidden by an earlier reading.
        part = (audio.start, audio.duration) + (("converted",) if self.convert else ())
        settings = sorted(asdict(self.features.settings).items())
        what = repr((VERSION, settings, part)).encode()
        return hashlib.sha256(what + hashlib.sha256(content).digest()).hexdigest()


def _in_order(
    threads: ThreadPoolExecutor,
    read: Callable[[Pair], Tensor | DataError],
    pairs: Iterable[Pair],
    ahead: int,
) -> Iterator[Tensor | DataError]:
    """What `read` makes of the pairs, at most `ahead` of them before they are asked for: the frames
    of a corpus may not fit into memory."""
    rest = iter(pairs)
    waiting = deque(threads.submit(read, pair) for pair in islice(rest, ahead))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(threads.submit(read, pair) for pair in islice(rest, 1))
        yield result


def _frames_or_error(reader: FrameReader, pair: Pair) -> Tensor | DataError:
    try:
        return reader(pair)
    except DataError as error:
        return error


def _load_if_whole(path: Path, size: int) -> Tensor | None:
    """The frames of a cache file, or None if it is not there or was damaged by other hands."""
    try:
        return read_features(Frames(path), size)
    except DataError:
        return None
