"""Speed of feature extraction on one core, in seconds of sound for each second of computing.

Give sound files, or folders of them: `python benchmarks/features.py FOLDER`. Without arguments the
script generates sound, and measures only the computation of features.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import machine, show

from transduce.audio.cache import FrameReader
from transduce.audio.features import SPECTROGRAM, Features, FeatureSettings
from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio, Origin, Pair

RATE = 16_000
SUFFIXES = {".wav", ".flac", ".opus", ".ogg"}


def sound_files(arguments: list[str], limit: int) -> list[Path]:
    """Return the sound files among the arguments and in their folders, at most `limit`."""
    paths = [p for a in map(Path, arguments) for p in (sorted(a.rglob("*")) if a.is_dir() else [a])]
    return [path for path in paths if path.suffix.lower() in SUFFIXES][:limit]


def speed(call: Callable[[], object], seconds: float) -> str:
    """Return the seconds of sound for each second of the fastest of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return f"{seconds / min(times):.0f}"


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    files = sound_files(sys.argv[1:], limit=200)
    waves = [read_wave(Audio(path), RATE) for path in files]
    waves = waves or [torch.randn(10 * RATE) / 10 for _ in range(60)]
    seconds = sum(map(len, waves)) / RATE
    rows = []
    for name, settings in (("cepstra", FeatureSettings()), ("log_mel", SPECTROGRAM)):
        features = Features(settings)
        rows.append([name, speed(lambda f=features: [f(wave[None]) for wave in waves], seconds)])
    if files:
        pairs = [Pair(path.stem, Audio(path), (), Origin(path)) for path in files]
        reader = FrameReader()
        rows.append(["reading", speed(lambda: [read_wave(Audio(p), RATE) for p in files], seconds)])
        rows.append(["reading, cepstra", speed(lambda: list(map(reader, pairs)), seconds)])
        with tempfile.TemporaryDirectory() as folder:
            cached = FrameReader(cache=Path(folder))
            list(map(cached, pairs))
            rows.append(["reading cached frames", speed(lambda: list(map(cached, pairs)), seconds)])
    title = f"{len(waves)} sounds of {seconds:.0f} s in total, one at a time, on one core"
    show(title, ["step", "times real time"], rows)


if __name__ == "__main__":
    main()
