"""The sensitivity of one output to each input and to each previous output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transduce.analysis.lattice import LatticeView, transducer_of
from transduce.model.checkpoint import TrainedModel


class Sensitivity(NamedTuple):
    """The derivatives of the probability of one output, Pr(k|t,u)."""

    inputs: Tensor  # [num_frames, D], by each value of a frame, or of a one-hot vector for an id
    outputs: Tensor  # [U, K], by the K values of each one-hot label; 0 for labels to come


def sensitivity(
    model: TrainedModel, view: LatticeView, t: int, u: int, label: int | None = None
) -> Sensitivity:
    """Differentiate Pr(k|t,u) with respect to the inputs and the previous outputs.

    k is `label`. By default it is the next label of the target, whose probability is that of the
    vertical arrow at the node; after the last label it is null. Labels are one-hot vectors, and the
    derivatives are with respect to all K values of each, not only the one that is 1.
    """
    view.check_node(t, u)
    network = transducer_of(model)
    k = view.next_label(u) if label is None else label
    num_outputs = view.prediction.shape[1]
    if not 0 <= k < num_outputs:
        raise ValueError(f"there is no label {k}; give 0 (null) to {num_outputs - 1}")
    weights = network.prediction_network.output.weight
    frames = view.frames.to(weights.device)
    if not frames.is_floating_point():
        frames = one_hot(frames, network.transcription_network.input_size).to(weights)
    previous = one_hot(view.labels, num_outputs - 1).to(weights)
    # Row t of f and row u of g, in the direction in which the network reads.
    rows = t, u
    if view.backwards:
        frames, previous = frames.flip(0), previous.flip(0)
        rows = view.num_vectors - 1 - t, view.num_labels - u
    with torch.enable_grad():
        frames, previous = frames.detach().requires_grad_(), previous.requires_grad_()
        f, _ = network.transcription_network(frames[None])
        g = network.prediction_network(previous[None])
        # In float64, where the derivative of a probability near 0 or 1 does not vanish.
        log_prob = (f[0, rows[0]].double() + g[0, rows[1]].double()).log_softmax(0)[k]  # Eq. 13
        derivatives = torch.autograd.grad(log_prob, (frames, previous))
    if view.backwards:
        derivatives = tuple(derivative.flip(0) for derivative in derivatives)
    probability = log_prob.detach().exp().cpu()
    return Sensitivity(*(probability * derivative.double().cpu() for derivative in derivatives))


def one_hot(ids: Tensor, size: int) -> Tensor:
    """Return one-hot vectors [N, size] of ids [N]; id k sets element k - 1, and id 0 sets none."""
    return torch.nn.functional.one_hot(ids, size + 1)[:, 1:]
