"""Symmetric KL divergence between two views of the same sequence (consistency regularisation).

Masks and dropout make the two views different. For distributions p and q the divergence is the mean
of KL(q|p), whose gradient reaches p alone, and of KL(p|q), whose gradient reaches q alone. It is
summed along the sequence: over frames for CTC (Yao et al., 2025), and for a transducer over the
nodes of the lattice, weighted by the posterior that the alignment of y passes each. No tensor has
T x U x K numbers; docs/derivations.md, section 7, says why none is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.kernels.nvrtc import full_float32_matmul
from transduce.lattice.loss import lattice_loss
from transduce.lattice.operators import wide


def symmetric_kl(logits: Tensor, lengths: Tensor) -> Tensor:
    """Return the symmetric KL divergence between the two halves of `logits`, summed over valid
    positions.

    logits is [2 B, N, K], the first views and then the second ones; lengths is [2 B]; the result
    is [B].
    """
    probabilities = logits.detach().to(wide(logits.dtype)).softmax(-1)
    inside = torch.arange(logits.shape[1], device=logits.device) < lengths[:, None]
    first, second = (probabilities * inside[..., None]).chunk(2)
    return _divergence(first - second, logits)


def lattice_symmetric_kl(
    transcription: Tensor,  # [2 B, T, K+1], f
    prediction: Tensor,  # [2 B, U+1, K+1], g
    labels: Tensor,  # [2 B, U]
    num_frames: Tensor,  # [2 B]
    num_labels: Tensor,  # [2 B]
) -> Tensor:
    """Return the symmetric KL divergence between the two output lattices of each sequence, [B]."""
    f, g = (x.detach().to(wide(x.dtype)) for x in (transcription, prediction))
    f, g = f - f.amax(-1, keepdim=True), g - g.amax(-1, keepdim=True)
    f_density, g_density = f.exp(), g.exp()
    total = full_float32_matmul(f_density, g_density.mT)  # Eq. 13's denominator, [2 B, T, U+1]
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    occupancy = _occupancy(f, g, total.log(), labels, num_frames, num_labels)
    first, second = occupancy.chunk(2)
    share = (first + second).repeat(2, 1, 1) / (2 * total)
    # The occupancy times Pr(k|t,u), summed over u and over t.
    first_t, second_t = (f_density * full_float32_matmul(share, g_density)).chunk(2)
    first_u, second_u = (g_density * full_float32_matmul(share.mT, f_density)).chunk(2)
    by_f = _divergence(first_t - second_t, transcription)
    return by_f + _divergence(first_u - second_u, prediction)


def _divergence(difference: Tensor, logits: Tensor) -> Tensor:
    """Return the mean of both divergences from the difference of the probabilities.

    It is half the product of that difference with the difference of the logits, because the
    normalisers cancel. The probabilities are constants, which makes the gradient that of each
    divergence in the one distribution that learns from it.
    """
    first, second = logits.chunk(2)
    return (difference * (first - second)).sum((1, 2)) / 2


def _occupancy(
    f: Tensor,
    g: Tensor,
    log_total: Tensor,  # [B, T, U+1]
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
) -> Tensor:
    """Return the posterior that the alignment of y passes each node, [B, T, U+1]."""
    B, T, _ = log_total.shape
    log_null = f[:, :, :1] + g[:, None, :, 0] - log_total
    by_f = f.gather(2, labels[:, None].expand(B, T, -1))  # [B, T, U]
    by_g = g[:, :-1].gather(2, labels[..., None]).mT  # [B, 1, U]
    log_label = by_f + by_g - log_total[:, :, :-1]
    _, taken = lattice_loss(log_null, log_label, num_frames, num_labels, with_occupancies=True)
    passed = taken.null.clone()
    passed[:, :, :-1] += taken.label
    return passed
