"""The doors to the output lattice: its losses, and its parts for one utterance.

Each function checks its arguments, chooses a backend by looking at them, and calls it. Null is id 0
here; `rnnt_loss` takes the null symbol (blank) as an argument, because other joint networks
(joiners) put it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from transduce.alphabet import NULL
from transduce.kernels.backends import Backend, check_tensors, load, resolve
from transduce.lattice.checks import (
    check_additive_shapes,
    check_arrow_shapes,
    check_joint_shapes,
    check_labels,
    check_lattice_shapes,
    check_numbers,
    check_reduction,
)
from transduce.lattice.operators import (
    additive_loss,
    arrow_loss,
    joint_loss,
    lattice_backend,
    wide,
)

Reduction = Literal["none", "mean", "sum"]
Arrows = Callable[[int, int], tuple[Tensor, Tensor]]  # log_null and log_label of some rows


class Occupancies(NamedTuple):
    """The posterior probability, given y, that the alignment takes each arrow of the lattice."""

    null: Tensor  # [B, T, U+1]
    label: Tensor  # [B, T, U]


class LabelEmissions(NamedTuple):
    """When each label of y is emitted, and how surely it is this label."""

    frame: list[int]  # on the most probable alignment
    start: list[int]  # the quantile `tail` of the emission's posterior
    end: list[int]  # the quantile 1 - tail
    confidence: list[float]  # the posterior's mean of Pr(y_u|t,u-1) / (1 - Pr(∅|t,u-1))


def transducer_loss(
    transcription: Tensor,  # [B, T, K+1], f
    prediction: Tensor,  # [B, U+1, K+1], g
    labels: Tensor,  # [B, U]
    num_frames: Tensor,  # [B]
    num_labels: Tensor,  # [B]
    *,
    reduction: Reduction = "none",
    backend: Backend = "auto",
) -> Tensor:  # [B], or a scalar
    """Return -ln Pr(y|x) of each utterance (Eq. 17), differentiable in f and g (Eqs. 20-22).

    f and g are the networks' outputs before the softmax: the softmax over their sum (Eqs. 12-13) is
    taken here. Padding, beyond an utterance's num_frames and num_labels, is never read. The loss of
    half types is float32. A y that cannot be emitted has loss inf and gradient 0.
    """
    check_additive_shapes(transcription, prediction, labels, num_frames, num_labels)
    check_reduction(reduction)
    name = resolve(backend, transcription.device)
    with_gradients = _needs_gradients(transcription, prediction)
    integers = (labels, num_frames, num_labels)
    loss = additive_loss.loss(transcription, prediction, *integers, with_gradients, name)
    return _reduced(loss, reduction)


def rnnt_loss(
    logits: Tensor,  # [B, T, U+1, K+1]
    targets: Tensor,  # [B, U]
    logit_lengths: Tensor,  # [B]
    target_lengths: Tensor,  # [B]
    blank: int = -1,
    clamp: float = -1,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return -ln Pr(y|x) from the logits of any joint network, with torchaudio's signature.

    `blank` is the null symbol, counted from the end if negative. A positive `clamp` limits the
    gradient with respect to each logit to [-clamp, clamp]. With fused_log_softmax=False the logits
    must be log-probabilities already. The loss of half types is float32.
    """
    check_joint_shapes(logits, targets, logit_lengths, target_lengths, blank)
    check_reduction(reduction)
    name = resolve(backend, logits.device)
    options = (blank % logits.shape[3], fused_log_softmax, float(clamp), _needs_gradients(logits))
    loss = joint_loss.loss(logits, targets, logit_lengths, target_lengths, *options, name)
    return _reduced(loss, reduction)


