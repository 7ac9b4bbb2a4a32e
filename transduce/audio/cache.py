"""The frames of pairs, with a cache on disk."""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from transduce.audio.batched import frames_of_sounds
from transduce.audio.features import Features, FeatureSettings
from transduce.audio.sound import read_sound
from transduce.data.contents import sound_bytes
from transduce.data.pairs import Audio, DataError, Frames, Origin, Pair, Recording
from transduce.files import write_by_rename

# Increase this when the same settings give other numbers; it makes old cache files unused.
VERSION = 2


def read_features(source: Frames, size: int | None = None, origin: Origin | None = None) -> Tensor:
    """Read frames [T, D] from a .npy file; raise a DataError for other shapes, or D != `size`."""
    path = source.path
    error_of = partial((origin or Origin(path)).file_error, path)
    if not path.is_file():
        raise error_of(f"there is no file {path}; check the path")
    try:
        # A header may claim any shape. Mapped into memory, it must fit the file.
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, OverflowError, MemoryError):
        raise error_of(f"{path} is not a .npy file; write it with numpy.save") from None
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise error_of(f"{path} is not an array of frames by numbers; save one of [T, D]")
    if size is not None and array.shape[1] != size:
        raise error_of(
            f"{path} has {array.shape[1]} numbers a frame where {size} are wanted; "
            "compute it with the settings of the others"
        )
    if not len(array):
        raise error_of(f"{path} has no frames; leave the line out")
    with np.errstate(over="ignore"):
        frames = np.array(array, np.float32)
    if not np.isfinite(frames).all():
        raise error_of(f"{path} has a number that is not finite in float32; compute it again")
    return torch.from_numpy(frames)


Item = TypeVar("Item")
Result = TypeVar("Result")


class FrameReader:
    """A reader of the frames [T, D] of pairs, before normalisation, with an optional cache.

    The cache is a folder with a file for each part of a sound. The file's name is a hash of the
    audio's bytes, the offset and duration, and the settings: a moved or copied sound file hits the
    cache, and other settings never do. Files are written by renaming, so any number of processes
    may share the folder.
    """

    def __init__(
        self,
        settings: FeatureSettings | None = None,
        cache: str | Path | None = None,
        *,
        convert: bool = False,  # resample, and average channels, instead of refusing
    ) -> None:
        self.features = Features(settings)
        self.cache = None if cache is None else Path(cache)
        self.convert = convert

    def __call__(self, pair: Pair) -> Tensor:
        """Return the frames of a pair from the cache or its file; raise a DataError on failure."""
        source = pair.source
        if isinstance(source, Frames):
            return read_features(source, origin=pair.origin)
        if not isinstance(source, Audio):
            raise pair.origin.error("the source is text, not audio; give the source alphabet")
        if self.cache is None:
            return self.read(source, pair.origin)
        path = self.cache / f"{self._key(source, pair.origin)}.npy"
        if (frames := _load_cached(path, self.features.settings.size)) is not None:
            return frames
        frames = self.read(source, pair.origin)
        content = io.BytesIO()
        np.save(content, frames.numpy())
        write_by_rename(path, content.getvalue())
        return frames

    def read_all(
        self,
        pairs: Sequence[Pair],
        skipped: list[DataError] | None = None,
        num_threads: int | None = None,
        size: int | None = None,
    ) -> Iterator[tuple[Pair, Tensor]]:
        """Yield each pair with its frames, in order; read several files at once.

        Raise a DataError for a bad pair, or append it to `skipped` and leave the pair out. A pair
        is also bad if its D differs from `size`, or, if that is None, from the first pair's.
        """
        num_threads = num_threads or os.cpu_count() or 1
        threads = ThreadPoolExecutor(num_threads)
        try:
            results = read_ahead(threads, partial(_frames_or_error, self), pairs, 2 * num_threads)
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

    def read(
        self,
        audio: Audio,
        origin: Origin,
        change: Callable[[Tensor], Tensor] | None = None,  # of the samples
    ) -> Tensor:
        """Read a sound without the cache, and compute its frames."""
        wave, _ = self.read_samples(audio, origin)
        if change is not None:
            wave = change(wave)
            # Sound that is played faster may be shorter than a window.
            missing = self.features.settings.window_samples - len(wave)
            wave = torch.nn.functional.pad(wave, (0, max(0, missing)))
        [frames] = frames_of_sounds(self.features, [wave])
        if frames is None:
            raise not_finite(audio, origin)
        return frames

    def read_samples(
        self, audio: Audio, origin: Origin, longest: float | None = None
    ) -> tuple[Tensor, Recording]:
        """Read the samples [N] of a sound, at least a window, and what is known of it.

        Raise LongSound if there are more than `longest` seconds.
        """
        settings = self.features.settings
        wave, rate = read_sound(
            *(audio, settings.sample_rate, origin), convert=self.convert, longest=longest
        )
        if len(wave) < settings.window_samples:
            raise origin.file_error(
                audio,
                f"{audio} has {1000 * len(wave) / settings.sample_rate:.0f} ms of sound where "
                f"a window takes {1000 * settings.window:.0f}; leave it out",
            )
        return wave, Recording(len(wave) / settings.sample_rate, rate, loudest(wave))

    def _key(self, audio: Audio, origin: Origin) -> str:
        """Hash the audio's bytes, its offset and duration, and the settings."""
        try:
            if audio.start is None or audio.inside is not None:
                digest = hashlib.sha256(sound_bytes(audio)).digest()
            else:
                status = audio.path.stat()
                digest = _digest(audio.path, status.st_size, status.st_mtime_ns)
        except (OSError, ValueError) as error:  # a ValueError for a path with a null byte
            reason = error.strerror if isinstance(error, OSError) else error
            raise origin.file_error(
                audio, f"{audio} cannot be read ({reason}); check the file"
            ) from None
        # Include the duration, so that a cached file does not hide a wrong one.
        part = (audio.start, audio.duration) + (("converted",) if self.convert else ())
        settings = sorted(asdict(self.features.settings).items())
        what = repr((VERSION, settings, part)).encode()
        return hashlib.sha256(what + digest).hexdigest()


@lru_cache(4096)
def _digest(path: Path, size: int, changed: int) -> bytes:
    """Hash a file once, however many parts of it are pairs, until its size or time changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def not_finite(sound: Path | Audio, origin: Origin) -> DataError:
    """Return, without raising it, the error of a sound whose frames are not finite."""
    return origin.file_error(sound, f"{sound} has samples that are not finite; convert it again")


def loudest(wave: Tensor) -> float:
    """Return the largest absolute value of samples [N]; 0 if there are none."""
    samples = wave.numpy()  # whose operations take no threads of PyTorch's
    return max(float(samples.max()), -float(samples.min())) if len(samples) else 0.0


def read_ahead(
    threads: ThreadPoolExecutor, read: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Yield `read` of each item, in order, at most `ahead` of them in advance.

    The bound is for memory, which may not hold the frames of a whole corpus.
    """
    rest = iter(items)
    waiting = deque(threads.submit(read, item) for item in islice(rest, ahead))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(threads.submit(read, item) for item in islice(rest, 1))
        yield result


def _frames_or_error(reader: FrameReader, pair: Pair) -> Tensor | DataError:
    """Return the pair's frames, or the DataError instead of raising it."""
    try:
        return reader(pair)
    except DataError as error:
        return error


def _load_cached(path: Path, size: int) -> Tensor | None:
    """Read the frames of a cache file; return None if it is missing or damaged."""
    try:
        return read_features(Frames(path), size)
    except DataError:
        return None
