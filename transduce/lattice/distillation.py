"""Distillation: learn from the next label that a teacher expects after each prefix of y.

The lattice gives p_u(k), the probability that label k follows the first u labels whatever the
alignment, and p_u(end), the probability that nothing does (docs/derivations.md, section 6). The
loss is the cross-entropy between a teacher's distributions and these. It does not depend on frames,
so that teacher and student may emit their labels at different times. With targets that are certain
of y it is -ln Pr(y|x). No tensor has T x U x K numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.kernels.backends import Backend, resolve
from transduce.lattice.checks import check_additive_shapes, check_targets_shape
from transduce.lattice.operators import distilled_loss, wide

# The logarithm that stands for an impossible arrow: finite, so that differences of sums exist. A
# sequence whose log-probability is below half of it is impossible.
LEAST_LOG_ARROW = -1e7
# The least ln p_u(k) of what does not follow in y: finite, and without a gradient.
LEAST_LOG_PROB = -1e5


def next_label_log_probs(
    transcription: Tensor,  # [B, T, K+1], f
    prediction: Tensor,  # [B, U+1, K+1], g
    labels: Tensor,  # [B, U]
    num_frames: Tensor,  # [B]
    num_labels: Tensor,  # [B]
) -> Tensor:  # [B, U+1, K+1]
    """Return ln p_u(k), with the end in the place of null, differentiable in f and g.

    Padding is never read; its rows are 0. After a label that cannot be emitted p is not defined.
    """
    check_additive_shapes(transcription, prediction, labels, num_frames, num_labels)
    columns = _columns(transcription, prediction, labels, num_frames, num_labels)
    return columns.log_probs.to(wide(transcription.dtype))


def distillation_loss(
    transcription: Tensor,  # [B, T, K+1], f
    prediction: Tensor,  # [B, U+1, K+1], g
    labels: Tensor,  # [B, U]
    num_frames: Tensor,  # [B]
    num_labels: Tensor,  # [B]
    targets: Tensor,  # [B, U+1, K+1], q, with the end in the place of null
    *,
    backend: Backend = "auto",
) -> Tensor:  # [B]
    """Return -Σ_u Σ_k q_u(k) ln p_u(k) of each utterance, differentiable in f and g.

    Padding is never read. The loss of half types is float32. A y that cannot be emitted has loss
    inf and gradient 0. The backend `cpu` is compiled, `eager` is PyTorch's operations in float64,
    on any device; `auto` is `cpu` on the CPU and `eager` elsewhere.
    """
    arguments = (transcription, prediction, labels, num_frames, num_labels, targets)
    return distillation_losses(*arguments, backend=backend)[0]


def distillation_losses(
    transcription: Tensor,
    prediction: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    targets: Tensor,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return `distillation_loss`, and -ln Pr(y|x) without a gradient, both [B]."""
    check_additive_shapes(transcription, prediction, labels, num_frames, num_labels)
    check_targets_shape(targets, prediction)
    if backend == "auto" and transcription.device.type != "cpu":
        backend = "eager"
    arguments = (transcription, prediction, labels, num_frames, num_labels)
    if resolve(backend, transcription.device, ("eager", "cpu")) == "cpu":
        wanted = torch.is_grad_enabled() and (
            transcription.requires_grad or prediction.requires_grad
        )
        loss, log_loss, *_ = distilled_loss(*arguments, targets, wanted)
        return loss, log_loss
    columns = _columns(*arguments)
    q = targets.detach().double().masked_fill(~columns.inside[..., None], 0.0)
    loss = -(q * columns.log_probs).sum((1, 2))
    log_loss = -columns.log_likelihood.detach()
    impossible = log_loss > -LEAST_LOG_ARROW / 2
    dtype = wide(transcription.dtype)
    loss, log_loss = (x.masked_fill(impossible, torch.inf) for x in (loss, log_loss))
    return loss.to(dtype), log_loss.to(dtype)


class _Columns(NamedTuple):
    """The next-label distributions of the prefixes of y, and their product along y."""

    log_probs: Tensor  # [B, U+1, K+1], ln p_u(k)
    inside: Tensor  # [B, U+1], whether a prefix is one of y or padding
    log_likelihood: Tensor  # [B], ln Pr(y|x)


