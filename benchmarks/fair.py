"""Time of a training step alone, and beside one process that computes all the time.

GNU OpenMP's threads wait for their next piece of work in a loop before they sleep: by default for
300,000 rounds, some 6 ms, in which nobody else has the core. `import transduce` bounds the rounds
(GOMP_SPINCOUNT). A process each measures both numbers of rounds, in turn, in one run. The
steps are those of step.py. Run it on a machine that is otherwise idle, as
`python benchmarks/fair.py`; `--spins 100,1000` compares others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median, quantiles

ROUNDS, SECONDS = 6, 2.0
BATCHES = (1, 32)
DEFAULT = 300_000  # GNU OpenMP's


class Contender:
    """A process that measures steps with a number of rounds when it is asked to."""

    def __init__(self, spins: int) -> None:
        environment = os.environ | {"GOMP_SPINCOUNT": str(spins)}
        command = [sys.executable, __file__, "--measure"]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def times(self, B: int) -> list[float]:
        """Return the milliseconds of steps with B sequences."""
        assert self.process.stdin and self.process.stdout
        print(B, file=self.process.stdin, flush=True)
        times: list[float] = json.loads(self.process.stdout.readline())
        return times


def measure() -> None:
    """Read batch sizes; print the milliseconds of their steps as a list."""
    import torch
    from step import step

    torch.manual_seed(0)
    calls = {B: step(B) for B in BATCHES}
    for line in sys.stdin:
        call, times = calls[int(line)], list[float]()
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        print(json.dumps(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spins", default="", help="numbers of rounds, with commas between them")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    from measure import machine, show

    import transduce  # noqa: F401, which sets the number of rounds

    print(machine())
    print(f"{os.getloadavg()[0]:.1f} processes wanted to run in the last minute")
    ours = options.spins or os.environ["GOMP_SPINCOUNT"]
    contenders = {n: Contender(n) for n in (DEFAULT, *map(int, ours.split(",")))}
    results: dict[tuple[int, int, bool], list[float]] = {}
    for _ in range(ROUNDS + 1):  # the first warms up
        warm = bool(results) or None
        for beside in (False, True):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if beside else None
            for B in BATCHES:
                for spins, contender in contenders.items():
                    times = contender.times(B)
                    results.setdefault((B, spins, beside), []).extend(times if warm else [])
            if busy:
                busy.kill()
                busy.wait()
    rows = []
    for B in BATCHES:
        today = median(results[B, DEFAULT, False])
        for spins in contenders:
            alone, beside = (results[B, spins, busy] for busy in (False, True))
            rows.append(
                [
                    *(f"B {B}", f"{spins:,}", f"{median(alone):.1f}", f"{median(beside):.1f}"),
                    *(f"{median(beside) / median(alone):.2f}", f"{median(alone) / today:.2f}"),
                    *(f"{quantiles(alone, n=10)[0]:.1f}", f"{quantiles(beside, n=10)[0]:.1f}"),
                ]
            )
    columns = ["batch", "rounds", "alone, ms", "beside, ms", "beside / alone", "alone / default's"]
    show("Medians, and the fastest tenth", [*columns, "alone, fast", "beside, fast"], rows)
    for contender in contenders.values():
        contender.process.terminate()
        contender.process.wait()


if __name__ == "__main__":
    main()
