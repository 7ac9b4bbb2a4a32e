"""The output lattice of one input and target, and the output distribution at its nodes.

The lattice of a transducer that reads backwards is shown in forward time: its alignments begin at
the last vector with all labels to come, and lead to the left and downwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.architectures import Transducer
from transduce.decoding import Hypothesis, Timing, label_timings
from transduce.decoding.ensemble import Ensemble
from transduce.lattice.loss import (
    backward_variables,
    best_alignment,
    forward_variables,
    lattice_transitions,
    log_likelihood,
    log_occupancy,
)
from transduce.model.checkpoint import TrainedModel

Node = tuple[int, int]  # t, from 0, and u


@dataclass(frozen=True, eq=False)
class LatticeView:
    """The output lattice of an input and a target, in float64 on the CPU.

    T is the number of transcription vectors; with pooling it is less than the number of frames. The
    number of labels before a node is u, also for a network that reads backwards, which has emitted
    the U - u labels after the node.
    """

    frames: Tensor  # [num_frames, D], or ids [num_frames]: the input of the network
    labels: Tensor  # [U]
    transcription: Tensor  # [T, K+1], f
    prediction: Tensor  # [U+1, K+1], g
    log_null: Tensor  # [T, U+1], log-probabilities of the horizontal arrows, Eq. 15
    log_label: Tensor  # [T, U], of the vertical arrows, which emit label u at t, Eq. 14
    log_alpha: Tensor  # [T, U+1], Eq. 16
    log_beta: Tensor  # [T, U+1], Eq. 18
    log_product: Tensor  # [T, U+1], ln α(t,u) β(t,u) / Pr(y|x); sums to 1 on a diagonal, Eq. 19
    log_likelihood: float  # ln Pr(y|x), Eq. 17
    best_path: tuple[Node, ...]  # the T + U nodes of the most probable alignment, in forward time
    timings: tuple[Timing, ...]  # one for each label
    pooling: int = 1  # frames of a transcription vector
    backwards: bool = False  # whether the network reads backwards

    @property
    def num_vectors(self) -> int:
        """The number of transcription vectors, T."""
        return len(self.transcription)

    @property
    def num_labels(self) -> int:
        """The number of labels of the target, U."""
        return len(self.labels)

    @property
    def first_row(self) -> int:
        """The row of label 0: the rows that emitting the labels leads to are `first_row` + i."""
        return 0 if self.backwards else 1

    @property
    def start(self) -> Node:
        """The node at which the alignments begin."""
        return (self.num_vectors - 1, self.num_labels) if self.backwards else (0, 0)

    @property
    def terminal(self) -> Node:
        """The node to which the last null leads, one vector outside of the lattice."""
        return (-1, 0) if self.backwards else (self.num_vectors, self.num_labels)

    def first_frame(self, t: int) -> int:
        """Return the number of the first frame that vector t covers.

        A network that reads backwards pools from the end, so its vector 0 may begin before frame 0.
        """
        offset = len(self.frames) - self.pooling * self.num_vectors if self.backwards else 0
        return self.pooling * t + offset

    def next_label(self, u: int) -> int:
        """Return the label that the network is to emit next in row u; null after the last."""
        i = u - self.backwards
        return int(self.labels[i]) if 0 <= i < self.num_labels else NULL

    def emitting_node(self, i: int) -> Node:
        """Return the node at which the most probable alignment emits label i."""
        return self.timings[i].frame, i + self.backwards

    def check_node(self, t: int, u: int) -> None:
        """Raise ValueError unless the lattice has a node t, u."""
        check_node(t, u, self.num_vectors, self.num_labels)


def view_lattice(
    model: TrainedModel,
    frames: Tensor,  # [num_frames, D], or ids [num_frames], as in an `Example`
    labels: Tensor | Sequence[int],  # [U]
) -> LatticeView:
    """Compute the output lattice of an input and a target (Eqs. 12-19)."""
    network = transducer_of(model)
    labels = torch.as_tensor(labels, dtype=torch.int64)
    if len(frames) == 0:
        raise ValueError(
            "the input has no frames, so there is no output lattice; give a longer one"
        )
    device = next(network.parameters()).device
    x, y = (frames.flip(0), labels.flip(0)) if network.backwards else (frames, labels)
    with torch.no_grad():
        f, _ = network.transcription_network(x[None].to(device))
        g = network.prediction_network(y[None].to(device))
    transcription, prediction = f[0].double().cpu(), g[0].double().cpu()
    arrows = lattice_transitions(transcription, prediction, y.cpu())
    emitted, _ = best_alignment(*arrows)
    view = LatticeView(
        x.cpu(),
        y.cpu(),
        transcription,
        prediction,
        *arrows,
        forward_variables(*arrows),
        backward_variables(*arrows),
        log_occupancy(*arrows),
        float(log_likelihood(*arrows)),
        alignment_path(emitted, len(transcription)),
        tuple(label_timings(*arrows)),
        network.transcription_network.pooling,
    )
    return _in_forward_time(view) if network.backwards else view


def _in_forward_time(view: LatticeView) -> LatticeView:
    """Turn the lattice of reversed sequences round: node t, u becomes T-1-t, U-u."""
    last, U = view.num_vectors - 1, view.num_labels
    # `Hypothesis` knows how timings are reversed.
    mirrored = Hypothesis((), 0.0, 0.0, (), view.timings).reversed(view.num_vectors)
    along_time = ("frames", "labels", "transcription", "prediction")
    nodes = ("log_null", "log_label", "log_alpha", "log_beta", "log_product")
    return replace(
        view,
        **{name: getattr(view, name).flip(0) for name in along_time},
        **{name: getattr(view, name).flip(0, 1) for name in nodes},
        best_path=tuple((last - t, U - u) for t, u in reversed(view.best_path)),
        timings=mirrored.timings,
        backwards=True,
    )


def transducer_of(model: TrainedModel) -> Transducer:
    """Return the model's network; raise ValueError unless it is a transducer with a lattice."""
    network = model.network.eval()
    if not isinstance(network, Transducer):
        kind = "an ensemble" if isinstance(network, Ensemble) else f"a {network.kind} network"
        if not network.has_labels:
            raise ValueError(
                "a continuous transducer has no labels to show; plot its lattice, or let it speak"
            )
        raise ValueError(f"{kind} alone has no output lattice; give a transducer")
    return network


