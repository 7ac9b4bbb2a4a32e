"""The doors to the output lattice: its parts, and -ln Pr(y|x) with its gradients.

Each checks its arguments, chooses a backend by looking at them, and calls it. Null is id 0 here;
`rnnt_loss` takes the null symbol as an argument, because other joint networks put it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.kernels.backends import INTEGERS, Backend, load, resolve


def transducer_loss(
    transcription: Tensor,  # [B, T, K+1], f
    prediction: Tensor,  # [B, U+1, K+1], g
    labels: Tensor,  # [B, U]
    num_frames: Tensor,  # [B]
    num_labels: Tensor,  # [B]
    *,
    backend: Backend = "auto",
) -> Tensor:  # [B]
    """-ln Pr(y|x) of each utterance (Eq. 17), differentiable in f and g (Eqs. 20-22).

    f and g are the networks' outputs as they are: the softmax over their sum (Eqs. 12-13) is
    taken here. What lies beyond an utterance's num_frames and num_labels is never read. The loss
    of half types is float32. A y that cannot be emitted has loss inf and gradient 0.
    """
    check_shapes(transcription, prediction, labels, num_frames, num_labels)
    module = load("lattice", resolve(backend, transcription.device))
    arguments = _lengths_checked(
        labels, num_frames, num_labels, transcription.shape[1], prediction.shape[1] - 1
    )

    def check_values() -> None:
        for b, (T, U) in enumerate(zip(*(a.tolist() for a in arguments[1:]), strict=True)):
            _check_numbers("transcription", b, transcription[b, :T])
            _check_numbers("prediction", b, prediction[b, : U + 1])
            _check_labels("labels", b, labels[b, :U], prediction.shape[2], NULL)

    if backend == "reference":
        check_values()
    loss: Tensor = _Additive.apply(module, transcription, prediction, *arguments)  # type: ignore[no-untyped-call]
    _explain_nan(loss, check_values)
    return loss


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
    """-ln Pr(y|x) from the logits of any joint network; torchaudio's signature and results.

    `blank` is the null symbol, counted from the end if negative. The gradient with respect to
    each logit is clamped to [-clamp, clamp] if clamp is positive. With fused_log_softmax=False the
    logits must be log-probabilities already. The loss of half types is float32.
    """
    _check_joint(logits, targets, logit_lengths, target_lengths, blank, reduction)
    module = load("lattice", resolve(backend, logits.device))
    null = blank % logits.shape[3]
    names = ("targets", "logit_lengths", "target_lengths")
    arguments = _lengths_checked(
        targets, logit_lengths, target_lengths, logits.shape[1], logits.shape[2] - 1, names
    )

    def check_values() -> None:
        for b, (T, U) in enumerate(zip(*(a.tolist() for a in arguments[1:]), strict=True)):
            _check_numbers("logits", b, logits[b, :T, : U + 1])
            _check_labels("targets", b, targets[b, :U], logits.shape[3], null)

    if backend == "reference":
        check_values()
    options = (null, fused_log_softmax, clamp)
    loss: Tensor = _Joint.apply(module, logits, *arguments, *options)  # type: ignore[no-untyped-call]
    _explain_nan(loss, check_values)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


# --- The parts, of one utterance ----------------------------------------------------------------


def lattice_transitions(
    transcription: Tensor,  # [T, K+1], f
    prediction: Tensor,  # [U+1, K+1], g
    labels: Tensor,  # [U]
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The arrows of one utterance's output lattice (Eqs. 12-15): ln ∅(t,u), [T, U+1], `log_null`,
    and ln y(t,u), [T, U], `log_label`, which the functions below take."""
    length = labels.new_zeros(1)  # any: there is no padding
    check_shapes(transcription[None], prediction[None], labels[None], length, length)
    _check_numbers("transcription", None, transcription)
    _check_numbers("prediction", None, prediction)
    _check_labels("labels", None, labels, prediction.shape[1], NULL)
    f, g = (x.detach().to(_wide(x.dtype)) for x in (transcription, prediction))
    arrows: tuple[Tensor, Tensor] = load("lattice", resolve(backend, f.device)).lattice_transitions(
        f, g, labels.long()
    )
    return arrows


