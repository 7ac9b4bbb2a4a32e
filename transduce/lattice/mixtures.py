"""Continuous outputs: a mixture of Gaussians in the place of the softmax over labels.

The parameters at a node come from f_t and g_u: the logits of null and of the M components, their
M x D means, and their M x D log-precisions (-2 ln of the deviations). All are sums f_t + g_u, as in
Eq. 12; to each logit a scalar product of R numbers of f_t with R of g_u is added, so that null may
depend on whether input and outputs match. The density of an output is that of its D numbers
together, in nats: where it is above one, its logarithm is positive and its bits are negative.
docs/derivations.md, section 10.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from transduce.kernels.backends import Backend
from transduce.lattice.checks import check_mixture_shapes, check_reduction
from transduce.lattice.loss import Reduction, lattice_loss
from transduce.lattice.operators import wide
from transduce.sequences import zero_padding

# The smallest standard deviation of a component, where outputs have deviation 1 over the training
# set. Without a bound, a component that sits on a repeated output, such as the floor of digital
# silence, has a density without bound. A smaller one follows details more closely that nobody
# hears: 0.1 deviations of a log mel spectrogram are about 1 dB.
SMALLEST_DEVIATION = 0.1


class Mixture(NamedTuple):
    """The parameters of mixtures of M Gaussians of D numbers, or the share of f or g in them."""

    logits: Tensor  # [..., 1 + M], of null and of the components
    factors: Tensor  # [..., 1 + M, R], whose products are added to the logits
    means: Tensor  # [..., M, D]
    log_precisions: Tensor  # [..., M, D]


def num_parameters(num_components: int, rank: int, size: int) -> int:
    """Return P, the length of f_t and g_u: (1 + M) (1 + R) + 2 M D."""
    return (1 + num_components) * (1 + rank) + 2 * num_components * size


def mixture_of(vectors: Tensor, num_components: int, size: int) -> Mixture:
    """Split vectors [..., P] of f or of g; bound their log-precisions.

    f and g give half the bound each, so that their sum is a precision of at most
    1 / SMALLEST_DEVIATION squared. The bound is smooth: c - softplus(c - x) is x far below c.
    """
    M, D = num_components, size
    num_factors = vectors.shape[-1] - (1 + M) - 2 * M * D
    parts = torch.split(vectors, [1 + M, num_factors, M * D, M * D], -1)
    c = -math.log(SMALLEST_DEVIATION)
    return Mixture(
        parts[0],
        torch.unflatten(parts[1], -1, (1 + M, num_factors // (1 + M))),
        torch.unflatten(parts[2], -1, (M, D)),
        c - softplus(c - torch.unflatten(parts[3], -1, (M, D))),
    )


def mixture_at(f: Mixture, g: Mixture) -> Mixture:
    """Return the mixtures at nodes from the shares of f and g there."""
    logits = f.logits + g.logits + (f.factors * g.factors).sum(-1)
    means, log_precisions = f.means + g.means, f.log_precisions + g.log_precisions
    return Mixture(logits, f.factors[..., :0], means, log_precisions)


def gaussian_log_density(squares: Tensor, log_determinants: Tensor, size: int) -> Tensor:
    """Return ln N of `size` numbers from the sums of their squared distances times precisions.

    The determinants are those of the precisions.
    """
    return 0.5 * (log_determinants - squares - size * math.log(2 * math.pi))


def mixture_transitions(
    transcription: Tensor,  # [B, T, P], f
    prediction: Tensor,  # [B, U+1, P], g
    outputs: Tensor,  # [B, U, D]
    num_components: int,
) -> tuple[Tensor, Tensor]:
    """Return the arrows ln ∅(t,u) [B, T, U+1] and ln y(t,u) [B, T, U], differentiable by autograd.

    ln y(t,u) is ln(1 - Pr(∅|t,u)) plus the log-density of the next output. The squares of all
    nodes are one matrix product for each component, so that there is no tensor of B x T x U x D
    numbers. Sums are float64, in which no float32 parameters overflow. Padding must be finite.
    """
    dtype = wide(transcription.dtype)
    D = outputs.shape[2]
    f, g = (mixture_of(x.double(), num_components, D) for x in (transcription, prediction))
    products = torch.einsum("btkr,bukr->btuk", f.factors, g.factors)
    logits = f.logits[:, :, None] + g.logits[:, None] + products  # [B, T, U+1, 1+M]
    null, log_weights = logits[..., 0], logits[:, :, :-1, 1:].log_softmax(-1)
    # With p = e^(log-precision) and r = y - (mean of g), the square is
    # p_f p_g (r - mean_f)^2 = p_f (p_g r^2) - 2 (p_f mean_f) (p_g r) + (p_f mean_f^2) p_g.
    log_by_f, log_by_g = f.log_precisions, g.log_precisions[:, :-1]
    by_f, by_g, rest = (
        log_by_f.exp(),
        log_by_g.exp(),
        outputs.double()[:, :, None] - g.means[:, :-1],
    )
    left = torch.cat([by_f, -2 * by_f * f.means, by_f * f.means.square()], -1)
    right = torch.cat([by_g * rest.square(), by_g * rest, by_g], -1)
    squares = torch.einsum("btmd,bumd->btum", left, right).clamp(min=0)  # rounding may be below 0
    log_determinants = log_by_f.sum(-1)[:, :, None] + log_by_g.sum(-1)[:, None]
    log_density = gaussian_log_density(squares, log_determinants, D)
    log_output = (log_weights + log_density).logsumexp(-1)
    log_label = logsigmoid(-null[:, :, :-1]) + log_output
    return logsigmoid(null).to(dtype), log_label.to(dtype)


def mixture_loss(
    transcription: Tensor,  # [B, T, P], f
    prediction: Tensor,  # [B, U+1, P], g
    outputs: Tensor,  # [B, U, D]
    num_frames: Tensor,  # [B]
    num_outputs: Tensor,  # [B]
    *,
    num_components: int,
    reduction: Reduction = "none",
    backend: Backend = "auto",
) -> Tensor:  # [B], or a scalar
    """Return -ln of the density of each item's outputs y given x, summed over all alignments.

    P is (1 + M) (1 + R) + 2 M D for M components and products of rank R, which may be 0. The loss
    is differentiable in f, g and y, and negative where the density is above one. Padding is never
    read.
    """
    vectors = (transcription, prediction, outputs)
    check_mixture_shapes(*vectors, num_frames, num_outputs, num_components)
    check_reduction(reduction)
    arrows = mixture_transitions(
        zero_padding(transcription, num_frames),
        zero_padding(prediction, num_outputs + 1),
        zero_padding(outputs, num_outputs),
        num_components,
    )
    return lattice_loss(*arrows, num_frames, num_outputs, reduction=reduction, backend=backend)
