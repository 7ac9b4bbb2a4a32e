"""Speed of changed sound, in seconds of sound for each second of computing.

Give sound files, or folders of them: `python benchmarks/augment.py FOLDER`. Without arguments the
script writes noise into FLAC files. Each row reads the files, changes them in one way, and computes
40 log mel energies a frame. The rate is for each second that a core computes, in all threads, so
that other jobs of the machine do not count; the last rows are for seconds that pass, in several
threads, and need an idle machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
import torch
from features import sound_files
from measure import machine, show

from transduce.alphabet import Alphabet
from transduce.audio.augmentation import Augmenter, SoundAugment
from transduce.audio.features import SPECTROGRAM, Statistics
from transduce.data.batches import Example
from transduce.data.pairs import Audio, Notation, Origin, Pair
from transduce.model.signature import Signature
from transduce.training.loading import Loader

KINDS = ("speed", "room", "noise", "gain", "band")


def written_sounds(folder: Path, count: int = 60, seconds: int = 10) -> list[Path]:
    """Write FLAC files of noise."""
    draw = np.random.default_rng(0)
    paths = [folder / f"{i}.flac" for i in range(count)]
    for path in paths:
        soundfile.write(path, draw.standard_normal(16_000 * seconds) / 10, 16_000)
    return paths


def rate(loader: Loader, epoch: int, seconds: float) -> float:
    """Return the seconds of sound that the loader reads, changes and transforms in a second."""
    clock = time.process_time if loader.num_threads == 1 else time.perf_counter
    start = clock()
    with closing(loader.load(epoch, [[i] for i in range(len(loader.examples))])) as batches:
        for _ in batches:
            pass
    return seconds / (clock() - start)


def main() -> None:
    print(machine())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = sound_files(sys.argv[1:], limit=300) or written_sounds(Path(folder))
        seconds = sum(soundfile.info(path).duration for path in files)
        pairs = [Pair(path.stem, Audio(path), (), Origin(path)) for path in files]
        nothing = torch.empty(0, dtype=torch.int64)
        examples = [Example(pair, torch.empty(0, SPECTROGRAM.size), nothing) for pair in pairs]
        statistics = Statistics(torch.zeros(SPECTROGRAM.size), torch.ones(SPECTROGRAM.size))
        signature = Signature(
            Alphabet("a"), Notation("characters", None), features=SPECTROGRAM, statistics=statistics
        )
        noise = files[0].parent
        settings = {"nothing": SoundAugment(gain=1e-30)}
        for kind in KINDS:
            settings[kind] = SoundAugment(**{kind: 1.0, "noise_folder": noise})  # type: ignore[arg-type]
        for codec in ("mu_law", "narrow", "mp3", "vorbis"):
            settings[codec] = SoundAugment(codec=1.0, codecs=(codec,))
        each = dict.fromkeys(KINDS, 0.5)
        settings["five kinds, half the time each"] = SoundAugment(**each, noise_folder=noise)  # type: ignore[arg-type]
        settings["all six, always"] = replace(
            settings["speed"], **dict.fromkeys((*KINDS, "codec"), 1.0)
        )
        loaders = {}
        for name, one in settings.items():
            loaders[name] = Loader(examples, signature, Augmenter(one, 16_000, 0))
            loaders[name].num_threads = 1
        for num_threads in sorted({2, 4, 8, 16} & set(range((os.cpu_count() or 1) + 1))):
            name = f"five kinds, half the time each, {num_threads} threads"
            augmenter = loaders["five kinds, half the time each"].augmenter
            loaders[name] = Loader(examples, signature, augmenter)
            loaders[name].num_threads = num_threads
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for epoch in range(4):  # all in turn; the first round compiles and fills the file cache
            for name, loader in loaders.items():
                rates[name].append(rate(loader, epoch, seconds))
        rows = [[name, f"{np.median(found[1:]):.0f}"] for name, found in rates.items()]
        title = f"{len(files)} sounds of {seconds:.0f} s in all: read, changed, 40 log mel energies"
        show(title, ["change", "times real time"], rows)


if __name__ == "__main__":
    main()
