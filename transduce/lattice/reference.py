"""The output lattice as the paper writes it: loops over one utterance at a time (Eqs. 12-22).

Every other backend is tested against this one, so it is kept plain. It builds all of Pr(k|t,u),
which the others never do. In code t is the paper's t-1; u is unchanged.

-inf is an event that cannot happen: its likelihood is zero and so is its gradient, never NaN.
"""

from itertools import product

import torch
from torch import Tensor


def output_distribution(transcription: Tensor, prediction: Tensor) -> Tensor:
    """ln Pr(k|t,u) of one utterance (Eqs. 12-13), [T, U+1, K+1], from f [T, K+1], g [U+1, K+1]."""
    log_density = transcription[:, None] + prediction[None]  # Eq. 12
    return normalise(log_density)  # Eq. 13


def normalise(log_density: Tensor) -> Tensor:
    """ln Pr(k) from ln h(k); where every k has density 0, every k has probability 0."""
    log_total = log_density.logsumexp(-1, keepdim=True)
    return torch.where(log_total == -torch.inf, -torch.inf, log_density - log_total)


def transitions(log_prob: Tensor, labels: Tensor, null: int) -> tuple[Tensor, Tensor]:
    """ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U], the arrows of the lattice (Eqs. 14-15)."""
    U = len(labels)
    log_label = log_prob[:, torch.arange(U), labels]  # Eq. 14
    log_null = log_prob[:, :, null]  # Eq. 15
    return log_null, log_label


def lattice_transitions(
    transcription: Tensor, prediction: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] of one utterance's f and g (Eqs. 12-15)."""
    return transitions(output_distribution(transcription, prediction), labels, null=0)


def forward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """The forward variable α(t,u) of one utterance, in log space (Eq. 16).

    log_null is [T, U+1], log_label is [T, U]; the result is [T, U+1].
    """
    T, U = log_label.shape
    impossible = log_null.new_tensor(-torch.inf)
    log_alpha = log_null.new_zeros(T, U + 1)  # α(1, 0) = 1
    for t, u in product(range(T), range(U + 1)):
        if (t, u) == (0, 0):
            continue
        right = log_alpha[t - 1, u] + log_null[t - 1, u] if t > 0 else impossible
        up = log_alpha[t, u - 1] + log_label[t, u - 1] if u > 0 else impossible
        log_alpha[t, u] = torch.logaddexp(right, up)  # Eq. 16
    return log_alpha


def log_likelihood(log_null: Tensor, log_label: Tensor) -> Tensor:
    """ln Pr(y|x) of one utterance (Eq. 17), a scalar."""
    return forward_variables(log_null, log_label)[-1, -1] + log_null[-1, -1]  # Eq. 17


def backward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """The backward variable β(t,u) of one utterance, in log space (Eq. 18), [T, U+1]."""
    T, U = log_label.shape
    impossible = log_null.new_tensor(-torch.inf)
    log_beta = log_null.new_zeros(T, U + 1)
    for t, u in product(reversed(range(T)), reversed(range(U + 1))):
        if (t, u) == (T - 1, U):
            log_beta[t, u] = log_null[t, u]  # β(T, U) = ∅(T, U)
            continue
        right = log_beta[t + 1, u] + log_null[t, u] if t < T - 1 else impossible
        up = log_beta[t, u + 1] + log_label[t, u] if u < U else impossible
        log_beta[t, u] = torch.logaddexp(right, up)  # Eq. 18
    return log_beta


def log_occupancy(log_null: Tensor, log_label: Tensor) -> Tensor:
    """ln α(t,u) β(t,u) / Pr(y|x): the probability that the alignment of y passes each node."""
    log_alpha = forward_variables(log_null, log_label)
    log_beta = backward_variables(log_null, log_label)
    return given(log_alpha + log_beta, log_beta[0, 0])


def given(log_joint: Tensor, log_evidence: Tensor) -> Tensor:
    """A joint probability over the evidence's; given what is impossible, everything is."""
    return torch.where(log_evidence == -torch.inf, -torch.inf, log_joint - log_evidence)


