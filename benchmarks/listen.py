"""How late `transduce listen` prints phones of sound that comes in real time.

    python benchmarks/listen.py MODEL SOUND...

The sounds, of the model's rate, are put one after the other with a second of silence between them.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np

from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio
from transduce.model.model import load

PIECE_SECONDS = 0.05  # that the pipe gets at once
START_SECONDS = 15  # for the command to load its model


def main(model: str, *sounds: str) -> None:
    """Print the delays of phones and of finished utterances."""
    features = load(model).signature.features
    rate = features.sample_rate
    waves = [read_wave(Audio(Path(sound)), rate, convert=True).numpy() for sound in sounds]
    silence = np.zeros(rate, np.float32)
    whole = np.concatenate([part for wave in waves for part in (wave, silence)])
    content = (32767 * whole).astype("<i2").tobytes()
    command = [sys.executable, "-m", "transduce", "listen", "-", "--model", model]
    process = subprocess.Popen(
        [*command, "--format", "json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    time.sleep(START_SECONDS)
    start = time.monotonic()
    size = 2 * round(PIECE_SECONDS * rate)

    def feed() -> None:
        for i in range(0, len(content), size):
            due = start + (i + size) / (2 * rate)
            time.sleep(max(0.0, due - time.monotonic()))
            process.stdin.write(content[i : i + size])
            process.stdin.flush()
        process.stdin.close()

    Thread(target=feed).start()
    shown = dict[tuple[str, float], float]()
    stable, finals = list[float](), list[float]()
    for line in process.stdout:
        now, message = time.monotonic() - start, json.loads(line)
        if message["type"] == "final":
            finals.append(now - message["end"])
            continue
        stable += [now - phone["peak"] for phone in message["stable"]]
        for phone in message["stable"] + message["unstable"]:
            # The peak of an unstable phone may still move a little.
            shown.setdefault((phone["symbol"], round(phone["peak"], 1)), now - phone["peak"])
    process.wait()
    print(f"{len(content) / 2 / rate:.0f} s of sound, {len(finals)} utterances; seconds:")
    print("| delay | median | 95th percentile |\n|---|---|---|")
    rows = {
        "a phone is first shown after its peak": list(shown.values()),
        "a phone is stable after its peak": stable,
        "an utterance is printed after its last sample": finals,
    }
    for name, delays in rows.items():
        median, late = np.quantile(delays, [0.5, 0.95])
        print(f"| {name} | {median:.2f} | {late:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