def forward_variables(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """The forward variable α(t,u) of one utterance, in log space (Eq. 16), [T, U+1].

    log_null is [T, U+1] and log_label [T, U], as `lattice_transitions` returns them. Gradients do
    not flow through the parts; `transducer_loss` has them.
    """
    return _part("forward_variables", log_null, log_label, backend)  # type: ignore[no-any-return]


def backward_variables(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """The backward variable β(t,u) of one utterance, in log space (Eq. 18), [T, U+1]."""
    return _part("backward_variables", log_null, log_label, backend)  # type: ignore[no-any-return]


def log_likelihood(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """ln Pr(y|x) of one utterance (Eq. 17), a scalar."""
    log_alpha = forward_variables(log_null, log_label, backend=backend)
    return log_alpha[-1, -1] + log_null.detach()[-1, -1]  # Eq. 17


def log_occupancy(log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto") -> Tensor:
    """ln α(t,u) β(t,u) / Pr(y|x), [T, U+1]: the probability, given y, that the alignment passes
    each node. On every diagonal t+u=n it sums to one (Eq. 19)."""
    return _part("log_occupancy", log_null, log_label, backend)  # type: ignore[no-any-return]


def best_alignment(
    log_null: Tensor, log_label: Tensor, *, backend: Backend = "auto"
) -> tuple[list[int], float]:
    """The frame at which the most probable alignment of y emits each label, and ln Pr(a|x).

    Of equally probable alignments it is the one that emits its labels latest. The result is a list,
    so it is found where lists are, on the CPU.
    """
    if backend == "cuda":
        raise ValueError("best_alignment has no backend 'cuda'; leave it to 'auto'")
    log_null, log_label = log_null.cpu(), log_label.cpu()
    return _part("best_alignment", log_null, log_label, backend)  # type: ignore[no-any-return]


def remove_nulls(alignment: list[int]) -> list[int]:
    """ℬ(a): the labels of an alignment, its nulls removed (Eq. 1)."""
    return [k for k in alignment if k != NULL]


# --- Gradients ----------------------------------------------------------------------------------


class _Additive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        transcription: Tensor,
        prediction: Tensor,
        labels: Tensor,
        num_frames: Tensor,
        num_labels: Tensor,
    ) -> Tensor:
        f, g = (x.detach().to(_wide(x.dtype)) for x in (transcription, prediction))
        arguments = (f, g, labels, num_frames, num_labels, any(ctx.needs_input_grad))
        loss, saved = module.additive_forward(*arguments)
        ctx.save_for_backward(*saved)
        ctx.module, ctx.dtype = module, transcription.dtype
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.module.additive_backward(upstream, *ctx.saved_tensors)
        return None, *(grad.to(ctx.dtype) for grad in grads), None, None, None


class _Joint(torch.autograd.Function):
    """Backward computes the gradient into the one tensor of the logits' size that there is."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        logits: Tensor,
        labels: Tensor,
        num_frames: Tensor,
        num_labels: Tensor,
        null: int,
        fused: bool,
        clamp: float,
    ) -> Tensor:
        tensors = (labels, num_frames, num_labels)
        with_gradients = ctx.needs_input_grad[1]
        loss, saved = module.joint_forward(logits.detach(), *tensors, null, fused, with_gradients)
        ctx.save_for_backward(logits, *tensors, *saved)
        ctx.module, ctx.options = module, (null, fused, clamp)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, num_frames, num_labels, *saved = ctx.saved_tensors
        arguments = (logits.detach(), labels, num_frames, num_labels, *ctx.options, *saved)
        grad = ctx.module.joint_backward(upstream, *arguments)
        return None, grad, *(None,) * 6


# --- Choosing and checking ----------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _part(name: str, log_null: Tensor, log_label: Tensor, backend: Backend) -> Any:
    if log_null.ndim != 2 or log_null.shape[0] == 0:
        raise ValueError(f"log_null must be [T, U+1] with T >= 1, not {list(log_null.shape)}")
    T, columns = log_null.shape
    if columns == 0 or log_label.shape != (T, columns - 1):
        raise ValueError(
            f"log_label must be [T, U] = [{T}, {columns - 1}], because log_null is [T, U+1] = "
            f"[{T}, {columns}]; it is {list(log_label.shape)}"
        )
    _check_numbers("log_null", None, log_null)
    _check_numbers("log_label", None, log_label)
    null, label = (x.detach().to(_wide(x.dtype)) for x in (log_null, log_label))
    return getattr(load("lattice", resolve(backend, log_null.device)), name)(null, label)


def check_shapes(
    transcription: Tensor,
    prediction: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
) -> None:
    """Raise ValueError unless the arguments' shapes, types and devices go together."""
    if transcription.ndim != 3:
        raise ValueError(f"transcription must be [B, T, K+1], not {list(transcription.shape)}")
    B, T, K1 = transcription.shape
    if prediction.ndim != 3 or prediction.shape[0] != B or prediction.shape[2] != K1:
        raise ValueError(
            f"prediction must be [B, U+1, K+1] with B = {B} and K+1 = {K1} as in transcription, "
            f"not {list(prediction.shape)}"
        )
    if prediction.dtype != transcription.dtype:
        raise ValueError(
            f"transcription and prediction must have one type, not {transcription.dtype} and "
            f"{prediction.dtype}"
        )
    _check_rest(
        {"transcription": transcription, "prediction": prediction},
        {"labels": labels, "num_frames": num_frames, "num_labels": num_labels},
        (B, T, prediction.shape[1], K1),
    )


def _check_joint(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    reduction: str,
) -> None:
    if logits.ndim != 4:
        raise ValueError(f"logits must be [B, T, U+1, K+1], not {list(logits.shape)}")
    _check_rest(
        {"logits": logits},
        {"targets": targets, "logit_lengths": logit_lengths, "target_lengths": target_lengths},
        tuple(logits.shape),
    )
    if not -logits.shape[3] <= blank < logits.shape[3]:
        raise ValueError(f"blank must be one of the {logits.shape[3]} outputs, not {blank}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, not {reduction!r}")


def _check_rest(
    numbers: dict[str, Tensor], integers: dict[str, Tensor], sizes: tuple[int, ...]
) -> None:
    """What both losses ask of the tensors beside the shapes of f, g and the logits."""
    B, T, columns, K1 = sizes
    first = next(iter(numbers))
    if B == 0 or T == 0 or columns == 0 or K1 < 2:
        raise ValueError(f"{first} must have at least one item, one frame and two outputs")
    if not numbers[first].is_floating_point():
        raise ValueError(f"{first} must be floating-point, not {numbers[first].dtype}")
    for name, tensor in integers.items():
        if tensor.dtype not in INTEGERS:
            raise ValueError(f"{name} must be integers, not {tensor.dtype}")
    for name, tensor in (numbers | integers).items():
        if tensor.device != numbers[first].device:
            raise ValueError(
                f"all tensors must be on one device, but {first} is on {numbers[first].device} "
                f"and {name} on {tensor.device}"
            )
    labels, *lengths = integers
    if integers[labels].shape != (B, columns - 1):
        raise ValueError(
            f"{labels} must be [B, U] = [{B}, {columns - 1}], because {list(numbers)[-1]} has "
            f"U+1 = {columns}; it is {list(integers[labels].shape)}"
        )
    for name in lengths:
        if integers[name].shape != (B,):
            raise ValueError(f"{name} must be [B] = [{B}], not {list(integers[name].shape)}")


def _lengths_checked(
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
    max_frames: int,
    max_labels: int,
    names: tuple[str, str, str] = ("labels", "num_frames", "num_labels"),
) -> tuple[Tensor, Tensor, Tensor]:
    """The three as int64; on the CPU, ValueError where a length does not fit."""
    if num_frames.device.type == "cpu":
        for b, T in enumerate(num_frames.tolist()):
            if not 1 <= T <= max_frames:
                raise ValueError(f"{names[1]}[{b}] must be between 1 and {max_frames}, not {T}")
        for b, U in enumerate(num_labels.tolist()):
            if not 0 <= U <= max_labels:
                raise ValueError(f"{names[2]}[{b}] must be between 0 and {max_labels}, not {U}")
    return tuple(x.long().contiguous() for x in (labels, num_frames, num_labels))  # type: ignore[return-value]


def _explain_nan(loss: Tensor, check_values: Callable[[], None]) -> None:
    """A NaN on the CPU comes of a bad value: find it, and raise."""
    if loss.device.type == "cpu" and loss.detach().isnan().any():
        check_values()


def _item(b: int | None) -> str:
    return "" if b is None else f" of item {b}"


def _check_numbers(name: str, b: int | None, numbers: Tensor) -> None:
    bad = (numbers.isnan() | numbers.isposinf()).nonzero()
    if len(bad):
        where = bad[0].tolist()
        value = "NaN" if numbers[tuple(where)].isnan() else "+inf"
        raise ValueError(f"{name}{_item(b)} has {value} at {where}; it must be finite, or -inf")


def _check_labels(name: str, b: int | None, labels: Tensor, num_outputs: int, null: int) -> None:
    for u, k in enumerate(labels.tolist()):
        if k == null:
            raise ValueError(
                f"{name}{_item(b)} has the null symbol, {null}, at position {u}; labels are the "
                "other outputs"
            )
        if not 0 <= k < num_outputs:
            raise ValueError(
                f"{name}{_item(b)} has label {k} at position {u}, but there are only "
                f"{num_outputs} outputs"
            )
