"""Time and memory to open a manifest of a million lines, and to begin training on it.

`python benchmarks/manifest.py [LINES]` writes a few sounds and a manifest of their parts into a
temporary folder. Each row has the seconds of one step, those that cores computed for it, and by how
much the process had grown by then at most.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile
from measure import machine, show

from transduce.audio.features import SPECTROGRAM
from transduce.audio.lengths import num_frames_of
from transduce.data.batches import Batches
from transduce.data.manifest import Manifest
from transduce.data.pairs import Notation
from transduce.training.corpus import DataConfig, read_corpus
from transduce.training.loading import Loader

RATE, NUM_FILES, SECONDS = 16_000, 8, 60
PHONES = ("AA", "AE", "AH", "B", "CH", "D", "EH", "F", "G", "IH", "K", "L", "M", "N", "R", "S", "T")
SPACES = Notation("spaces", None)
Result = TypeVar("Result")


def write_manifest(folder: Path, num_lines: int, name: str = "train") -> Path:
    """Write sounds, and a manifest of random parts of them, 2 to 20 seconds long."""
    draw, noise = random.Random(0), np.random.default_rng(0)
    for i in range(NUM_FILES):
        samples = noise.standard_normal(RATE * SECONDS) / 10
        soundfile.write(folder / f"{i}.wav", samples, RATE)
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for _ in range(num_lines):
            duration = round(draw.uniform(2, 20), 2)
            line = {
                "audio_filepath": f"{draw.randrange(NUM_FILES)}.wav",
                "offset": round(draw.uniform(0, SECONDS - duration), 2),
                "duration": duration,
                "phones": " ".join(draw.choices(PHONES, k=round(8 * duration))),
            }
            file.write(json.dumps(line) + "\n")
    return path


def peak() -> float:
    """Return the most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    num_lines = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        path = write_manifest(Path(folder), num_lines)
        validation = write_manifest(Path(folder), 20, "validation")
        size, before, rows = path.stat().st_size / 1e6, peak(), list[list[str]]()

        def step(name: str, call: Callable[[], Result]) -> Result:
            start, computed = time.perf_counter(), time.process_time()
            result = call()
            times = (time.perf_counter() - start, time.process_time() - computed)
            rows.append([name, *(f"{one:.1f}" for one in times), f"{peak() - before:.0f}"])
            return result

        manifest = step("open", lambda: Manifest.open(path, SPACES, "phones"))
        step("lengths, from durations", lambda: num_frames_of(manifest, SPECTROGRAM))
        some = manifest.subset(np.arange(0, num_lines, max(1, num_lines // 10_000)))
        some.lines["seconds"] = np.nan
        step(f"lengths of {len(some):,}, from headers", lambda: num_frames_of(some, SPECTROGRAM))
        step(f"whether the files of {len(some):,} exist", lambda: list(some))
        data = DataConfig(
            training=path,
            validation=validation,
            target="phones",
            target_notation=SPACES,
            features=SPECTROGRAM,
        )
        corpus = step("read the corpus, with statistics", lambda: read_corpus(data))
        batches = Batches(corpus.training, 4_000_000, 0, max_sequences=32, pooling=2)
        order = step("the batches of an epoch", lambda: batches.epoch(0))
        loader = Loader(corpus.training, corpus.signature)
        with closing(loader.load(0, order)) as loaded:
            step("the first batch", lambda: next(loaded))
            step("100 more batches", lambda: [len(next(loaded).batch) for _ in range(100)])
        title = f"a manifest of {num_lines:,} lines, {size:.0f} MB"
        show(title, ["step", "seconds", "core seconds", "MB more at most"], rows)


if __name__ == "__main__":
    main()
