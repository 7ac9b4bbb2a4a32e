"""Time of the beam search and of the plain sequential Algorithm 1, at the paper's sizes.

One utterance, T 304, K 39, prediction LSTM of 128, from its transcription vectors to the beam B
after the last frame. The weights are random and the outputs scaled, so that the beam stays full and
the search expands about a quarter more hypotheses than the beam holds: 1.5 million at a width of
4000. Run it as `python benchmarks/decode.py`, or with widths: `python benchmarks/decode.py 10 100`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median

import torch
from measure import DEVICE, extra_megabytes, machine, show
from torch import Tensor

from transduce import NULL, PredictionNetwork, SearchOptions, Transducer
from transduce.decoding import reference
from transduce.decoding.hypothesis import Found
from transduce.decoding.problem import Problem, SearchBackend

T, K, HIDDEN = 304, 39, 128
WIDTHS = (10, 100, 1000, 4000)
REFERENCE_WIDTH = 1000  # the widest beam for which the sequential loop takes about a minute
Search = Callable[[PredictionNetwork, Tensor, int], Found | None]


def full_beam() -> tuple[PredictionNetwork, Tensor]:
    """Return a prediction network and f [T, K+1] with which many hypotheses stay probable."""
    torch.manual_seed(0)
    network = Transducer(26, K, HIDDEN).prediction_network
    f = 2 * torch.randn(T, K + 1)
    f[:, NULL] += 8
    with torch.no_grad():
        network.output.weight *= 3
    return network.to(DEVICE), f.to(DEVICE)


def search_with(backend: SearchBackend) -> Search:
    """Return the beam search of a backend."""

    def search(network: PredictionNetwork, f: Tensor, width: int) -> Found:
        problem = Problem([f], network, None, K + 1, SearchOptions(width))
        [found] = backend.beam_searches(problem)
        if f.is_cuda:
            torch.cuda.synchronize()
        return found

    return search


def seconds(call: Callable[[], object], most: float = 15.0) -> float:
    """Return the median time of up to five calls after a warm-up call; a long call runs once."""
    start = time.perf_counter()
    call()
    times = [time.perf_counter() - start]
    if times[0] > most:
        return times[0]
    while len(times) < 6 and sum(times) < most:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[1:] or times)


def torchaudio_search(network: PredictionNetwork) -> Search | None:
    """Return torchaudio's beam search over the same networks; None if it cannot be imported."""
    try:
        models = import_module("torchaudio.models")
    except (ImportError, OSError) as error:
        print(f"torchaudio cannot be imported: {str(error).splitlines()[0]}", file=sys.stderr)
        return None

    class Joint(torch.nn.Module):
        """The interface that RNNTBeamSearch calls; null is last, which is its default."""

        def predict(self, y: Tensor, lengths: Tensor, state: list[list[Tensor]] | None):  # type: ignore[no-untyped-def]
            labels = torch.where(y[:, 0] == K, NULL, y[:, 0] + 1)
            before = network.start(len(labels)) if state is None else tuple(state[0])
            g, after = network.step(labels, before)
            return g[:, None], lengths, [[*after]]

        def join(self, f: Tensor, f_lengths: Tensor, g: Tensor, g_lengths: Tensor):  # type: ignore[no-untyped-def]
            outputs = (f[:, :, None] + g[:, None]).roll(-1, -1)
            return outputs, f_lengths, g_lengths

    searcher = models.RNNTBeamSearch(Joint(), blank=K)

    def search(_: PredictionNetwork, f: Tensor, width: int) -> None:
        searcher._search(f[None], None, width)

    return search


@torch.no_grad()
def main() -> None:
    widths = tuple(map(int, sys.argv[1:])) or WIDTHS
    print(machine())
    network, f = full_beam()
    ours = "beam_search" if DEVICE == "cpu" else "beam_search, on the GPU"
    contenders = {ours: (search_with(import_module(f"transduce.decoding.{DEVICE}")), widths)}
    if DEVICE == "cpu":
        narrow = tuple(width for width in widths if width <= REFERENCE_WIDTH)
        contenders["plain sequential Algorithm 1"] = search_with(reference), narrow
        if (peer := torchaudio_search(network)) is not None:
            contenders["torchaudio"] = peer, (10,)
    rows = []
    for name, (search, its_widths) in contenders.items():
        for width in its_widths:
            call = partial(search, network, f, width)
            time_taken = seconds(call)
            found = call() if time_taken < 15 else None
            memory = f"{extra_megabytes(call):.0f}" if name == ours else ""
            work = [f"{found.num_expanded:,}", f"{found.num_prefixes:,}"] if found else ["", ""]
            rows.append([name, str(width), f"{time_taken:.3f}", memory, *work])
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["contender", "W", "seconds", "MB", "hypotheses expanded", "prefixes stepped to"]
    show(f"One utterance: T {T}, K {K}, prediction LSTM of {HIDDEN}", columns, rows)


if __name__ == "__main__":
    main()
