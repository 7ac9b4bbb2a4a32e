"""Sounds and words a second of `--shard`, beside a loop over the library, and where the time goes.

`python benchmarks/bulk.py` makes its own sounds and words. The full figures, from a corpus, are

    python benchmarks/bulk.py --manifest test.jsonl --sounds 2000 --words 1000000 --turns 3

A manifest with fewer sounds is repeated. A loop is `Model.transcribe` for sounds and
`Pronouncer.pronounce` for words, in memory; a shard reads a manifest or a text file, and writes
JSON. Both take turns in one process, after a small turn each to warm up, and the medians count. CPU
is the time of all threads, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import numpy as np
import soundfile
import torch
from measure import machine, show

from transduce import SearchOptions, cli, load
from transduce.cli.bulk import BulkFlags
from transduce.data.batches import Example
from transduce.data.manifest import read_manifest
from transduce.model.lines import Pronouncer
from transduce.model.model import SEARCHED_FRAMES, Model, batches_of
from transduce.model.transcripts import Transcript, json_lines

RATE = 16_000
WARM_UP = 0.1  # the share of the inputs in the first turn, which does not count


def make_sounds(folder: Path, number: int) -> Path:
    """Write sounds of some seconds as FLAC, vowel-like buzzes with pauses, and their manifest."""
    draw, lines = np.random.default_rng(0), []
    for i in range(number):
        seconds = draw.uniform(3, 10)
        t = np.arange(int(seconds * RATE)) / RATE
        buzz = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 25))
        loud = np.maximum(0, np.sin(2 * np.pi * draw.uniform(1, 3) * t))
        wave = 0.1 * loud * buzz + 0.002 * draw.normal(size=len(t))
        soundfile.write(folder / f"{i}.flac", wave, RATE)
        lines.append(json.dumps({"audio_filepath": str(folder / f"{i}.flac")}))
    return write_lines(folder / "sounds.jsonl", lines)


def make_words(number: int) -> list[str]:
    """Return words of two to five syllables, most of them different."""
    draw = random.Random(0)
    starts, vowels = ["b", "c", "dr", "f", "gl", "h", "k", "l", "m", "n", "p", "r", "st"], "aeiou"
    return [
        "".join(draw.choice(starts) + draw.choice(vowels) for _ in range(draw.randint(2, 5)))
        for _ in range(number)
    ]


def repeated(manifest: Path, folder: Path, number: int) -> Path:
    """Write a manifest of so many lines, with absolute paths."""
    lines = []
    for line in islice(cycle(manifest.read_text().splitlines()), number):
        path = str(manifest.parent.absolute() / json.loads(line)["audio_filepath"])
        lines.append(json.dumps({"audio_filepath": path}))
    return write_lines(folder / "sounds.jsonl", lines)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def measured(
    contenders: dict[str, Callable[[float], object]], turns: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds, and CPU seconds, of each contender; they take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, call in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call(1.0 if turn else WARM_UP)
            if turn:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: (median(w for w, _ in t), median(c for _, c in t)) for name, t in times.items()}


def rows(found: dict[str, tuple[float, float]], number: int) -> Iterator[list[str]]:
    """Yield a row for each contender: inputs a second, share of the loop's, CPU of an input."""
    [loop, *_] = found.values()
    for name, (wall, cpu) in found.items():
        share = f"{100 * loop[0] / wall:.0f} %"
        yield [name, f"{number / wall:,.0f}", share, f"{1e3 * cpu / number:.3f}"]


def stages(model: Model, sources: list, options: SearchOptions) -> list[list[str]]:
    """Return the milliseconds of an input in each part of the work, one part after the other."""
    signature, spent = model.signature, dict[str, float]()

    def timed(name: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = call()
        spent[name] = 1e3 * (time.perf_counter() - start) / len(sources)
        return result

    if signature.sources is None:
        sampled = timed("decoding of sound", lambda: [signature.sampled(one) for one in sources])
        examples = timed("features", lambda: signature.framed(sampled, model.device))
    else:
        examples = timed("letters to ids", lambda: [signature.example(one) for one in sources])
    assert all(isinstance(one, Example) for one in examples)
    batches = [batch for _, batch in batches_of(model, examples, SEARCHED_FRAMES["cpu"])]
    network = model.network.transcription_network
    timed("transcription network", lambda: [network(b.frames, b.num_frames) for b in batches])
    found = timed("network and search", lambda: [model.network.search(b, options) for b in batches])
    pairs = zip((p for b in batches for p in b.pairs), (h for f in found for h in f), strict=True)
    results = [
        Transcript(pair.name, best, signature.targets, signature.separator) for pair, best in pairs
    ]
    timed("JSON", lambda: [json_lines([one]) for one in results])
    return [[name, f"{took:.3f}"] for name, took in spent.items()]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sounds", type=int, default=200)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--manifest", type=Path, help="sounds in place of synthetic ones")
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    print(machine())
    columns = ["way", "a second", "of the loop", "CPU ms each"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def shard(command: Callable[..., None], *inputs: object, **options: object) -> None:
            command(
                *inputs, output=folder / "out", overwrite=True, bulk=BulkFlags("1/1"), **options
            )

        def part(lines: list[str], share: float) -> Path:
            """Write the first lines, which a small turn takes."""
            return write_lines(folder / "part.jsonl", lines[: max(1, int(share * len(lines)))])

        if asked.sounds:
            made = asked.manifest is None
            manifest = (
                make_sounds(folder, asked.sounds)
                if made
                else repeated(asked.manifest, folder, asked.sounds)
            )
            recogniser, pairs = load("english-phone-recogniser"), read_manifest(manifest, None)
            options, lines = SearchOptions(10), manifest.read_text().splitlines()
            contenders = {
                "a loop over Model.transcribe": lambda share: list(
                    recogniser.transcribe(pairs[: max(1, int(share * len(pairs)))], options)
                ),
                "recognize --shard 1/1": lambda share: shard(
                    cli.recognize, part(lines, share), device="cpu"
                ),
            }
            found = measured(contenders, asked.turns)
            show(f"{asked.sounds} sounds, W 10", columns, list(rows(found, asked.sounds)))
            parts = stages(recogniser, pairs[:100], options)
            show("parts, of 100 sounds, one after the other", ["part", "ms each"], parts)
        if asked.words:
            pronouncer, words = load("english-pronouncer"), make_words(asked.words)
            greedy = SearchOptions(with_timings=False)
            contenders = {
                "a loop over Pronouncer.pronounce": lambda share: list(
                    Pronouncer(pronouncer).pronounce(words[: int(share * len(words))], greedy)
                ),
                "phonemize --shard 1/1": lambda share: shard(
                    cli.phonemize, str(part(words, share))
                ),
            }
            found = measured(contenders, asked.turns)
            show(f"{asked.words:,} words, greedy", columns, list(rows(found, asked.words)))
            parts = stages(pronouncer, words[:4096], greedy)
            show("parts, of 4,096 words, one after the other", ["part", "ms each"], parts)


if __name__ == "__main__":
    main()
