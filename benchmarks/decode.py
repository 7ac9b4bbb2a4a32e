"""The beam search beside the plain sequential Algorithm 1, at the paper's sizes.

One utterance, T 304, K 39, prediction LSTM of 128, from its transcription vectors to B after the
last frame. The weights are random and the outputs scaled, so that the beam stays full and about a
quarter more hypotheses are expanded than it holds: 1.5 million at a width of 4000. Run it as
`python benchmarks/decode.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median

import torch
from measure import DEVICE, extra_megabytes, machine, show
from torch import Tensor

from transduce import NULL, Transducer
from transduce.decoding import reference
from transduce.decoding.hypothesis import Found
from transduce.networks import PredictionNetwork

T, K, HIDDEN = 304, 39, 128
WIDTHS = (10, 100, 1000, 4000)
REFERENCE_WIDTHS = (10, 100, 1000)  # what takes the sequential loop a minute or less
Search = Callable[[PredictionNetwork, list[Tensor], int], list[Found]]


def full_beam() -> tuple[PredictionNetwork, Tensor]:
    """A prediction network and f [T, K+1] between which no few hypotheses win."""
    torch.manual_seed(0)
    network = Transducer(26, K, HIDDEN).prediction_network
    f = 2 * torch.randn(T, K + 1)
    f[:, NULL] += 8
    with torch.no_grad():
        network.output.weight *= 3
    return network.to(DEVICE), f.to(DEVICE)


def search_with(module: object) -> Search:
    def search(network: PredictionNetwork, utterances: list[Tensor], width: int) -> list[Found]:
        found: list[Found] = module.beam_searches(network, utterances, width, 20, lambda: None)  # type: ignore[attr-defined]
        if utterances[0].is_cuda:
            torch.cuda.synchronize()
        return found

    return search


def seconds(call: Callable[[], object], most: float = 15.0) -> float:
    """The median of up to five calls, after one that warms up if it is short."""
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
    """torchaudio's beam search over the same two networks, where it can be imported."""
    try:
        models = import_module("torchaudio.models")
    except (ImportError, OSError) as error:
        print(f"torchaudio is not here: {str(error).splitlines()[0]}", file=sys.stderr)
        return None

    class Joint(torch.nn.Module):
        """What RNNTBeamSearch calls, with null last as it is there by default."""

        def predict(self, y: Tensor, lengths: Tensor, state: list[list[Tensor]] | None):  # type: ignore[no-untyped-def]
            labels = torch.where(y[:, 0] == K, NULL, y[:, 0] + 1)
            before = None if state is None else (state[0][0], state[0][1])
            g, after = network.step(labels, before)
            return g[:, None], lengths, [[*after]]

        def join(self, f: Tensor, f_lengths: Tensor, g: Tensor, g_lengths: Tensor):  # type: ignore[no-untyped-def]
            outputs = (f[:, :, None] + g[:, None]).roll(-1, -1)
            return outputs, f_lengths, g_lengths

    searcher = models.RNNTBeamSearch(Joint(), blank=K)

    def search(_: PredictionNetwork, utterances: list[Tensor], width: int) -> list[Found]:
        for f in utterances:
            searcher._search(f[None], None, width)
        return []

    return search


def main() -> None:
    print(machine())
    network, f = full_beam()
    ours = "beam_search" if DEVICE == "cpu" else "beam_search, on the GPU"
    backend = import_module(f"transduce.decoding.{'cpu' if DEVICE == 'cpu' else 'tensors'}")
    contenders = {ours: (search_with(backend), WIDTHS)}
    if DEVICE == "cpu":
        contenders["plain sequential Algorithm 1"] = search_with(reference), REFERENCE_WIDTHS
        if (peer := torchaudio_search(network)) is not None:
            contenders["torchaudio"] = peer, (10,)
    rows = []
    with torch.no_grad():
        for name, (search, widths) in contenders.items():
            for width in widths:

                def call(search: Search = search, width: int = width) -> list[Found]:
                    return search(network, [f], width)

                time_taken = seconds(call)
                found = next(iter(call()), None) if time_taken < 15 else None
                memory = extra_megabytes(call) if name == ours else None
                rows.append(
                    [
                        name,
                        str(width),
                        f"{time_taken:.3f}",
                        "" if memory is None else f"{memory:.0f}",
                        "" if found is None else f"{found.num_expanded:,}",
                        "" if found is None else f"{found.num_prefixes:,}",
                    ]
                )
                print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["contender", "W", "seconds", "MB", "hypotheses expanded", "prefixes stepped to"]
    show(f"One utterance: T {T}, K {K}, prediction LSTM of {HIDDEN}", columns, rows)


if __name__ == "__main__":
    main()
