"""Times real time of the recogniser that ships, from sound files to labels, and of each part.

`python benchmarks/files.py FOLDER_OR_MANIFEST` reads the sounds of a folder or a manifest, whose
field `--target` is then evaluated too. The parts are the decoding of sound by 1, 4 and all reader
threads, the features, the transcription network in batches of several sizes, and the searches from
frames to labels; the last rows go from files to text through `Model.transcribe`, as `transduce
transcribe` does, and through `evaluate`. Each is called once to warm up; the fastest of three
further calls counts.

A machine without the corpus needs a folder of its own. From the manifest of a corpus,

    python benchmarks/files.py test.jsonl --write runs/flac --number 256

writes 256 sounds of some seconds as FLAC with a manifest beside them, about 25 MB, which

    python benchmarks/files.py runs/flac/manifest.jsonl --target phones --copies 8

lists eight times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import soundfile
import torch
from measure import DEVICE, machine, show

from transduce import SearchOptions, load
from transduce.audio.batched import frames_of_sounds
from transduce.audio.cache import read_ahead
from transduce.audio.features import Features
from transduce.cli.runs import read_pairs
from transduce.data.batches import Example
from transduce.data.pairs import Pair
from transduce.model import model as module
from transduce.model.evaluate import evaluate
from transduce.model.inputs import read_inputs
from transduce.model.model import Model, batches_of, search_examples

SUFFIXES = {".wav", ".flac", ".opus", ".ogg"}
BATCHES = (25_000, 50_000, 100_000, 200_000)  # frames that the network takes at once
SEARCHES = {
    "greedy": SearchOptions(with_timings=False),
    "W 10": SearchOptions(10, with_timings=False),
    "W 10, timings": SearchOptions(10, with_timings=True),
    "W 100": SearchOptions(100, with_timings=False),
}


def write_flac(manifest: Path, folder: Path, number: int) -> None:
    """Write the first sounds of a manifest as FLAC, and a manifest of them, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in manifest.read_text().splitlines()[:number]:
        fields = json.loads(line)
        path = manifest.parent / fields["audio_filepath"]
        samples, rate = soundfile.read(path, dtype="int16")
        soundfile.write(folder / f"{path.stem}.flac", samples, rate)
        lines.append(json.dumps(fields | {"audio_filepath": f"{path.stem}.flac"}) + "\n")
    (folder / "manifest.jsonl").write_text("".join(lines))


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three calls, after one to warm up."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def parts(model: Model, pairs: list[Pair]) -> dict[str, Callable[[], object]]:
    """Return a call for each part of the work, with the results of the parts before it at hand."""
    signature, device = model.signature, model.device
    assert signature.features is not None

    def decode(num_threads: int) -> object:
        with ThreadPoolExecutor(num_threads) as readers:
            return list(read_ahead(readers, signature.sampled, pairs, 2 * num_threads))

    sounds = [sound for pair in pairs if (sound := signature.sampled(pair)) is not None]
    waves = [sound.wave for sound in sounds]
    features = Features(signature.features).to(device)
    examples = [one for one in signature.framed(sounds, device) if isinstance(one, Example)]

    def network(num_frames: int) -> None:
        for _, batch in batches_of(model, examples, num_frames):
            model.network.transcription_network(batch.frames, batch.num_frames)

    calls: dict[str, Callable[[], object]] = {}
    for count in sorted({1, 4, torch.get_num_threads()}):
        calls[f"decoding of sound, {count} threads"] = lambda count=count: decode(count)
    calls["features"] = lambda: frames_of_sounds(features, waves, signature.statistics)
    for size in BATCHES:
        name = f"transcription network, {size:,} frames at once"
        calls[name] = lambda size=size: network(size)
    for name, options in SEARCHES.items():
        calls[f"frames to labels, {name}"] = lambda options=options: [
            search_examples(model, group, options) for group in groups(examples, device)
        ]
    return calls


def groups(examples: list[Example], device: torch.device) -> list[list[Example]]:
    """Return examples in groups of as many frames as `Model.transcribe` holds."""
    most, found, count = module.HELD_FRAMES[device.type], list[list[Example]](), 0
    for example in examples:
        if not found or count >= most:
            found.append([])
            count = 0
        found[-1].append(example)
        count += example.num_frames
    return found


def whole(model: Model, pairs: list[Pair], with_targets: bool) -> dict[str, Callable[[], object]]:
    """Return calls that go from files to text, and from files to error rates."""
    calls: dict[str, Callable[[], object]] = {}
    for name, options in SEARCHES.items():
        calls[f"files to text, {name}"] = lambda options=options: [
            str(one) for one in model.transcribe(pairs, options)
        ]
        if with_targets:
            calls[f"evaluate, {name}"] = lambda options=options: evaluate(model, pairs, options)
    return calls


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sounds", type=Path, help="a folder of sounds, or a manifest")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--number", type=int, help="take only the first sounds")
    parser.add_argument("--copies", type=int, default=1, help="list every sound so many times")
    parser.add_argument("--target", help="the field of the manifest to evaluate")
    parser.add_argument("--write", type=Path, help="only write the sounds as FLAC into a folder")
    asked = parser.parse_args()
    if asked.write:
        write_flac(asked.sounds, asked.write, asked.number)
        return
    model = load("english-phone-recogniser").to(asked.device)
    files = [asked.sounds]
    if asked.sounds.is_dir():
        files = sorted(one for one in asked.sounds.rglob("*") if one.suffix.lower() in SUFFIXES)
    if asked.target:
        pairs = read_pairs(asked.sounds, model.signature, asked.target)
    else:
        pairs = read_inputs(model.signature, files)
    pairs = pairs[: asked.number] * asked.copies
    seconds = sum(one.recording.seconds for one in map(model.signature.sampled, pairs) if one)
    rows = []
    for calls in (parts(model, pairs), whole(model, pairs, bool(asked.target))):
        for name, call in calls.items():
            took = fastest(call)
            each = f"{1e6 * took / len(pairs):,.0f}"
            rows.append([name, f"{1000 * took:,.1f}", each, f"{seconds / took:,.0f}"])
    print(machine())
    title = f"{len(pairs)} files, {seconds:,.0f} s of sound, on {asked.device}"
    show(title, ["part", "ms", "µs a file", "times real time"], rows)


if __name__ == "__main__":
    main()