def best_alignment(log_null: Tensor, log_label: Tensor) -> tuple[list[int], float]:
    """The frame at which the most probable alignment emits each label, and its ln Pr(a|x)."""
    T, U = log_label.shape
    best = log_null.new_full((T, U + 1), -torch.inf)
    best[0, 0] = 0
    emitted = torch.zeros(T, U + 1, dtype=torch.bool)  # whether the best way in is up, by a label
    for t, u in product(range(T), range(U + 1)):
        right = best[t - 1, u] + log_null[t - 1, u] if t > 0 else best.new_tensor(-torch.inf)
        up = best[t, u - 1] + log_label[t, u - 1] if u > 0 else best.new_tensor(-torch.inf)
        if (t, u) != (0, 0):
            emitted[t, u] = t == 0 or (u > 0 and up >= right)
            best[t, u] = torch.maximum(right, up)
    frames: list[int] = []
    t, u = T - 1, U
    while (t, u) != (0, 0):
        if emitted[t, u]:
            u -= 1
            frames.append(t)
        else:
            t -= 1
    return frames[::-1], float(best[-1, -1] + log_null[-1, -1])


def transition_gradient(log_prob: Tensor, labels: Tensor, null: int) -> tuple[Tensor, Tensor]:
    """The loss of one utterance, and Pr(k|t,u) ∂L/∂Pr(k|t,u) (Eq. 20), [T, U+1, K+1].

    The product with Pr(k|t,u) is taken at once, so that a probability of zero divides nothing.
    """
    T, U = log_prob.shape[0], len(labels)
    log_null, log_label = transitions(log_prob, labels, null)
    log_alpha = forward_variables(log_null, log_label)
    log_beta = backward_variables(log_null, log_label)
    evidence = log_likelihood(log_null, log_label)
    after_null = log_beta.new_full((T, U + 1), -torch.inf)
    after_null[:-1] = log_beta[1:]
    after_null[-1, -1] = 0  # β(T+1, U) = 1: the last null ends the alignment
    gradient = torch.zeros_like(log_prob)
    by_null = given(log_alpha + log_null + after_null, evidence)
    by_label = given(log_alpha[:, :-1] + log_label + log_beta[:, 1:], evidence)
    gradient[:, :, null] = -by_null.exp()  # Eq. 20, k = ∅
    gradient[:, torch.arange(U), labels] = -by_label.exp()  # Eq. 20, k = y_{u+1}
    return -evidence, gradient


def density_gradient(log_prob: Tensor, gradient: Tensor) -> Tensor:
    """∂L/∂ ln h(k,t,u), the terms that Eqs. 21-22 sum, from Pr ∂L/∂Pr."""
    return gradient - log_prob.exp() * gradient.sum(-1, keepdim=True)


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss [B] of the additive density, and what its gradients will need."""
    loss = f.new_zeros(len(labels))
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        arrows = lattice_transitions(f[b, :T], g[b, : U + 1], labels[b, :U])
        loss[b] = -log_likelihood(*arrows)
    return loss, (f, g, labels, num_frames, num_labels)


def additive_backward(
    upstream: Tensor, f: Tensor, g: Tensor, labels: Tensor, num_frames: Tensor, num_labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to f and g, times upstream [B]."""
    grad_f, grad_g = torch.zeros_like(f), torch.zeros_like(g)
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        log_prob = output_distribution(f[b, :T], g[b, : U + 1])
        _, gradient = transition_gradient(log_prob, labels[b, :U], null=0)
        cells = upstream[b] * density_gradient(log_prob, gradient)
        grad_f[b, :T] = cells.sum(1)  # Eq. 21
        grad_g[b, : U + 1] = cells.sum(0)  # Eq. 22
    return grad_f, grad_g


def joint_forward(
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss [B] of any joint network's logits [B, T, U+1, K+1]; nothing is kept for later."""
    loss = logits.new_zeros(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        cells = logits[b, :T, : U + 1].to(loss.dtype)
        log_prob = normalise(cells) if fused else cells
        loss[b] = -log_likelihood(*transitions(log_prob, labels[b, :U], null))
    return loss, ()


def joint_backward(
    upstream: Tensor,
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    clamp: float,
) -> Tensor:
    """The gradient with respect to the logits, clamped before it is scaled by `upstream`."""
    grad = torch.zeros_like(logits)
    for b, (T, U) in enumerate(zip(num_frames.tolist(), num_labels.tolist(), strict=True)):
        cells = logits[b, :T, : U + 1].to(upstream.dtype)
        log_prob = normalise(cells) if fused else cells
        _, gradient = transition_gradient(log_prob, labels[b, :U], null)
        if fused:
            gradient = density_gradient(log_prob, gradient)
        if clamp > 0:
            gradient = gradient.clamp(-clamp, clamp)
        grad[b, :T, : U + 1] = upstream[b] * gradient
    return grad
