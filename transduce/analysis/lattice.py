"""One utterance's output lattice with all that can be seen in it."""

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

    T counts the transcription vectors: with pooling there are fewer than frames.
    """

    frames: Tensor  # [num_frames, D] or ids [num_frames], as the network took them
    labels: Tensor  # [U]
    transcription: Tensor  # [T, K+1], f
    prediction: Tensor  # [U+1, K+1], g
    log_null: Tensor  # [T, U+1], the horizontal arrows, Eq. 15
    log_label: Tensor  # [T, U], the vertical arrows, Eq. 14
    log_alpha: Tensor  # [T, U+1], Eq. 16
    log_beta: Tensor  # [T, U+1], Eq. 18
    log_product: Tensor  # [T, U+1], ln α(t,u) β(t,u) / Pr(y|x): 1 on each diagonal, Eq. 19
    log_likelihood: float  # ln Pr(y|x), Eq. 17
    best_path: tuple[Node, ...]  # all T + U nodes of the most probable alignment
    timings: tuple[Timing, ...]  # of each label

    @property
    def num_vectors(self) -> int:
        """T, of the transcription."""
        return len(self.transcription)

    @property
    def num_labels(self) -> int:
        """U, of the target."""
        return len(self.labels)

    def next_label(self, u: int) -> int:
        """What an alignment of the target emits after u labels: y_{u+1}, or null after the last."""
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
    frames: Tensor,  # [num_frames, D], or ids [num_frames], as an `Example` has them
    labels: Tensor | Sequence[int],  # [U]
) -> LatticeView:
    """The output lattice that a transducer spans over an input and a target (Eqs. 12-19)."""
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
        raise ValueError(f"{kind} alone has no output lattice to look at; give a transducer")
    if network.backwards:
        raise ValueError(
            "a transducer that goes backwards has its output lattice from the end, which is not "
            "shown; give one that goes forwards"
        )
    return network


def _path(emitted: Sequence[int], num_vectors: int) -> tuple[Node, ...]:
    """Every node of the alignment that emits label u+1 at frame emitted[u]."""
    nodes = []
    u = 0
    for t in range(num_vectors):
        nodes.append((t, u))
        while u < len(emitted) and emitted[u] == t:
            u += 1
            nodes.append((t, u))
    return tuple(nodes)


class Bar(NamedTuple):
    """How strongly an output is predicted."""

    label: int  # an id; null too
    probability: float


class Bars(NamedTuple):
    """The outputs that are predicted most strongly at a node, each list strongest first."""

    output: tuple[Bar, ...]  # by the output distribution Pr(k|t,u), Eq. 13
    transcription: tuple[Bar, ...]  # by the transcription network alone
    prediction: tuple[Bar, ...]  # by the prediction network alone


def output_bars(view: LatticeView, t: int, u: int, num: int = 8) -> Bars:
    """The `num` strongest outputs at node t, u.

    A network alone is the output distribution with the other's vector zero: exp f_t, or exp g_u,
    over its sum (Eqs. 12-13). The output distribution is their product over its sum.
    """
    view.check_node(t, u)
    f, g = view.transcription[t], view.prediction[u]
    return Bars(*(_strongest(vector.softmax(0), num) for vector in (f + g, f, g)))


def _strongest(probabilities: Tensor, num: int) -> tuple[Bar, ...]:
    values, ids = probabilities.sort(descending=True, stable=True)
    return tuple(Bar(k, p) for k, p in zip(ids.tolist()[:num], values.tolist(), strict=False))
