"""The output lattice of one input and target, and the output distribution at its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.architectures import Transducer
from transduce.decoding import Timing, label_timings
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

    T is the number of transcription vectors; with pooling it is less than the number of frames.
    """

    frames: Tensor  # [num_frames, D], or ids [num_frames]: the input of the network
    labels: Tensor  # [U]
    transcription: Tensor  # [T, K+1], f
    prediction: Tensor  # [U+1, K+1], g
    log_null: Tensor  # [T, U+1], log-probabilities of the horizontal arrows, Eq. 15
    log_label: Tensor  # [T, U], log-probabilities of the vertical arrows, Eq. 14
    log_alpha: Tensor  # [T, U+1], Eq. 16
    log_beta: Tensor  # [T, U+1], Eq. 18
    log_product: Tensor  # [T, U+1], ln α(t,u) β(t,u) / Pr(y|x); sums to 1 on a diagonal, Eq. 19
    log_likelihood: float  # ln Pr(y|x), Eq. 17
    best_path: tuple[Node, ...]  # the T + U nodes of the most probable alignment
    timings: tuple[Timing, ...]  # one for each label

    @property
    def num_vectors(self) -> int:
        """The number of transcription vectors, T."""
        return len(self.transcription)

    @property
    def num_labels(self) -> int:
        """The number of labels of the target, U."""
        return len(self.labels)

    def next_label(self, u: int) -> int:
        """Return the label that follows the first u labels of the target; null after the last."""
        return int(self.labels[u]) if u < self.num_labels else NULL

    def check_node(self, t: int, u: int) -> None:
        """Raise ValueError unless the lattice has a node t, u."""
        T, U = self.num_vectors, self.num_labels
        if not (0 <= t < T and 0 <= u <= U):
            raise ValueError(
                f"there is no node {t},{u} in the output lattice; t is 0 to {T - 1} and u 0 to {U}"
            )


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
    with torch.no_grad():
        f, _ = network.transcription_network(frames[None].to(device))
        g = network.prediction_network(labels[None].to(device))
    transcription, prediction = f[0].double().cpu(), g[0].double().cpu()
    arrows = lattice_transitions(transcription, prediction, labels.cpu())
    emitted, _ = best_alignment(*arrows)
    return LatticeView(
        frames.cpu(),
        labels.cpu(),
        transcription,
        prediction,
        *arrows,
        forward_variables(*arrows),
        backward_variables(*arrows),
        log_occupancy(*arrows),
        float(log_likelihood(*arrows)),
        _path(emitted, len(transcription)),
        tuple(label_timings(*arrows)),
    )


def transducer_of(model: TrainedModel) -> Transducer:
    """Return the model's network; raise ValueError unless it is a transducer with a lattice."""
    network = model.network.eval()
    if not isinstance(network, Transducer):
        kind = "an ensemble" if isinstance(network, Ensemble) else f"a {network.kind} network"
        raise ValueError(f"{kind} alone has no output lattice; give a transducer")
    if network.backwards:
        raise ValueError(
            "the output lattice of a transducer that reads backwards cannot be shown; give one "
            "that reads forwards"
        )
    return network


def _path(emitted: Sequence[int], num_vectors: int) -> tuple[Node, ...]:
    """Return the nodes of the alignment that emits label u+1 at vector emitted[u]."""
    nodes = []
    u = 0
    for t in range(num_vectors):
        nodes.append((t, u))
        while u < len(emitted) and emitted[u] == t:
            u += 1
            nodes.append((t, u))
    return tuple(nodes)


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