def _columns(
    transcription: Tensor,
    prediction: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
) -> _Columns:
    """Compute all next-label distributions, in float64 and differentiable by autograd.

    They are exact while f and g disagree by less than 700 nats about the likeliest output.
    """
    (B, T, _), columns = transcription.shape, prediction.shape[1]
    frame_inside = torch.arange(T, device=labels.device) < num_frames[:, None]
    inside = torch.arange(columns, device=labels.device) <= num_labels[:, None]
    f = transcription.double().masked_fill(~frame_inside[..., None], 0.0)
    g = prediction.double().masked_fill(~inside[..., None], 0.0)
    f, g = f - _top(f), g - _top(g)
    # Null follows the last label, and marks the end.
    following = torch.nn.functional.pad(labels.long(), (0, 1))
    following = following.masked_fill(~_next(inside), NULL)
    f_density, g_density = f.exp(), g.exp()
    total = g_density @ f_density.mT  # Eq. 13's denominator, [B, U+1, T]
    log_total = total.clamp(min=torch.finfo(total.dtype).tiny).log()
    log_null = f[:, None, :, NULL] + g[:, :, None, NULL] - log_total  # Eq. 15
    by_f = f.gather(2, following[:, None, :-1].expand(B, T, columns - 1)).mT
    by_g = g.gather(2, following[..., None])[:, :-1]
    log_label = by_f + by_g - log_total[:, :-1]  # Eq. 14
    log_alpha, log_entered = _forward(
        log_null.clamp(min=LEAST_LOG_ARROW), log_label.clamp(min=LEAST_LOG_ARROW), frame_inside
    )
    # ln A_u(k): the nodes' weights α / total, scaled by their largest, times both densities.
    weight = (log_alpha - log_total).masked_fill(~frame_inside[:, None], -torch.inf)
    top = weight.detach().amax(-1, keepdim=True)
    sums = (weight - top).exp() @ f_density
    log_joint = top + sums.clamp(min=torch.finfo(sums.dtype).tiny).log() + g
    last = (num_frames.long() - 1)[:, None, None].expand(B, columns, 1)
    log_end = (log_alpha + log_null.clamp(min=LEAST_LOG_ARROW)).gather(2, last)  # [B, U+1, 1]
    log_joint = torch.cat((log_end, log_joint[..., NULL + 1 :]), 2)
    log_probs = (log_joint - log_entered[..., None]).clamp(min=LEAST_LOG_PROB)
    # What follows in y has its probability from the recursion, without underflow.
    log_followed = torch.where(_next(inside), _next(log_entered), log_end[..., 0])
    log_followed = (log_followed - log_entered)[..., None]
    log_probs = log_probs.scatter(2, following[..., None], log_followed)
    log_likelihood = log_end[..., 0].gather(1, num_labels.long()[:, None])[:, 0]
    return _Columns(log_probs.where(inside[..., None], 0.0), inside, log_likelihood)


def _forward(log_null: Tensor, log_label: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln α(t,u) [B, U+1, T] and ln Pr(y_1 ... y_u ...|x) [B, U+1], column by column.

    log_null is [B, U+1, T], log_label [B, U, T], and inside [B, T].
    """
    # C(t) of section 6: all outputs between the frame at which a column is entered and t are null.
    nulls = torch.nn.functional.pad(log_null.cumsum(2), (1, 0))[..., :-1].unbind(1)
    columns = [nulls[0]]
    for before, label in zip(nulls[1:], log_label.unbind(1), strict=True):
        columns.append(before + torch.logcumsumexp(columns[-1] + label - before, 1))
    log_alpha = torch.stack(columns, 1)
    entered = (log_alpha[:, :-1] + log_label).masked_fill(~inside[:, None], -torch.inf)
    return log_alpha, torch.nn.functional.pad(entered.logsumexp(2), (1, 0))


def _next(columns: Tensor) -> Tensor:
    """Return the value of the next column in each of [B, U+1], and 0 in the last."""
    return torch.nn.functional.pad(columns[:, 1:], (0, 1))


def _top(x: Tensor) -> Tensor:
    """Return the largest number of each vector as a constant; 0 if all of them are -inf."""
    top = x.detach().amax(-1, keepdim=True)
    return torch.where(top == -torch.inf, 0.0, top)
