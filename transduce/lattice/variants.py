"""Variants of the transducer's loss, built on `lattice_loss`.

Each `*_transitions` function returns the arrows ln ∅(t,u) [B, T, U+1] and ln y(t,u) [B, T, U] that
`lattice_loss` takes, differentiable by autograd. They do not know the lengths: padding must hold
finite numbers, and its labels may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from transduce.alphabet import NULL
from transduce.kernels.backends import Backend
from transduce.lattice.loss import Reduction, lattice_loss
from transduce.lattice.operators import wide


def joint_transitions(logits: Tensor, labels: Tensor, null: int = NULL) -> tuple[Tensor, Tensor]:
    """Return the arrows of any joint network's logits [B, T, U+1, K+1] and labels [B, U], with a
    softmax over the outputs (Eqs. 13-15)."""
    x = logits.to(wide(logits.dtype))
    log_total = _logsumexp(x)
    return x[..., null] - log_total, _at_labels(x, labels) - log_total[:, :, :-1]


def additive_transitions(f: Tensor, g: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arrows of f [B, T, K+1] and g [B, U+1, K+1] (Eqs. 12-15), without a tensor of
    B x T x U x K numbers.

    The denominator of Eq. 13 is a product in float64, exact while f and g disagree by less than
    600 nats about the likeliest output. `transducer_loss` is faster, and exact beyond that.
    """
    dtype = wide(f.dtype)
    f, g = f.double(), g.double()
    f_top, g_top = _top(f), _top(g)
    total = (f - f_top).exp() @ (g - g_top).exp().mT  # Eq. 13's denominator, [B, T, U+1]
    log_total = total.clamp(min=torch.finfo(total.dtype).tiny).log() + f_top + g_top.mT
    log_null = f[:, :, None, NULL] + g[:, None, :, NULL] - log_total  # Eq. 15
    index = labels.long().clamp(0, f.shape[2] - 1)
    by_f = f.gather(2, index[:, None].expand(-1, f.shape[1], -1))
    by_g = g[:, :-1].gather(2, index[..., None]).mT
    log_label = by_f + by_g - log_total[:, :, :-1]  # Eq. 14
    return log_null.to(dtype), log_label.to(dtype)


def hat_transitions(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arrows of the hybrid autoregressive transducer (HAT; Variani et al., 2020).

    Output 0 of the logits [B, T, U+1, K+1] is the logit of a Bernoulli variable, null or not; the
    other outputs are a softmax over the labels. labels is [B, U].
    """
    x = logits.to(wide(logits.dtype))
    log_total = _logsumexp(x[..., 1:])[:, :, :-1]
    log_not_null = logsigmoid(-x[:, :, :-1, NULL])
    return logsigmoid(x[..., NULL]), log_not_null + _at_labels(x, labels) - log_total


def delay_penalty(log_label: Tensor, num_frames: Tensor, weight: float) -> Tensor:
    """Add weight * ((T-1)/2 - t) to the label arrows [B, T, U] of each item (Kang et al., 2023), so
    that a positive weight makes early emissions more probable. T is the item's num_frames."""
    t = torch.arange(log_label.shape[1], device=log_label.device)
    reward = weight * ((num_frames[:, None] - 1) / 2 - t)
    return log_label + reward[..., None].to(log_label.dtype)


def fastemit_loss(
    log_null: Tensor,  # [B, T, U+1]
    log_label: Tensor,  # [B, T, U]
    num_frames: Tensor,  # [B]
    num_labels: Tensor,  # [B]
    *,
    weight: float,
    reduction: Reduction = "none",
    backend: Backend = "auto",
) -> Tensor:
    """Return `lattice_loss`, with the gradients of all label arrows times 1 + weight (FastEmit; Yu
    et al., 2021). The value of the loss is unchanged."""
    constant = log_label.detach()
    moving = constant + (1 + weight) * (log_label - constant)  # the value is that of log_label
    scaled = torch.where(constant.isfinite(), moving, constant)
    return lattice_loss(
        log_null, scaled, num_frames, num_labels, reduction=reduction, backend=backend
    )


def _at_labels(x: Tensor, labels: Tensor) -> Tensor:
    """Return the output of the next label at each node, [B, T, U], of outputs [B, T, U+1, K+1]."""
    index = labels.long().clamp(0, x.shape[3] - 1)[:, None, :, None]
    return x[:, :, :-1].gather(3, index.expand(-1, x.shape[1], -1, 1))[..., 0]


def _top(x: Tensor) -> Tensor:
    """Return the largest number of each vector as a constant; 0 if all of them are -inf."""
    top = x.detach().amax(-1, keepdim=True)
    return torch.where(top == -torch.inf, 0.0, top)


def _logsumexp(x: Tensor) -> Tensor:
    """Return ln of the sum of e^x over the outputs; where all are impossible, +inf, so that no
    arrow is possible, with gradient 0."""
    none = (x.detach() == -torch.inf).all(-1)
    total = torch.where(none[..., None], 0.0, x).logsumexp(-1)
    return torch.where(none, torch.inf, total)
