"""Both searches and the timings on a GPU, a block for each utterance: launches of utterances.cu.

A block goes through all frames of its utterance, so that the host waits once for a whole batch, and
all utterances are searched side by side. If the beam is wide and the utterances are few, all blocks
share one utterance after the other instead. The prediction network is ours, in float32, and the
joint is the sum.

**Memory.** The trie of an utterance has room for a fixed number of prefixes. When a frame begins
and half of it is in use, the prefixes that no hypothesis of the beam has are removed. An utterance
that needs more room within a frame is searched again by itself, as cuda.py does it. Utterances
whose tries do not fit into `MEMORY` together are searched one group after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.decoding.hypothesis import (
    TAIL,
    Found,
    Greedy,
    Labels,
    Timing,
    check_prediction,
)
from transduce.decoding.problem import Problem
from transduce.kernels.nvrtc import Kernel, kernels, shared_memory
from transduce.kernels.sentinels import NEVER, cuda_options
from transduce.networks import PredictionNetwork

SOURCE = Path(__file__).with_name("utterances.cu").read_text()
NAMES = ("greedy", "beam", "paths", "timings")
NAMES_TOGETHER = ("beam", "paths")
THREADS, TILE, BINS, LANES = 512, 8, 128, 32
# Bytes of the tries, or lattices, of utterances that are searched side by side: memory against
# the utterances that keep a GPU busy.
MEMORY = 4 << 30
# All blocks share an utterance if its beam has so many hypotheses for each utterance that would be
# searched at once: near it both ways take equally long for one utterance on an H200.
WIDTH_TOGETHER = 50
# Hypotheses expanded at once after the first of a frame: W / 4 within these bounds, the latter
# where blocks share an utterance. The prediction network's weights are read once for each batch;
# a larger batch expands more hypotheses in vain.
BATCHES, BATCHES_TOGETHER = (8, 64), (256, 1024)
# Prefixes for which a trie has room, besides one for each frame, and for each hypothesis.
PREFIXES, PREFIXES_PER_HYPOTHESIS, PREFIXES_TOGETHER = 2048, 32, 128
STAGED, STAGED_TOGETHER = 64, 4096  # prefixes that are moved at once when others are removed
LEAST_OPEN = 4096  # extensions in A for which there is room, at least
LABELS_PER_FRAME = 32  # for which a greedy search has room on average
BYTES_PER_LABEL = 40  # of the shared memory of a hypothesis whose timings are computed


def suits(problem: Problem) -> bool:
    """Return whether the beam search of a problem with our network can run here."""
    network, device = problem.peephole_network(), problem.transcriptions[0].device
    if network is None or problem.options.fuses:
        return False
    sizes = _Sizes.of(problem)
    return (
        sizes.shared <= shared_memory(device.index)
        and sizes.bytes <= MEMORY
        and sizes.room * problem.num_outputs < 1 << 31
    )


def suits_greedy(problem: Problem) -> bool:
    """Return whether the greedy search of a problem with our network can run here."""
    needed = _path_bytes(problem.num_outputs, *_layers_and_units(problem))
    return needed <= shared_memory(problem.transcriptions[0].device.index)


class _Sizes(NamedTuple):
    """The lengths of a beam search's arrays."""

    together: bool  # whether all blocks share an utterance
    batch_size: int
    room: int  # prefixes
    most_open: int
    most_beam: int
    staged: int
    shared: int  # bytes of shared memory
    work: int  # bytes of global memory in its place, where blocks share an utterance
    bytes: int  # of an utterance's arrays

    @classmethod
    def of(cls, problem: Problem) -> _Sizes:
        """Choose the way to search, and return the sizes for the longest utterance."""
        apart, device = cls._of(problem, False), problem.transcriptions[0].device
        at_once = min(len(problem.transcriptions), MEMORY // apart.bytes)
        fits = apart.shared <= shared_memory(device.index) and at_once > 0
        if fits and at_once * WIDTH_TOGETHER > problem.beam_width:
            return apart
        return cls._of(problem, True)

    @classmethod
    def _of(cls, problem: Problem, together: bool) -> _Sizes:
        W, K1, (L, H) = problem.beam_width, problem.num_outputs, _layers_and_units(problem)
        least, most = BATCHES_TOGETHER if together else BATCHES
        batch_size = min(max(W // 4, least), most)
        each = PREFIXES_TOGETHER if together else PREFIXES_PER_HYPOTHESIS
        room = PREFIXES + each * W + max(map(len, problem.transcriptions))
        most_open = max(LEAST_OPEN, 2 * (W + batch_size) * K1, room)
        most_beam, most_batch = 2 * W + 4 * batch_size, max(W, batch_size)
        work = _search_bytes(K1) + 12 * most_beam + 24 * most_batch
        shared = _step_bytes(H) + (0 if together else work)
        staged = STAGED_TOGETHER if together else STAGED
        row = 8 * K1 + 8 * L * H
        size = room * (24 + row) + 24 * most_open + staged * row
        return cls(together, batch_size, room, most_open, most_beam, staged, shared, work, size)


def num_blocks(device: torch.device) -> int:
    """Return how many blocks share an utterance."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _layers_and_units(problem: Problem) -> tuple[int, int]:
    network = problem.peephole_network()
    assert network is not None
    return network.lstm.num_layers, network.lstm.hidden_size


def _step_bytes(H: int) -> int:
    return 4 * TILE * (-(-H // 4) * 4 + 4 * H)


def _search_bytes(K1: int) -> int:
    """Return the bytes of `Search` in the source, rounded up."""
    return -(-(8 * K1 + 4 * BINS + 128) // 16) * 16


def _path_bytes(K1: int, L: int, H: int) -> int:
    """Return the bytes of `Path` in the source, rounded up."""
    return _step_bytes(H) + -(-(4 * K1 + 8 * L * H + 20 * LANES + 64) // 16) * 16


def options(
    K1: int, L: int, H: int, together: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[str, ...]:
    """Return the compiler options for a prediction network and the type of f."""
    sizes = {"K1": K1, "LAYERS": L, "H": H, "TILE": TILE, "BINS": BINS, "THREADS": THREADS}
    sizes |= {"SEARCH_BYTES": _search_bytes(K1), "PATH_BYTES": _path_bytes(K1, L, H)}
    sizes |= {"TOGETHER": int(together), "STAGED": STAGED_TOGETHER if together else STAGED}
    kind = "double" if dtype == torch.float64 else "float"
    return f"-DF={kind}", *(f"-D{name}={n}" for name, n in sizes.items()), *cuda_options(True)


def _kernels(problem: Problem, together: bool = False) -> dict[str, Kernel]:
    f = problem.transcriptions[0]
    names = NAMES_TOGETHER if together else NAMES
    dtype = torch.float64 if f.dtype == torch.float64 else torch.float32
    flags = options(problem.num_outputs, *_layers_and_units(problem), together, dtype)
    return dict(zip(names, kernels(SOURCE, flags, names, f.get_device()), strict=True))


class _Transcriptions:
    """The addresses and the lengths [B] of f [T, K+1] of some utterances."""

    def __init__(self, transcriptions: Sequence[Tensor]) -> None:
        # Numbers of fewer bits than float32 has become float32.
        self.kept = [f.to(torch.promote_types(f.dtype, torch.float32)) for f in transcriptions]
        self.kept = [f.contiguous() for f in self.kept]
        places, lengths = [f.data_ptr() for f in self.kept], [len(f) for f in self.kept]
        both = torch.tensor([places, lengths]).to(self.kept[0].device)
        self.places, self.lengths = both[0], both[1]


def _weights(network: PredictionNetwork) -> tuple[Tensor, ...]:
    """Return the weights in the order and layout of `Weights` in the source."""
    layers = cast(Iterable[Any], network.lstm.layers)
    inputs, hidden, peepholes, biases = zip(
        *([part[0].detach() for part in layer.weights()] for layer in layers), strict=True
    )
    labels = torch.nn.functional.pad(inputs[0].T, (0, 0, 1, 0))  # null's part is zero
    upper = [part.T for part in inputs[1:]] or [labels[:0]]
    return tuple(
        part.contiguous()
        for part in (
            labels,
            torch.cat(upper),
            torch.stack([part.T for part in hidden]),
            torch.stack(peepholes),
            torch.stack(biases),
            network.output.weight.detach(),
            network.output.bias.detach(),
        )
    )


def _groups(lengths: Sequence[int], bytes_each: int) -> Iterator[list[int]]:
    """Yield the places of utterances that are searched side by side, the longest first."""
    places = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    size = max(1, MEMORY // bytes_each)
    for first in range(0, len(places), size):
        yield places[first : first + size]


# --- The greedy search --------------------------------------------------------------------------


def greedy_searches(problem: Problem) -> list[Greedy | None]:
    """Return each utterance's greedy alignment; None where there was no room for its labels."""
    network = problem.peephole_network()
    assert network is not None
    f, most = _Transcriptions(problem.transcriptions), problem.max_labels_per_frame
    B, T = len(f.kept), max(map(len, f.kept))
    room = T * min(most, LABELS_PER_FRAME)
    labels, frames = f.lengths.new_empty(2, B, room, dtype=torch.int32)
    log_prob = torch.empty(B, dtype=torch.float64, device=labels.device)
    counts = f.lengths.new_empty(B, 4)
    _kernels(problem)["greedy"](
        (B, 1),
        THREADS,
        (
            *(f.places, f.lengths, most),
            *_weights(network),
            *(room, labels, frames, log_prob, counts),
        ),
        shared=_path_bytes(problem.num_outputs, *_layers_and_units(problem)),
    )
    numbers = counts.tolist()
    _check(any(bad for _, _, bad, _ in numbers))
    longest = max(count for count, *_ in numbers)
    both = torch.stack([labels[:, :longest], frames[:, :longest]]).cpu().numpy()
    return [
        None if full else Greedy(tuple(y[:n].tolist()), tuple(when[:n].tolist()), p, num_bounded)
        for y, when, p, (n, num_bounded, _, full) in zip(
            *both, log_prob.tolist(), numbers, strict=True
        )
    ]


def _check(bad: bool) -> None:
    check_prediction(float("nan") if bad else 0.0)


# --- The beam search ----------------------------------------------------------------------------


def beam_searches(problem: Problem) -> list[Found | None]:
    """Return the beam B after each utterance's last frame; None where there was no room for it."""
    network, lengths = problem.peephole_network(), [len(f) for f in problem.transcriptions]
    assert network is not None
    sizes, weights = _Sizes.of(problem), _weights(network)
    found: list[Found | None] = [None] * len(lengths)
    for places in _groups(lengths, MEMORY if sizes.together else sizes.bytes):
        group = [problem.transcriptions[b] for b in places]
        for b, one in zip(places, _beam_searches(problem, group, weights, sizes), strict=True):
            found[b] = one
    return found


def _beam_searches(
    problem: Problem, transcriptions: list[Tensor], weights: tuple[Tensor, ...], sizes: _Sizes
) -> list[Found | None]:
    """Search some utterances side by side."""
    f, B, W = _Transcriptions(transcriptions), len(transcriptions), problem.beam_width
    K1, (L, H) = problem.num_outputs, _layers_and_units(problem)
    room, most_open, together = sizes.room, sizes.most_open, sizes.together
    whole = f.lengths.new_empty(0, dtype=torch.int32)
    nodes = whole.new_empty(B, room, 6)
    g = whole.new_empty(B, room, K1, dtype=torch.float32)
    state = g.new_empty(2, B, room, L, H)
    log_prob = g.new_empty(B, W, dtype=torch.float64)
    places, depth = whole.new_empty(2, B, W)
    counts = f.lengths.new_empty(B, 6)
    run = _kernels(problem, together)
    run["beam"](
        (num_blocks(whole.device) if together else B, 1),
        THREADS,
        (
            *(f.places, f.lengths, problem.max_labels_per_frame, W, sizes.batch_size),
            *weights,
            *(room, most_open, sizes.most_beam, nodes),
            *(whole.new_empty(B, room, K1), g, state[0], state[1]),
            *(log_prob.new_empty(B, 2, most_open), whole.new_empty(B, 2, most_open)),
            whole.new_empty(B, sizes.staged, 2 * (K1 + L * H)),
            log_prob.new_zeros(sizes.work // 8) if together else None,
            *(log_prob, places, depth, counts),
        ),
        shared=sizes.shared,
        together=together,
    )
    numbers = counts.tolist()
    _check(any(row[4] for row in numbers))
    inside = torch.arange(W, device=whole.device) < counts[:, :1]
    utterances, ends = inside.nonzero()[:, 0].contiguous(), depth[inside].cumsum(0)
    count = len(ends)
    labels = whole.new_empty(int(ends[-1]) if count else 0)
    run["paths"](
        (-(-max(1, count) // THREADS), 1),
        THREADS,
        (utterances, places[inside], count, nodes, room, ends, labels),
    )
    y, end, first = labels.cpu().numpy(), ends.cpu().numpy(), 0
    log_probs, depths = log_prob.cpu().numpy(), depth.cpu().numpy()
    found: list[Found | None] = []
    for b, (n, num_bounded, num_expanded, num_prefixes, _, full) in enumerate(numbers):

        def its_labels(i: int, first: int = first, b: int = b) -> Labels:
            stop = int(end[first + i])
            return tuple(y[stop - int(depths[b, i]) : stop].tolist())

        work = num_bounded, num_expanded, num_prefixes
        found.append(None if full else Found(log_probs[b, :n], depths[b, :n], its_labels, *work))
        first += n
    return found


# --- The timings --------------------------------------------------------------------------------


def timings(
    problem: Problem, hypotheses: Sequence[tuple[int, Labels]]
) -> list[list[Timing] | None]:
    """Return when each of the labels is emitted, of hypotheses (utterance, labels).

    Return None for those with so many labels, or so large a lattice, that they do not fit here.
    """
    lengths = [len(f) for f in problem.transcriptions]
    most = shared_memory(problem.transcriptions[0].device.index) // BYTES_PER_LABEL - 1

    def bytes_of(i: int) -> int:
        b, labels = hypotheses[i]
        return 32 * (lengths[b] + 1) * (len(labels) + 1)

    found: list[list[Timing] | None] = [None if y else [] for _, y in hypotheses]
    left = [i for i, (_, y) in enumerate(hypotheses) if 0 < len(y) <= most]
    left = sorted((i for i in left if bytes_of(i) <= MEMORY), key=bytes_of)
    while left:
        here = left[-max(1, MEMORY // bytes_of(left[-1])) :]
        del left[-len(here) :]
        columns = _timings(problem, [hypotheses[i] for i in here], bytes_of(here[-1]) // 32)
        for i, its in zip(here, columns, strict=True):
            found[i] = its
    return found


def _timings(
    problem: Problem, hypotheses: Sequence[tuple[int, Labels]], nodes: int
) -> list[list[Timing]]:
    """Compute the timings of hypotheses whose lattices have at most so many nodes."""
    network = problem.peephole_network()
    assert network is not None
    f = _Transcriptions(problem.transcriptions)
    device = f.places.device
    utterances = torch.tensor([b for b, _ in hypotheses], device=device)
    num_labels = torch.tensor([len(y) for _, y in hypotheses], device=device)
    labels = pad_sequence([torch.tensor(y) for _, y in hypotheses], True).to(device)
    N, U = labels.shape
    g = network(labels).float().contiguous()
    times = labels.new_zeros(3, N, U)
    confidences = torch.zeros(N, U, dtype=torch.float64, device=device)
    evidences, lattices = confidences.new_empty(N), confidences.new_empty(N, 4, nodes)
    _kernels(problem)["timings"](
        (N, 1),
        THREADS,
        (
            *(f.places, f.lengths, utterances, g, labels, num_labels, U, TAIL),
            *(nodes, lattices, times[0], times[1], times[2], confidences, evidences),
        ),
        shared=BYTES_PER_LABEL * (U + 1),
    )
    if bool((evidences <= NEVER).any()):
        raise ValueError("the labels cannot be emitted, so they have no timings")
    columns = zip(*times.cpu().numpy(), confidences.cpu().numpy(), strict=True)
    return [
        [Timing(*row) for row in zip(*(part[: len(y)].tolist() for part in its), strict=True)]
        for (_, y), its in zip(hypotheses, columns, strict=True)
    ]
