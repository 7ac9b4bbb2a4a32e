"""How far what a network says of a sequence disagrees, when it sees it twice.

Masks and dropout make the two different. For distributions p and q it is the mean of KL(q|p), from
which p learns, and of KL(p|q), from which q does. That is summed over all that is asked along the
sequence: over frames for CTC (Yao et al., 2025), for a transducer over the nodes of the lattice,
each counting as probably as y's alignment passes it. No tensor has T x U x K numbers;
docs/derivations.md, section 7, says why there need be none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.lattice.loss import rnnt_loss


def symmetric_kl(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Of outputs [2 B, N, K], before the softmax, as many of each sequence as it is long: [B]."""
    probabilities = _wide(outputs).softmax(-1)
    inside = torch.arange(outputs.shape[1], device=outputs.device) < lengths[:, None]
    one, other = (probabilities * inside[..., None]).chunk(2)
    return _divergence(one - other, outputs)


def lattice_symmetric_kl(
    transcription: Tensor,  # [2 B, T, K+1], f
    prediction: Tensor,  # [2 B, U+1, K+1], g
    labels: Tensor,  # [2 B, U]
    num_frames: Tensor,  # [2 B]
    num_labels: Tensor,  # [2 B]
) -> Tensor:
    """Of the two output lattices of each sequence: [B]."""
    f, g = _wide(transcription), _wide(prediction)
    f, g = f - f.amax(-1, keepdim=True), g - g.amax(-1, keepdim=True)
    f_density, g_density = f.exp(), g.exp()
    total = f_density @ g_density.mT  # Eq. 13's denominator, [2 B, T, U+1]
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    occupancy = _occupancy(f, g, total.log(), labels, num_frames, num_labels)
    one, other = occupancy.chunk(2)
    share = (one + other).repeat(2, 1, 1) / (2 * total)
    # The occupancy times Pr(k|t,u), summed over u and over t.
    along_t, along_t_other = (f_density * (share @ g_density)).chunk(2)
    along_u, along_u_other = (g_density * (share.mT @ f_density)).chunk(2)
    by_f = _divergence(along_t - along_t_other, transcription)
    return by_f + _divergence(along_u - along_u_other, prediction)


def _divergence(difference: Tensor, outputs: Tensor) -> Tensor:
    """The mean of both divergences, from the difference of the probabilities: half of its product
    with that of the outputs, because the normalisers cancel. The difference is held fast, and so
    the gradient is that of each divergence in the one that learns from it."""
    one, other = outputs.chunk(2)
    return (difference * (one - other)).sum((1, 2)) / 2


def _occupancy(
    f: Tensor,
    g: Tensor,
    log_total: Tensor,  # [B, T, U+1]
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
) -> Tensor:
    """How probably the alignment of y passes each node, [B, T, U+1]: minus the gradient of the loss
    of a lattice that has no outputs but its two arrows, null and a label."""
    B, T, _ = log_total.shape
    log_null = f[:, :, :1] + g[:, None, :, 0]
    by_f = f.gather(2, labels[:, None].expand(B, T, -1))  # [B, T, U]
    by_g = g[:, :-1].gather(2, labels[..., None]).mT  # [B, 1, U]
    log_label = nn.functional.pad(by_f + by_g, (0, 1))
    arrows = torch.stack((log_null, log_label), -1) - log_total[..., None]
    with torch.enable_grad():
        loss = rnnt_loss(
            *(arrows.requires_grad_(), torch.ones_like(labels), num_frames, num_labels),
            blank=0,
            reduction="sum",
            fused_log_softmax=False,
        )
        (gradient,) = torch.autograd.grad(loss, arrows)
    return -gradient.sum(-1)


def _wide(outputs: Tensor) -> Tensor:
    return outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32))