@overload
def lattice_loss(
    log_null: Tensor,
    log_label: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    *,
    reduction: Reduction = ...,
    with_occupancies: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...
@overload
def lattice_loss(
    log_null: Tensor,
    log_label: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    *,
    reduction: Reduction = ...,
    with_occupancies: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Occupancies]: ...
def lattice_loss(
    log_null: Tensor,  # [B, T, U+1]
    log_label: Tensor,  # [B, T, U]
    num_frames: Tensor,  # [B]
    num_labels: Tensor,  # [B]
    *,
    reduction: Reduction = "none",
    with_occupancies: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Occupancies]:
    """Return -ln Pr(y|x) of each item from its arrows ln ∅(t,u) and ln y(t,u) (Eqs. 16-18).

    The arrows may be any real numbers; they need not be normalised. -inf is an impossible arrow: a
    y that cannot be emitted has loss inf and gradient 0. Padding is never read. The loss is
    differentiable in both; its gradient is minus the occupancies (Eq. 20), which are returned too,
    detached, with with_occupancies=True. The loss of half types is float32.
    """
    check_arrow_shapes(log_null, log_label, num_frames, num_labels)
    check_reduction(reduction)
    name = resolve(backend, log_null.device)
    wanted = with_occupancies or _needs_gradients(log_null, log_label)
    arguments = (log_null, log_label, num_frames, num_labels, wanted, name)
    if not with_occupancies:
        return _reduced(arrow_loss.loss(*arguments), reduction)
    loss, *occupancies = arrow_loss(*arguments)
    return _reduced(loss, reduction), Occupancies(*occupancies)


class TransducerLoss(nn.Module):
    """`transducer_loss` as a module."""

    def __init__(self, reduction: Reduction = "none", backend: Backend = "auto") -> None:
        super().__init__()
        check_reduction(reduction)
        self.reduction, self.backend = reduction, backend

    def forward(
        self,
        transcription: Tensor,
        prediction: Tensor,
        labels: Tensor,
        num_frames: Tensor,
        num_labels: Tensor,
    ) -> Tensor:
        """Return the loss, [B] or reduced."""
        options: dict[str, Any] = {"reduction": self.reduction, "backend": self.backend}
        return transducer_loss(transcription, prediction, labels, num_frames, num_labels, **options)


class RNNTLoss(nn.Module):
    """`rnnt_loss` as a module, with torchaudio's constructor."""

    def __init__(
        self,
        blank: int = -1,
        clamp: float = -1,
        reduction: str = "mean",
        fused_log_softmax: bool = True,
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        self.blank, self.clamp = blank, clamp
        self.reduction, self.fused_log_softmax = reduction, fused_log_softmax

    def forward(
        self, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        """Return the loss, reduced or [B]."""
        options = (self.blank, self.clamp, self.reduction, self.fused_log_softmax)
        return rnnt_loss(logits, targets, logit_lengths, target_lengths, *options)


# --- The parts, of one utterance ----------------------------------------------------------------


def lattice_transitions(
    transcription: Tensor,  # [T, K+1], f
    prediction: Tensor,  # [U+1, K+1], g
    labels: Tensor,  # [U]
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the arrows of one utterance's output lattice (Eqs. 12-15): ln ∅(t,u), [T, U+1], and
    ln y(t,u), [T, U], which the functions below take as `log_null` and `log_label`.

    The parts are not differentiable; variants.py has transitions that are.
    """
    check_tensors(transcription=transcription, prediction=prediction, labels=labels)
    length = labels.new_zeros(1)  # any: there is no padding
    check_additive_shapes(transcription[None], prediction[None], labels[None], length, length)
    check_numbers("transcription", None, transcription)
    check_numbers("prediction", None, prediction)
    check_labels("labels", None, labels, prediction.shape[1], NULL)
    f, g = (x.detach().to(wide(x.dtype)) for x in (transcription, prediction))
    module = lattice_backend(resolve(backend, f.device))
    return module.lattice_transitions(f, g, labels.long())


def forward_variables(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return the forward variable α(t,u) of one utterance, in log space (Eq. 16), [T, U+1].

    log_null is [T, U+1] and log_label [T, U], as `lattice_transitions` returns them.
    """
    arrows = _checked_arrows(log_null, log_label)
    return lattice_backend(resolve(backend, log_null.device)).forward_variables(*arrows)


def backward_variables(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return the backward variable β(t,u) of one utterance, in log space (Eq. 18), [T, U+1]."""
    arrows = _checked_arrows(log_null, log_label)
    return lattice_backend(resolve(backend, log_null.device)).backward_variables(*arrows)


def log_likelihood(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return ln Pr(y|x) of one utterance (Eq. 17), a scalar."""
    log_alpha = forward_variables(log_null, log_label, backend=backend)
    return log_alpha[-1, -1] + log_null.detach()[-1, -1]  # Eq. 17


def log_occupancy(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return ln α(t,u) β(t,u) / Pr(y|x), [T, U+1]: the posterior that the alignment passes each
    node. On every diagonal t+u=n it sums to one (Eq. 19)."""
    arrows = _checked_arrows(log_null, log_label)
    return lattice_backend(resolve(backend, log_null.device)).log_occupancy(*arrows)


def best_alignment(
    log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto"
) -> tuple[list[int], float]:
    """Return the frame at which the most probable alignment of y emits each label, and ln Pr(a|x).

    Of equally probable alignments it chooses the one that emits its labels latest. It runs on the
    CPU, because its result is a list.
    """
    if backend == "cuda":
        raise ValueError("best_alignment has no backend 'cuda'; leave it to 'auto'")
    arrows = [arrow.cpu() for arrow in _checked_arrows(log_null, log_label)]
    module = load("lattice", resolve(backend, arrows[0].device))
    return module.best_alignment(*arrows)  # type: ignore[no-any-return]


def label_emissions(
    arrows: Arrows,
    num_frames: int,
    num_labels: int,
    tail: float,
    *,
    backend: Backend = "auto",
) -> LabelEmissions | None:
    """Return when each label of y is emitted; None if y cannot be emitted.

    `arrows(first, last)` returns the rows first to last - 1 of log_null [T, U+1] and log_label
    [T, U] on the CPU; sums of them are taken in float64. It is called for a strip of rows at a
    time, twice for each, so that the whole lattice is never in memory.
    """
    if backend == "cuda":
        raise ValueError("label_emissions has no backend 'cuda'; leave it to 'auto'")
    module = load("lattice", resolve(backend, torch.device("cpu")))
    columns = module.label_emissions(arrows, num_frames, num_labels, tail)
    return None if columns is None else LabelEmissions(*columns)


def remove_nulls(alignment: list[int]) -> list[int]:
    """Return ℬ(a): the labels of an alignment, without its nulls (Eq. 1)."""
    return [k for k in alignment if k != NULL]  # Eq. 1: ℬ(a)


def _checked_arrows(log_null: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor]:
    check_lattice_shapes(log_null, log_label)
    check_numbers("log_null", None, log_null)
    check_numbers("log_label", None, log_label)
    null, label = (x.detach().to(wide(x.dtype)) for x in (log_null, log_label))
    return null, label


def _needs_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