def check_node(t: int, u: int, T: int, U: int) -> None:
    """Raise ValueError unless a lattice of T vectors and U outputs has a node t, u."""
    if not (0 <= t < T and 0 <= u <= U):
        raise ValueError(
            f"there is no node {t},{u} in the output lattice; t is 0 to {T - 1} and u 0 to {U}"
        )


def alignment_path(emitted: Sequence[int], num_vectors: int) -> tuple[Node, ...]:
    """Return the nodes of the alignment that emits label u+1 at vector emitted[u]."""
    nodes = []
    u = 0
    for t in range(num_vectors):
        nodes.append((t, u))
        while u < len(emitted) and emitted[u] == t:
            u += 1
            nodes.append((t, u))
    return tuple(nodes)


class Arrow(NamedTuple):
    """A transition of the lattice."""

    start: Node
    end: Node
    log_prob: float  # y(t,u) or ∅(t,u), Eqs. 14-15
    log_posterior: float  # that the alignment takes it, given the target
    is_best: bool  # whether the most probable alignment takes it

    @property
    def is_null(self) -> bool:
        """Whether the arrow emits null, and not a label."""
        return self.start[1] == self.end[1]


def arrows(view: LatticeView) -> Iterator[Arrow]:
    """Yield the arrows of the lattice; the posterior of one is α(start) Pr(arrow) β(end) / Pr(y|x).

    The last null leads to the terminal node, where β is 1.
    """
    T, U = view.num_vectors, view.num_labels
    step = -1 if view.backwards else 1
    best = set(pairwise([*view.best_path[::step], view.terminal]))
    for t, u in product(range(T), range(U + 1)):
        for end in ((t + step, u), (t, u + step)):
            inside = 0 <= end[0] < T and 0 <= end[1] <= U
            if not inside and end != view.terminal:
                continue
            log_prob = float(
                view.log_null[t, u] if end[1] == u else view.log_label[t, min(u, end[1])]
            )
            after = float(view.log_beta[end]) if inside else 0.0
            log_posterior = float(view.log_alpha[t, u]) + log_prob + after - view.log_likelihood
            yield Arrow((t, u), end, log_prob, log_posterior, ((t, u), end) in best)


class Bar(NamedTuple):
    """The probability of one output."""

    label: int  # an id; 0 is null
    probability: float


class Bars(NamedTuple):
    """The most probable outputs at a node, each list in descending order."""

    output: tuple[Bar, ...]  # of the output distribution Pr(k|t,u), Eq. 13
    transcription: tuple[Bar, ...]  # of the transcription network alone
    prediction: tuple[Bar, ...]  # of the prediction network alone


def output_bars(view: LatticeView, t: int, u: int, num: int = 8) -> Bars:
    """Return the `num` most probable outputs at node t, u.

    The distribution of one network alone is the softmax of its vector, f_t or g_u. The output
    distribution is the softmax of their sum (Eqs. 12-13).
    """
    view.check_node(t, u)
    f, g = view.transcription[t], view.prediction[u]
    return Bars(*(_strongest(vector.softmax(0), num) for vector in (f + g, f, g)))


def _strongest(probabilities: Tensor, num: int) -> tuple[Bar, ...]:
    values, ids = probabilities.sort(descending=True, stable=True)
    return tuple(Bar(k, p) for k, p in zip(ids.tolist()[:num], values.tolist(), strict=False))
