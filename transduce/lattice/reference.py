"""The output lattice as the paper writes it: loops over one utterance at a time (Eqs. 12-22).

Every other backend is tested against this one, so it stays plain. It builds all of Pr(k|t,u),
which the others never do. In code t is the paper's t-1; u is unchanged.

-inf means an impossible event: its likelihood is zero and its gradient is zero, never NaN.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor


def output_distribution(transcription: Tensor, prediction: Tensor) -> Tensor:
    """Return ln Pr(k|t,u) of one utterance, [T, U+1, K+1], from f [T, K+1] and g [U+1, K+1]
    (Eqs. 12-13)."""
    log_density = transcription[:, None] + prediction[None]  # Eq. 12
    return normalise(log_density)  # Eq. 13


def normalise(log_density: Tensor) -> Tensor:
    """Return ln Pr(k) from ln h(k); where every k has density 0, every k has probability 0."""
    log_total = log_density.logsumexp(-1, keepdim=True)
    return torch.where(log_total == -torch.inf, -torch.inf, log_density - log_total)


def transitions(log_prob: Tensor, labels: Tensor, null: int) -> tuple[Tensor, Tensor]:
    """Return the arrows ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] (Eqs. 14-15)."""
    U = len(labels)
    log_label = log_prob[:, torch.arange(U), labels]  # Eq. 14
    log_null = log_prob[:, :, null]  # Eq. 15
    return log_null, log_label


def lattice_transitions(
    transcription: Tensor, prediction: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] of one utterance's f and g (Eqs. 12-15)."""
    return transitions(output_distribution(transcription, prediction), labels, null=0)


def mixture_transitions(
    transcription: Tensor,
    prediction: Tensor,
    outputs: Tensor,
    num_components: int,
    smallest_deviation: float,
) -> tuple[Tensor, Tensor]:
    """Return ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] of one utterance with continuous outputs.

    f [T, P] and g [U+1, P] are the parameters of a mixture of M Gaussians over outputs [U, D]:
    1 + M logits, of which the first is null's, R factors of each, M x D means and M x D
    log-precisions. docs/derivations.md, section 10.
    """
    T, (U, D), M = len(transcription), outputs.shape, num_components
    R = (transcription.shape[1] - 2 * M * D) // (1 + M) - 1
    first_mean = (1 + M) * (1 + R)
    most = -math.log(smallest_deviation)  # of each of the two log-precisions in a sum
    log_null = transcription.new_zeros(T, U + 1)
    log_label = transcription.new_zeros(T, U)
    for t, u in product(range(T), range(U + 1)):
        f, g = transcription[t], prediction[u]
        logits = []
        for k in range(1 + M):
            factors = slice(1 + M + k * R, 1 + M + (k + 1) * R)
            logits.append(f[k] + g[k] + f[factors] @ g[factors])
        null = torch.sigmoid(logits[0])
        log_null[t, u] = null.log()
        if u == U:
            continue
        weights = torch.softmax(torch.stack(logits[1:]), 0)
        density = torch.zeros_like(null)
        for m in range(M):
            gaussian = weights[m]
            for d in range(D):
                mean = first_mean + m * D + d
                precision = mean + M * D
                bounded = [most - (1 + (most - x[precision]).exp()).log() for x in (f, g)]
                deviation = (-(bounded[0] + bounded[1]) / 2).exp()
                distance = (outputs[u, d] - f[mean] - g[mean]) / deviation
                root = deviation * math.sqrt(2 * math.pi)
                gaussian = gaussian * (-0.5 * distance**2).exp() / root
            density = density + gaussian
        log_label[t, u] = (1 - null).log() + density.log()
    return log_null, log_label


def forward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return the forward variable α(t,u) of one utterance, in log space (Eq. 16).

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
    """Return ln Pr(y|x) of one utterance (Eq. 17), a scalar."""
    return forward_variables(log_null, log_label)[-1, -1] + log_null[-1, -1]  # Eq. 17


