"""Trials that take too long for the tests: kills, shared folders, threads, long inputs, wide beams.

    python benchmarks/trials.py            all trials, about half an hour
    python benchmarks/trials.py kills      one of them: kills, folder, threads, stream, sound, beam

Each prints what it found; the table at the end says which trials passed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from cyclopts import App
from measure import machine
from rich.console import Console
from rich.table import Table

import transduce

COMMAND = [sys.executable, "-m", "transduce"]
RECIPE = """
[data]
corpus = "tsv"
training = "pairs.tsv"
num_validation = 40

[network]
hidden_size = 24
prediction_size = 24

[train]
optimiser = "adamw"
learning_rate = 0.01
max_sequences = 16
max_epochs = 12
device = "cpu"
"""
MEGABYTES = 30  # by which a process may grow: noise of the allocator, not a leak
app = App(help="Trials that take too long for the tests.")


class Result(NamedTuple):
    """One row of the table."""

    trial: str
    found: str
    passed: bool


def show(results: list[Result]) -> None:
    """Print the table of results; exit with 1 if a trial failed."""
    table = Table(title=f"Trials, {machine()}", title_style="")
    for column in ("trial", "found", "passed"):
        table.add_column(column)
    for trial, found, passed in results:
        table.add_row(trial, found, "yes" if passed else "NO")
    Console(width=120).print(table)
    if not all(result.passed for result in results):
        raise SystemExit(1)


# --- Kills, and two runs in one folder ----------------------------------------------------------


def write_corpus(folder: Path) -> None:
    """Write a recipe, and words with the same words in capitals."""
    draw = random.Random(0)
    words = {"".join(draw.choices("abcdefg", k=draw.randint(3, 9))) for _ in range(700)}
    lines = [f"{word}\t{word.upper()}\n" for word in sorted(words)]
    (folder / "pairs.tsv").write_text("".join(lines))
    (folder / "recipe.toml").write_text(RECIPE)


def train(folder: Path, run: str) -> subprocess.Popen[str]:
    """Start training; continue the run if it has a state to continue from."""
    state = folder / run / "last.safetensors"
    if not state.exists():
        shutil.rmtree(folder / run, ignore_errors=True)
    command = [*COMMAND, "train", "recipe.toml", "--run", run]
    command += ["--resume"] if state.exists() else []
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, **pipes)


@app.command
def kills(count: int = 20, seed: int = 0) -> None:
    """Kill a training at random moments, resume it, and compare the model bit for bit."""
    show([kills_trial(count, seed)])


def kills_trial(count: int, seed: int) -> Result:
    """Return whether killed runs, resumed, end with the model of a run without kills."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        start = time.perf_counter()
        if train(folder, "whole").wait():
            return Result("kills", "the run without kills failed", False)
        seconds = time.perf_counter() - start
        expected = (folder / "whole" / "model.safetensors").read_bytes()
        killed = rounds = 0
        equal = True
        while killed < count:
            rounds += 1
            done = False
            while not done:
                process = train(folder, f"round-{rounds}")
                try:
                    # Some rounds end before they are killed, which makes them a comparison too.
                    code = process.wait(
                        draw.uniform(0.3, 1.1) * seconds if killed < count else None
                    )
                    if code:
                        return Result(
                            "kills", f"resuming failed: {process.communicate()[1]}", False
                        )
                    done = True
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    killed += 1
                    print(f"kill {killed} of {count}")
            found = (folder / f"round-{rounds}" / "model.safetensors").read_bytes()
            equal = equal and found == expected
    said = "equal" if equal else "DIFFERENT"
    return Result("kills", f"{killed} kills, {rounds} runs to their end, models {said}", equal)


@app.command
def folder() -> None:
    """Start a second training in the folder of one that runs; it must be refused."""
    show([folder_trial()])


