"""Speed and memory of forced alignment: utterances, and a long recording with errors in its text.

    python benchmarks/align.py LIBRISPEECH_10S [--minutes 30] [--number 200]

The long recording is a number of utterances of the test set, one after the other, with their texts.
A word is in its place if its interval is within its own utterance. Then ten utterances are left out
of the text, and then of the sound. The transcription network alone, whose time bounds that of
everything else, takes turns with the whole.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import soundfile
from measure import machine

from transduce.alignment.align import Aligner, Task
from transduce.alignment.result import Alignment
from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio
from transduce.model.model import load

RATE, TURNS = 16_000, 2
LEFT_OUT = slice(20, 30)  # utterances


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_megabytes() -> float:
    """Return the most memory that the process has had."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 1024


def in_place(found: Alignment, utterances: list[tuple[float, float, int]]) -> tuple[int, int, int]:
    """Count words within their utterances, words not found, and all words.

    An utterance is its start, its end and the number of its words; all of them are in the text.
    """
    inside = missing = 0
    words = iter(found.words)
    for start, end, number in utterances:
        for _ in range(number):
            word = next(words)
            missing += not word.phones
            if word.phones:
                first, last = word.phones[0].interval, word.phones[-1].interval
                inside += start - 0.05 <= first.start.time and last.end.time <= end + 0.05
    return inside, missing, len(found.words)


def main() -> None:
    """Print the speeds, the memory, and the words in their places."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--number", type=int, default=200)
    arguments = parser.parse_args()
    corpus = arguments.corpus
    rows = [json.loads(line) for line in (corpus / "test.jsonl").read_text().splitlines()]
    aligner = Aligner(load("english-phone-recogniser"))
    print(machine(), "\n")
    some = rows[:: max(1, len(rows) // arguments.number)][: arguments.number]
    tasks = [Task(corpus / row["audio_filepath"], row["text"]) for row in some]
    sounds = [aligner.model.signature.example(task.sound).frames for task in tasks]
    duration = sum(row["duration"] for row in some)
    list(aligner.align_many(tasks[:16]))  # compiles, and reads the dictionary
    whole, network = [], []
    for _ in range(TURNS):
        whole.append(seconds_of(lambda: list(aligner.align_many(tasks))))
        network.append(
            seconds_of(
                lambda: [aligner._transcribe(sounds[i : i + 16]) for i in range(0, len(sounds), 16)]
            )
        )
    print("| | times real time | the transcription network alone |\n|---|---|---|")
    speeds = f"{duration / median(whole):.0f} | {duration / median(network):.0f}"
    print(f"| {len(tasks)} utterances | {speeds} |", flush=True)

    waves, texts, total = list[np.ndarray](), list[str](), 0.0
    for row in rows:
        if total > 60 * arguments.minutes:
            break
        wave = read_wave(Audio(corpus / row["audio_filepath"]), RATE, convert=True).numpy()
        waves.append(wave)
        texts.append(row["text"])
        total += len(wave) / RATE
    kept = [i for i in range(len(waves)) if i not in range(LEFT_OUT.start, LEFT_OUT.stop)]
    places = _places(waves, texts)
    with TemporaryDirectory() as folder:
        file = Path(folder, "long.wav")
        soundfile.write(file, np.concatenate(waves), RATE)

        windows = list(aligner.model.signature.windows(file, 0.02))
        frames = [aligner.model.signature.example(window.sound).frames for window in windows]
        alone = seconds_of(lambda: [aligner._transcribe([one]) for one in frames])
        start = time.perf_counter()
        [found] = aligner.align_many([Task(file, " ".join(texts))])
        taken = time.perf_counter() - start
        print(f"| {total / 60:.0f} minutes | {total / taken:.0f} | {total / alone:.0f} |")
        print(f"\nthe process has had {peak_megabytes():.0f} MiB at most\n", flush=True)
        print("| text | words | in their places | not found | flagged |\n|---|---|---|---|---|")
        _show("right", found, places)
        [other] = aligner.align_many([Task(file, " ".join(texts[i] for i in kept))])
        _show("lacks ten utterances", other, [places[i] for i in kept])
    shorter = np.concatenate([waves[i] for i in kept])
    moved = iter(_places([waves[i] for i in kept], [texts[i] for i in kept]))
    nowhere = [(0.0, 0.0, len(text.split())) for text in texts]
    [other] = aligner.align_many([Task(shorter, " ".join(texts))])
    here = [next(moved) if i in kept else nowhere[i] for i in range(len(texts))]
    _show(f"has ten more, {sum(n for _, _, n in nowhere[LEFT_OUT])} words", other, here)


def _places(waves: list[np.ndarray], texts: list[str]) -> list[tuple[float, float, int]]:
    ends = np.cumsum([len(wave) / RATE for wave in waves])
    starts = [0.0, *ends[:-1].tolist()]
    return [(a, b, len(t.split())) for a, b, t in zip(starts, ends.tolist(), texts, strict=True)]


def _show(name: str, found: object, places: list[tuple[float, float, int]]) -> None:
    assert isinstance(found, Alignment), found
    inside, missing, number = in_place(found, places)
    print(f"| {name} | {number} | {inside} | {missing} | {len(found.misfits)} |", flush=True)


if __name__ == "__main__":
    main()