def backward_variables(log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return the backward variable β(t,u) of one utterance, in log space (Eq. 18), [T, U+1]."""
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
    """Return ln α(t,u) β(t,u) / Pr(y|x): the posterior that the alignment passes each node."""
    log_alpha = forward_variables(log_null, log_label)
    log_beta = backward_variables(log_null, log_label)
    return given(log_alpha + log_beta, log_beta[0, 0])  # Eq. 19: a term, as a share of the sum


def next_label_log_probs(log_prob: Tensor, labels: Tensor) -> Tensor:
    """Return ln Pr(k|y_1 ... y_u, x) of every prefix of y and label k, with the end in the place of
    null, [U+1, K+1], from ln Pr(k|t,u) [T, U+1, K+1].

    docs/derivations.md, section 6.
    """
    log_alpha = forward_variables(*transitions(log_prob, labels, null=0))
    log_joint = (log_alpha[..., None] + log_prob).logsumexp(0)
    log_end = log_alpha[-1] + log_prob[-1, :, 0]
    return torch.cat((log_end[:, None], log_joint[:, 1:]), 1).log_softmax(1)


def given(log_joint: Tensor, log_evidence: Tensor) -> Tensor:
    """Divide a joint probability by the evidence; given an impossible event, return -inf."""
    return torch.where(log_evidence == -torch.inf, -torch.inf, log_joint - log_evidence)


def best_alignment(log_null: Tensor, log_label: Tensor) -> tuple[list[int], float]:
    """Return the frame at which the most probable alignment emits each label, and ln Pr(a|x)."""
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


def label_emissions(
    arrows: Callable[[int, int], tuple[Tensor, Tensor]],
    num_frames: int,
    num_labels: int,
    tail: float,
) -> tuple[list[int], list[int], list[int], list[float]] | None:
    """Return each label's frame, start, end and confidence; None if y cannot be emitted."""
    log_null, log_label = arrows(0, num_frames)
    evidence, _, emitted = arrow_occupancies(log_null, log_label)
    if evidence == -torch.inf:
        return None
    frames, _ = best_alignment(log_null, log_label)
    emitted_by = emitted.cumsum(0)
    starts = (emitted_by < tail).sum(0)
    ends = (emitted_by < 1 - tail).sum(0).clamp(max=num_frames - 1)
    if_any = (log_label - torch.log(-torch.expm1(log_null[:, :-1]))).exp().clamp(max=1)
    confidences = torch.where(emitted > 0, emitted * if_any, 0.0).sum(0).clamp(max=1)
    return frames, starts.tolist(), ends.tolist(), confidences.tolist()


def arrow_occupancies(log_null: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln Pr(y|x) and the posteriors that the alignment takes each null arrow [T, U+1] and
    each label arrow [T, U]: minus the loss's derivatives by the arrows' logarithms (Eq. 20)."""
    log_alpha = forward_variables(log_null, log_label)
    log_beta = backward_variables(log_null, log_label)
    evidence = log_alpha[-1, -1] + log_null[-1, -1]  # Eq. 17
    after_null = torch.full_like(log_beta, -torch.inf)
    after_null[:-1] = log_beta[1:]
    after_null[-1, -1] = 0  # β(T+1, U) = 1: the last null ends the alignment
    by_null = given(log_alpha + log_null + after_null, evidence)
    by_label = given(log_alpha[:, :-1] + log_label + log_beta[:, 1:], evidence)
    return evidence, by_null.exp(), by_label.exp()


def transition_gradient(log_prob: Tensor, labels: Tensor, null: int) -> Tensor:
    """Return Pr(k|t,u) ∂L/∂Pr(k|t,u) of one utterance (Eq. 20), [T, U+1, K+1].

    The product with Pr(k|t,u) is taken at once, so that nothing is divided by a probability of 0.
    """
    _, by_null, by_label = arrow_occupancies(*transitions(log_prob, labels, null))
    gradient = torch.zeros_like(log_prob)
    gradient[:, :, null] = -by_null  # Eq. 20, k = ∅
    gradient[:, torch.arange(len(labels)), labels] = -by_label  # Eq. 20, k = y_{u+1}
    return gradient


def density_gradient(log_prob: Tensor, gradient: Tensor) -> Tensor:
    """Return ∂L/∂ ln h(k,t,u), the terms that Eqs. 21-22 sum, from Pr ∂L/∂Pr."""
    return gradient - log_prob.exp() * gradient.sum(-1, keepdim=True)


# --- The losses of a batch ----------------------------------------------------------------------


def _lengths(num_frames: Tensor, num_labels: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield b, T and U of each item."""
    lengths = zip(num_frames.tolist(), num_labels.tolist(), strict=True)
    return ((b, T, U) for b, (T, U) in enumerate(lengths))


def lattice_forward(
    log_null: Tensor,
    log_label: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_occupancies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of given arrows, and their occupancies if asked for."""
    loss = log_null.new_zeros(len(log_null))
    B = len(log_null) if with_occupancies else 0
    null, label = (x.new_zeros((B, *x.shape[1:])) for x in (log_null, log_label))
    for b, T, U in _lengths(num_frames, num_labels):
        arrows = log_null[b, :T, : U + 1], log_label[b, :T, :U]
        if not with_occupancies:
            loss[b] = -log_likelihood(*arrows)
            continue
        evidence, null[b, :T, : U + 1], label[b, :T, :U] = arrow_occupancies(*arrows)
        loss[b] = -evidence
    return loss, null, label


def additive_forward(
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of the additive density, and two empty tensors: nothing is saved."""
    loss = f.new_zeros(len(labels))
    for b, T, U in _lengths(num_frames, num_labels):
        arrows = lattice_transitions(f[b, :T], g[b, : U + 1], labels[b, :U])
        loss[b] = -log_likelihood(*arrows)
    return loss, *additive_saved(f, g, with_gradients)


def additive_saved(f: Tensor, g: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate two empty tensors: the gradients are computed from f and g alone."""
    return f.new_empty(0), g.new_empty(0)


def additive_backward(
    upstream: Tensor,
    f: Tensor,
    g: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    *saved: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to f and g, times upstream [B]."""
    grad_f, grad_g = torch.zeros_like(f), torch.zeros_like(g)
    for b, T, U in _lengths(num_frames, num_labels):
        log_prob = output_distribution(f[b, :T], g[b, : U + 1])
        gradient = transition_gradient(log_prob, labels[b, :U], null=0)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [B] of any joint network's logits [B, T, U+1, K+1]; nothing is saved."""
    loss = logits.new_zeros(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    for b, T, U in _lengths(num_frames, num_labels):
        cells = logits[b, :T, : U + 1].to(loss.dtype)
        log_prob = normalise(cells) if fused else cells
        loss[b] = -log_likelihood(*transitions(log_prob, labels[b, :U], null))
    return loss, *joint_saved(logits, with_gradients)


def joint_saved(logits: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """Allocate two empty tensors: the gradient is computed from the logits alone."""
    return logits.new_empty(0), logits.new_empty(0)


def joint_backward(
    upstream: Tensor,
    logits: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    null: int,
    fused: bool,
    clamp: float,
    *saved: Tensor,
) -> Tensor:
    """Return the gradient with respect to the logits, clamped before `upstream` scales it."""
    grad = torch.zeros_like(logits)
    for b, T, U in _lengths(num_frames, num_labels):
        cells = logits[b, :T, : U + 1].to(upstream.dtype)
        log_prob = normalise(cells) if fused else cells
        gradient = transition_gradient(log_prob, labels[b, :U], null)
        if fused:
            gradient = density_gradient(log_prob, gradient)
        if clamp > 0:
            gradient = gradient.clamp(-clamp, clamp)
        grad[b, :T, : U + 1] = upstream[b] * gradient
    return grad