def folder_trial() -> Result:
    """Return whether the second run is refused in one sentence, and the first goes on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        recipe = RECIPE.replace("max_epochs = 12", "max_epochs = 60")
        (folder / "recipe.toml").write_text(recipe)
        first = train(folder, "run")
        while not (folder / "run" / "last.safetensors").exists() and first.poll() is None:
            time.sleep(0.05)
        second = train(folder, "run")
        _, said = second.communicate()
        goes_on = first.poll() is None
        first.kill()
        first.wait()
    refused = second.returncode == 1 and len(said.splitlines()) == 1
    found = said.strip() or f"the second run exited with {second.returncode}"
    return Result("folder", found, refused and goes_on)


# --- Threads ------------------------------------------------------------------------------------


@app.command
def threads(count: int = 8, repeats: int = 5) -> None:
    """Call a model from many threads at once; compare with calls from one thread, bit for bit."""
    show(threads_trial(count, repeats))


def threads_trial(count: int, repeats: int) -> list[Result]:
    """Return a result for the models of text and of sound, greedy and by a beam."""
    generator = torch.Generator().manual_seed(0)
    waves = [0.1 * torch.randn(4000 * n, generator=generator) for n in (1, 2, 4, 8)]
    words = ["transducer", "network", "a", "internationalisation", "sequence", "thorough"]
    results = []
    for name, inputs in (("english-pronouncer", words * 20), ("english-phone-recogniser", waves)):
        model = transduce.load(name)
        for width in (1, 4):
            calls = [[one] for one in inputs[:6]] + [list(inputs)]

            def call(some: list, model=model, width=width) -> list:  # type: ignore[type-arg, no-untyped-def]
                return [found.hypotheses for found in model(some, beam_width=width)]

            def timed(calls=calls, call=call) -> tuple[list, float]:  # type: ignore[type-arg, no-untyped-def]
                start = time.perf_counter()
                return [call(some) for some in calls], time.perf_counter() - start

            timed()
            expected, before = timed()
            memory = resident("self")
            barrier = threading.Barrier(count)

            def work(i: int, calls=calls, call=call, expected=expected, barrier=barrier) -> int:  # type: ignore[no-untyped-def]
                barrier.wait()
                order = [(n + i) % len(calls) for n in range(len(calls))] * repeats
                return sum(call(calls[n]) != expected[n] for n in order)

            with ThreadPoolExecutor(count) as pool:
                different = sum(pool.map(work, range(count)))
            grown = resident("self") - memory
            after = min(timed()[1] for _ in range(3))
            found = (
                f"{count * repeats * len(calls)} calls, {different} different; "
                f"alone {before:.2f} s before, {after:.2f} s after; memory +{grown:.0f} MB"
            )
            passed = different == 0 and after < 1.5 * before + 0.1
            results.append(Result(f"threads: {name}, width {width}", found, passed))
    return results


def resident(process: int | str) -> float:
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


# --- A stream -----------------------------------------------------------------------------------


@app.command
def stream(minutes: float = 10) -> None:
    """Send words through `transduce phonemize` for some minutes; its memory must not grow."""
    show([stream_trial(minutes)])


def stream_trial(minutes: float) -> Result:
    """Return the memory of the command after its first seconds and at the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    pipes["stderr"] = subprocess.DEVNULL  # warnings about words that mean nothing
    process = subprocess.Popen([*COMMAND, "phonemize"], text=True, **pipes)
    assert process.stdin is not None and process.stdout is not None
    draw, end = random.Random(0), time.monotonic() + 60 * minutes
    sent = itertools.count()

    def write() -> None:
        while time.monotonic() < end:
            word = draw.choices("abcdefghijklmnoprstuvwy", k=draw.randint(1, 14))
            process.stdin.write("".join(word) + "\n")
            next(sent)
        process.stdin.close()

    writer = threading.Thread(target=write)
    writer.start()
    lines, begun, at_start, memory = 0, None, 0.0, 0.0
    for _ in process.stdout:
        lines += 1
        if lines % 500 == 0:
            memory = resident(process.pid)
            begun = begun or time.monotonic()
            # By then batches have their full size and kernels are loaded.
            if time.monotonic() - begun < 0.2 * 60 * minutes:
                at_start = memory
    writer.join()
    code = process.wait()
    found = (
        f"{lines} words; {at_start:.0f} MB after a fifth of the time, {memory:.0f} MB at the end"
    )
    passed = code == 0 and lines == next(sent) and memory - at_start < MEGABYTES
    return Result(f"stream, {minutes:g} minutes", found, passed)


# --- Long sound, and a wide beam ------------------------------------------------------------------


@app.command
def sound(minutes: float = 10) -> None:
    """Recognise minutes of sound with the times of its phones; print its memory and its time."""
    show([sound_trial(minutes)])


def sound_trial(minutes: float) -> Result:
    """Return the peak of memory, which must stay below 1.2 GB, and the seconds."""
    rate = 16_000
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "long.flac"
        with soundfile.SoundFile(path, "w", rate, 1) as file:
            # A vowel-like buzz of changing pitch, with a pause every few seconds.
            for _ in range(round(60 * minutes / 4)):
                pitch = np.repeat(draw.uniform(80, 240, 30), rate // 10)
                buzz = np.sign(np.sin(2 * np.pi * np.cumsum(pitch) / rate))
                file.write(np.concatenate([0.1 * buzz, np.zeros(rate)]))
        command = [*COMMAND, "recognize", str(path), "--output", name]
        megabytes, seconds, code = run(command)
    found = f"{megabytes:.0f} MB, {seconds:.0f} s with the start of the command"
    return Result(f"sound, {minutes:g} minutes", found, code == 0 and megabytes < 1200)


@app.command
def beam(width: int = 1000, frames: int = 304) -> None:
    """Search with an untrained network, whose beam never settles; print its memory and its time."""
    show([beam_trial(width, frames)])


UNTRAINED = """
import sys, torch
from transduce import Transducer, beam_search
width, frames = map(int, sys.argv[1:])
torch.manual_seed(0)
model = Transducer(26, 39)
for weights in model.parameters():
    torch.nn.init.normal_(weights, 0, 0.35)
x = torch.randn(1, frames, 26)
beam_search(model, x, torch.tensor([frames]), beam_width=width, with_timings=False)
"""


def beam_trial(width: int, frames: int) -> Result:
    """Return the peak of memory, which must stay below 2 GB, and the seconds."""
    command = [sys.executable, "-W", "ignore", "-c", UNTRAINED, str(width), str(frames)]
    megabytes, seconds, code = run(command)
    found = f"{megabytes:.0f} MB, {seconds:.0f} s"
    return Result(f"beam, W {width}, T {frames}", found, code == 0 and megabytes < 2000)


def run(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return its peak of memory in MB, its seconds and its exit code."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss / 1024, time.perf_counter() - start, process.returncode


@app.default
def every(count: int = 20, minutes: float = 10) -> None:
    """Run all trials."""
    results = [kills_trial(count, 0), folder_trial(), *threads_trial(8, 5), stream_trial(minutes)]
    show([*results, sound_trial(10), beam_trial(1000, 304)])


if __name__ == "__main__":
    app()
