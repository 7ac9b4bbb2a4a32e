"""Both searches and the timings on a GPU, a block for each utterance: launches of utterances.cu.

A block goes through all frames of its utterance, so that the host waits once for a whole batch, and
all utterances are searched side by side. The prediction network is ours, in float32, and the joint
is the sum.

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
from transduce.decoding.problem import Problem, padded
from transduce.kernels.nvrtc import Kernel, kernels, shared_memory
from transduce.kernels.sentinels import NEVER, cuda_options
from transduce.networks import PredictionNetwork

SOURCE = Path(__file__).with_name("utterances.cu").read_text()
NAMES = ("greedy", "beam", "paths", "timings")
THREADS, TILE, BINS, LANES = 512, 8, 128, 32
# Bytes of the tries, or lattices, of utterances that are searched side by side: memory against
# the utterances that keep a GPU busy.
MEMORY = 4 << 30
WIDEST = 1024  # A wider beam is better searched by all blocks together.
# Hypotheses expanded at once after the first of a frame: W / 4 within these bounds. More steps of
# the prediction network share its weights, and more hypotheses are expanded in vain.
MIN_BATCH, MAX_BATCH = 16, 64
PREFIXES, PREFIXES_PER_HYPOTHESIS = 2048, 32  # in a trie, besides one for each frame
LEAST_OPEN = 4096  # extensions in A for which there is room, at least
LABELS_PER_FRAME = 32  # for which a greedy search has room on average
MOST_LABELS = 2000  # of a hypothesis whose timings are computed here: their shared memory


def suits(problem: Problem) -> bool:
    """Return whether the beam search of a problem with our network can run here."""
    network, device = problem.peephole_network(), problem.transcriptions[0].device
    if network is None or problem.options.fuses or problem.beam_width > WIDEST:
        return False
    longest = max(map(len, problem.transcriptions))
    sizes = _Sizes.of(problem, longest)
    return (
        sizes.shared <= shared_memory(device.index)
        and sizes.room * problem.num_outputs < 1 << 31
        and sizes.most_open < 1 << 31
    )


class _Sizes(NamedTuple):
    """The lengths of a beam search's arrays."""

    batch_size: int
    room: int  # prefixes
    most_open: int
    most_beam: int
    shared: int  # bytes of shared memory
    bytes: int  # of an utterance's arrays

    @classmethod
    def of(cls, problem: Problem, longest: int) -> _Sizes:
        """Return the sizes for utterances of at most `longest` vectors."""
        W, K1 = problem.beam_width, problem.num_outputs
        L, H = _layers_and_units(problem)
        batch_size = min(max(W // 4, MIN_BATCH), MAX_BATCH)
        room = PREFIXES + PREFIXES_PER_HYPOTHESIS * W + longest
        most_open = max(LEAST_OPEN, 2 * (W + batch_size) * K1, room)
        most_beam, most_batch = 2 * W + 4 * batch_size, max(W, batch_size)
        shared = _search_bytes(K1, H) + 12 * most_beam + 24 * most_batch
        each = room * (24 + 8 * K1 + 8 * L * H) + 24 * most_open + 8 * longest * K1
        return cls(batch_size, room, most_open, most_beam, shared, each)


def _layers_and_units(problem: Problem) -> tuple[int, int]:
    network = problem.peephole_network()
    assert network is not None
    return network.lstm.num_layers, network.lstm.hidden_size


def _step_bytes(H: int) -> int:
    return 4 * TILE * (-(-H // 4) * 4 + 4 * H)


def _search_bytes(K1: int, H: int) -> int:
    """Return the bytes of `Search` in the source, rounded up."""
    return _step_bytes(H) + -(-(8 * K1 + 4 * BINS + 128) // 16) * 16


def _path_bytes(K1: int, L: int, H: int) -> int:
    """Return the bytes of `Path` in the source, rounded up."""
    return _step_bytes(H) + -(-(4 * K1 + 8 * L * H + 20 * LANES + 64) // 16) * 16


def options(K1: int, L: int, H: int) -> tuple[str, ...]:
    """Return the compiler options for a prediction network."""
    sizes = {"K1": K1, "LAYERS": L, "H": H, "TILE": TILE, "BINS": BINS, "THREADS": THREADS}
    sizes |= {"SEARCH_BYTES": _search_bytes(K1, H), "PATH_BYTES": _path_bytes(K1, L, H)}
    return *(f"-D{name}={size}" for name, size in sizes.items()), *cuda_options(True)


def _kernels(problem: Problem) -> dict[str, Kernel]:
    device = problem.transcriptions[0].get_device()
    flags = options(problem.num_outputs, *_layers_and_units(problem))
    return dict(zip(NAMES, kernels(SOURCE, flags, NAMES, device), strict=True))


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
    L, H = _layers_and_units(problem)
    f, num_vectors = padded(problem.transcriptions)
    (B, T, K1), most = f.shape, problem.max_labels_per_frame
    room = T * min(most, LABELS_PER_FRAME)
    labels, frames = num_vectors.new_empty(2, B, room, dtype=torch.int32)
    log_prob = torch.empty(B, dtype=torch.float64, device=f.device)
    counts = num_vectors.new_empty(B, 4)
    _kernels(problem)["greedy"](
        (B, 1),
        THREADS,
        (
            *(f.double(), num_vectors, T, most),
            *_weights(network),
            *(room, labels, frames, log_prob, counts),
        ),
        shared=_path_bytes(K1, L, H),
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
    sizes, weights = _Sizes.of(problem, max(lengths)), _weights(network)
    found: list[Found | None] = [None] * len(lengths)
    for places in _groups(lengths, sizes.bytes):
        group = [problem.transcriptions[b] for b in places]
        for b, one in zip(places, _beam_searches(problem, group, weights, sizes), strict=True):
            found[b] = one
    return found


def _beam_searches(
    problem: Problem, transcriptions: list[Tensor], weights: tuple[Tensor, ...], sizes: _Sizes
) -> list[Found | None]:
    """Search some utterances side by side."""
    f, num_vectors = padded(transcriptions)
    (B, T, K1), W = f.shape, problem.beam_width
    L, H = _layers_and_units(problem)
    room, most_open = sizes.room, sizes.most_open
    whole = num_vectors.new_empty(0, dtype=torch.int32)
    nodes = whole.new_empty(B, room, 6)
    g = whole.new_empty(B, room, K1, dtype=torch.float32)
    state = g.new_empty(2, B, room, L, H)
    log_prob = g.new_empty(B, W, dtype=torch.float64)
    places, depth = whole.new_empty(2, B, W)
    counts = num_vectors.new_empty(B, 6)
    run = _kernels(problem)
    run["beam"](
        (B, 1),
        THREADS,
        (
            *(f.double(), num_vectors, T, problem.max_labels_per_frame, W, sizes.batch_size),
            *weights,
            *(room, most_open, sizes.most_beam, nodes),
            *(whole.new_empty(B, room, K1), g, state[0], state[1]),
            *(log_prob.new_empty(B, 2, most_open), whole.new_empty(B, 2, most_open)),
            *(log_prob, places, depth, counts),
        ),
        shared=sizes.shared,
    )
    numbers = counts.tolist()
    _check(any(row[4] for row in numbers))
    inside = torch.arange(W, device=f.device) < counts[:, :1]
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

    def bytes_of(i: int) -> int:
        b, labels = hypotheses[i]
        return 32 * (lengths[b] + 1) * (len(labels) + 1)

    found: list[list[Timing] | None] = [None if y else [] for _, y in hypotheses]
    left = [i for i, (_, y) in enumerate(hypotheses) if 0 < len(y) <= MOST_LABELS]
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
    f, num_vectors = padded(problem.transcriptions)
    device, T = f.device, f.shape[1]
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
            *(f.double(), num_vectors, T, utterances, g, labels, num_labels, U, TAIL),
            *(nodes, lattices, times[0], times[1], times[2], confidences, evidences),
        ),
        shared=8 * 5 * (U + 1),
    )
    if bool((evidences <= NEVER).any()):
        raise ValueError("the labels cannot be emitted, so they have no timings")
    columns = zip(*times.cpu().numpy(), confidences.cpu().numpy(), strict=True)
    return [
        [Timing(*row) for row in zip(*(part[: len(y)].tolist() for part in its), strict=True)]
        for (_, y), its in zip(hypotheses, columns, strict=True)
    ]
