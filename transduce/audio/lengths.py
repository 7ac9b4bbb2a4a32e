"""How many frames the sounds of a corpus have, without decoding them."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from transduce.audio.features import FeatureSettings
from transduce.audio.sound import read_sound_header
from transduce.data.manifest import Manifest
from transduce.data.pairs import Audio, DataError, Frames, Pair
from transduce.files import write_by_rename


def num_frames_of(
    pairs: Sequence[Pair], settings: FeatureSettings, cache: Path | None = None
) -> np.ndarray:
    """Return the frames [N] of each pair of sound or frames, up to rounded durations.

    A duration that the manifest states is believed. Other files are asked for their headers, many
    at a time; with a `cache` folder, once. A pair that cannot be read counts as one frame, and is
    an error when its frames are wanted.
    """
    if isinstance(pairs, Manifest):
        seconds = pairs.lines["seconds"].copy()
    else:
        seconds = np.array([_stated_seconds(pair) for pair in pairs], np.float64)
    num_samples = np.nan_to_num(seconds * settings.sample_rate, nan=0.0)
    found: np.ndarray = np.maximum(1, _frames_in(num_samples, settings))
    missing = np.flatnonzero(np.isnan(seconds))
    if len(missing):
        found[missing] = _from_headers(pairs, missing, settings, cache)
    return found


def _stated_seconds(pair: Pair) -> float:
    source = pair.source
    if not isinstance(source, Audio) or source.duration is None:
        return math.nan
    return source.duration


def _frames_in(num_samples: np.ndarray, settings: FeatureSettings) -> np.ndarray:
    """Return what `FeatureSettings.num_frames` does, of an array."""
    whole, shift = np.round(num_samples).astype(np.int64), settings.shift_samples
    if settings.convention.centred:
        return (whole + shift // 2) // shift
    return np.maximum(0, (whole - settings.window_samples) // shift + 1)


def _from_headers(
    pairs: Sequence[Pair], missing: np.ndarray, settings: FeatureSettings, cache: Path | None
) -> np.ndarray:
    """Return the frames of the pairs at some indices from the headers of their files."""
    path = None if cache is None else cache / f"{_key(pairs, settings)}-lengths.npy"
    if path is not None and path.is_file():
        try:
            kept: np.ndarray = np.load(path)
        except (OSError, ValueError, EOFError):  # damaged
            kept = np.empty(0)
        if kept.shape == missing.shape and kept.dtype == np.int64:
            return kept

    def length(index: int) -> int:
        try:
            source = pairs[index].source
            if isinstance(source, Frames):
                return len(np.lib.format.open_memmap(source.path, mode="r"))
            assert isinstance(source, Audio)
            samples = np.array([read_sound_header(source).seconds * settings.sample_rate])
            return int(_frames_in(samples, settings)[0])
        except (DataError, OSError, ValueError, TypeError):
            return 1

    # Threads wait for the disk, or the network, more than they compute.
    with ThreadPoolExecutor(4 * (os.cpu_count() or 1)) as threads:
        found = np.fromiter(threads.map(length, missing.tolist()), np.int64, len(missing))
    found = np.maximum(1, found)
    if path is not None:
        content = io.BytesIO()
        np.save(content, found)
        write_by_rename(path, content.getvalue())
    return found


def _key(pairs: Sequence[Pair], settings: FeatureSettings) -> str:
    """Hash what the pairs name, and the settings that decide how many frames there are."""
    hashed = hashlib.sha256(repr(settings).encode())
    if isinstance(pairs, Manifest):
        for path in pairs.files:
            with path.open("rb") as file:
                hashed.update(hashlib.file_digest(file, "sha256").digest())
        hashed.update(pairs.lines.tobytes())
    else:
        for pair in pairs:
            hashed.update(repr(pair.source).encode())
    return hashed.hexdigest()
