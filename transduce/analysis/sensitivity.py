"""How much each input and each previous output matters to one output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transduce.analysis.lattice import LatticeView, transducer_of
from transduce.model.checkpoint import TrainedModel


class Sensitivity(NamedTuple):
    """The derivatives of one output's probability, ∂ Pr(k|t,u)."""

    inputs: Tensor  # [num_frames, D], by every input value; by all the symbols' if they are ids
    outputs: Tensor  # [U, K], by all K values of every label; 0 from the u-th on: they come later


def sensitivity(
    model: TrainedModel, view: LatticeView, t: int, u: int, label: int | None = None
) -> Sensitivity:
    """How Pr(k|t,u) depends on the inputs and on the previous outputs: its exact derivatives, back
    through both networks.

    k is `label`; if it is not given, the target's next label, whose probability is the vertical
    arrow at the node, and null in the last row, which has no other. Labels are one-hot vectors, so
    their derivative is by the K values of each, not only the one that is 1.
    """
    view.check_node(t, u)
    network = transducer_of(model)
    k = view.next_label(u) if label is None else label
    num_outputs = view.prediction.shape[1]
    if not 0 <= k < num_outputs:
        raise ValueError(f"there is no label {k}; they are 0, which is null, to {num_outputs - 1}")
    weights = network.prediction_network.output.weight
    frames = view.frames.to(weights.device)
    if not frames.is_floating_point():
        frames = one_hot(frames, network.transcription_network.lstm.input_size).to(weights)
    previous = one_hot(view.labels, num_outputs - 1).to(weights)
    with torch.enable_grad():
        frames, previous = frames.detach().requires_grad_(), previous.requires_grad_()
        f, _ = network.transcription_network(frames[None])
        g = network.prediction_network(previous[None])
        # In float64, where a probability of nearly 0 or 1 still has a derivative.
        log_prob = (f[0, t].double() + g[0, u].double()).log_softmax(0)[k]  # Eq. 13
        derivatives = torch.autograd.grad(log_prob, (frames, previous))
    probability = log_prob.detach().exp().cpu()
    return Sensitivity(*(probability * derivative.double().cpu() for derivative in derivatives))


def one_hot(ids: Tensor, size: int) -> Tensor:
    """Ids [N] as vectors [N, size]: id k is all 0 but for its k-th element, id 0 is all 0."""
    return torch.nn.functional.one_hot(ids, size + 1)[:, 1:]
