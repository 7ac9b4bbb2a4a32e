"""Checks of the losses' arguments, with the sentences that they raise.

Checks of shapes, types and devices read no values, so torch.compile can trace them. Checks of
values run inside the operators, and only on the CPU: on a GPU they would wait for it.
"""

from __future__ import annotations

from numbers import Integral

from torch import Tensor

from transduce.kernels.backends import INTEGERS, check_tensors

REDUCTIONS = ("none", "mean", "sum")


# --- Shapes, types and devices ------------------------------------------------------------------


def check_additive_shapes(
    transcription: Tensor,
    prediction: Tensor,
    labels: Tensor,
    num_frames: Tensor,
    num_labels: Tensor,
) -> None:
    """Raise ValueError unless the arguments of `transducer_loss` fit together."""
    tensors = (transcription, prediction, labels, num_frames, num_labels)
    if not all([isinstance(x, Tensor) for x in tensors]):
        check_tensors(transcription=transcription, prediction=prediction, labels=labels)
        check_tensors(num_frames=num_frames, num_labels=num_labels)
    shape, of_prediction = transcription.shape, prediction.shape
    if len(shape) != 3:
        raise ValueError(f"transcription must be [B, T, K+1], not {list(shape)}")
    B, T, K1 = shape
    if len(of_prediction) != 3 or of_prediction[0] != B or of_prediction[2] != K1:
        raise ValueError(
            f"prediction must be [B, U+1, K+1] with B = {B} and K+1 = {K1} as in transcription, "
            f"not {list(of_prediction)}"
        )
    if prediction.dtype != transcription.dtype:
        raise ValueError(
            f"transcription and prediction must have one type, not {transcription.dtype} and "
            f"{prediction.dtype}"
        )
    columns = of_prediction[1]
    _check_numbers_type("transcription", transcription, (B, T, columns, K1))
    _check_device("transcription", transcription, "prediction", prediction)
    _check_labels_shape("labels", labels, B, columns, "prediction")
    for name, integers in (
        ("labels", labels), ("num_frames", num_frames), ("num_labels", num_labels)
    ):  # fmt: skip
        _check_integers(name, integers, "transcription", transcription)
    _check_length_shapes(B, ("num_frames", num_frames), ("num_labels", num_labels))


def check_targets_shape(targets: Tensor, prediction: Tensor) -> None:
    """Raise ValueError unless the targets of a distillation fit the prediction."""
    check_tensors(targets=targets)
    if targets.shape != prediction.shape:
        raise ValueError(
            f"targets must be [B, U+1, K+1] = {list(prediction.shape)} as prediction, not "
            f"{list(targets.shape)}"
        )
    if not targets.is_floating_point():
        raise ValueError(f"targets must be floating-point, not {targets.dtype}")
    _check_device("prediction", prediction, "targets", targets)


def check_joint_shapes(
    logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int
) -> None:
    """Raise ValueError unless the arguments of `rnnt_loss` fit together."""
    check_tensors(logits=logits, targets=targets)
    check_tensors(logit_lengths=logit_lengths, target_lengths=target_lengths)
    if logits.ndim != 4:
        raise ValueError(f"logits must be [B, T, U+1, K+1], not {list(logits.shape)}")
    B, T, columns, K1 = logits.shape
    _check_numbers_type("logits", logits, (B, T, columns, K1))
    _check_labels_shape("targets", targets, B, columns, "logits")
    for name, integers in (
        ("targets", targets), ("logit_lengths", logit_lengths), ("target_lengths", target_lengths)
    ):  # fmt: skip
        _check_integers(name, integers, "logits", logits)
    _check_length_shapes(B, ("logit_lengths", logit_lengths), ("target_lengths", target_lengths))
    if isinstance(blank, bool) or not isinstance(blank, Integral):
        raise TypeError(f"blank must be a whole number, not {blank!r}")
    if not -K1 <= blank < K1:
        raise ValueError(f"blank must be one of the {K1} outputs, not {blank}")


def check_arrow_shapes(
    log_null: Tensor, log_label: Tensor, num_frames: Tensor, num_labels: Tensor
) -> None:
    """Raise ValueError unless the arguments of `lattice_loss` fit together."""
    check_tensors(log_null=log_null, log_label=log_label)
    check_tensors(num_frames=num_frames, num_labels=num_labels)
    if log_null.ndim != 3:
        raise ValueError(f"log_null must be [B, T, U+1], not {list(log_null.shape)}")
    B, T, columns = log_null.shape
    _check_numbers_type("log_null", log_null, (B, T, columns, 2))
    if log_label.ndim != 3 or log_label.shape != (B, T, columns - 1):
        raise ValueError(
            f"log_label must be [B, T, U] = [{B}, {T}, {columns - 1}], because log_null is "
            f"[B, T, U+1] = [{B}, {T}, {columns}]; it is {list(log_label.shape)}"
        )
    if log_label.dtype != log_null.dtype:
        raise ValueError(
            f"log_null and log_label must have one type, not {log_null.dtype} and {log_label.dtype}"
        )
    _check_device("log_null", log_null, "log_label", log_label)
    for name, integers in (("num_frames", num_frames), ("num_labels", num_labels)):
        _check_integers(name, integers, "log_null", log_null)
    _check_length_shapes(B, ("num_frames", num_frames), ("num_labels", num_labels))


def check_mixture_shapes(
    transcription: Tensor,
    prediction: Tensor,
    outputs: Tensor,
    num_frames: Tensor,
    num_outputs: Tensor,
    num_components: int,
) -> None:
    """Raise ValueError unless the arguments of `mixture_loss` fit together."""
    check_tensors(transcription=transcription, prediction=prediction, outputs=outputs)
    check_tensors(num_frames=num_frames, num_outputs=num_outputs)
    if transcription.ndim != 3:
        raise ValueError(f"transcription must be [B, T, P], not {list(transcription.shape)}")
    B, T, P = transcription.shape
    if prediction.ndim != 3 or prediction.shape[0] != B or prediction.shape[2] != P:
        raise ValueError(
            f"prediction must be [B, U+1, P] with B = {B} and P = {P} as in transcription, not "
            f"{list(prediction.shape)}"
        )
    columns = prediction.shape[1]
    if outputs.ndim != 3 or outputs.shape[:2] != (B, columns - 1) or outputs.shape[2] < 1:
        raise ValueError(
            f"outputs must be [B, U, D] = [{B}, {columns - 1}, D], because prediction has U+1 = "
            f"{columns}; it is {list(outputs.shape)}"
        )
    M, D = num_components, outputs.shape[2]
    if M < 1:
        raise ValueError(f"num_components must be at least 1, not {M}")
    rest = P - (1 + M) - 2 * M * D
    if rest < 0 or rest % (1 + M):
        raise ValueError(
            f"transcription must have P = (1 + M) (1 + R) + 2 M D = {1 + M} (1 + R) + {2 * M * D} "
            f"numbers a vector for {M} components over outputs of D = {D}, not {P}"
        )
    _check_numbers_type("transcription", transcription, (B, T, columns, P))
    for name, numbers in (("prediction", prediction), ("outputs", outputs)):
        if numbers.dtype != transcription.dtype:
            raise ValueError(
                f"transcription and {name} must have one type, not {transcription.dtype} and "
                f"{numbers.dtype}"
            )
        _check_device("transcription", transcription, name, numbers)
    for name, integers in (("num_frames", num_frames), ("num_outputs", num_outputs)):
        _check_integers(name, integers, "transcription", transcription)
    _check_length_shapes(B, ("num_frames", num_frames), ("num_outputs", num_outputs))


def check_lattice_shapes(log_null: Tensor, log_label: Tensor) -> None:
    """Raise ValueError unless the arrows of one utterance, [T, U+1] and [T, U], fit together."""
    check_tensors(log_null=log_null, log_label=log_label)
    if log_null.ndim != 2 or log_null.shape[0] == 0:
        raise ValueError(f"log_null must be [T, U+1] with T >= 1, not {list(log_null.shape)}")
    T, columns = log_null.shape
    if columns == 0 or log_label.shape != (T, columns - 1):
        raise ValueError(
            f"log_label must be [T, U] = [{T}, {columns - 1}], because log_null is [T, U+1] = "
            f"[{T}, {columns}]; it is {list(log_label.shape)}"
        )


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless the reduction is a known one."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be none, mean or sum, not {reduction!r}")


def _check_numbers_type(name: str, numbers: Tensor, sizes: tuple[int, int, int, int]) -> None:
    B, T, columns, K1 = sizes
    if B == 0 or T == 0 or columns == 0 or K1 < 2:
        raise ValueError(f"{name} must have at least one item, one frame and two outputs")
    if not numbers.is_floating_point():
        raise ValueError(f"{name} must be floating-point, not {numbers.dtype}")


def _check_integers(name: str, integers: Tensor, first_name: str, first: Tensor) -> None:
    if integers.dtype not in INTEGERS:
        raise ValueError(f"{name} must be integers, not {integers.dtype}")
    _check_device(first_name, first, name, integers)


def _check_device(first_name: str, first: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.device != first.device:
        raise ValueError(
            f"all tensors must be on one device, but {first_name} is on {first.device} and "
            f"{name} on {tensor.device}"
        )


def _check_labels_shape(name: str, labels: Tensor, B: int, columns: int, of: str) -> None:
    if labels.ndim != 2 or labels.shape != (B, columns - 1):
        raise ValueError(
            f"{name} must be [B, U] = [{B}, {columns - 1}], because {of} has U+1 = {columns}; it "
            f"is {list(labels.shape)}"
        )


def _check_length_shapes(B: int, *lengths: tuple[str, Tensor]) -> None:
    for name, tensor in lengths:
        if tensor.ndim != 1 or tensor.shape[0] != B:
            raise ValueError(f"{name} must be [B] = [{B}], not {list(tensor.shape)}")


# --- Values -------------------------------------------------------------------------------------


def check_lengths(name: str, lengths: Tensor, least: int, most: int) -> None:
    """Raise ValueError for the first length that is not between `least` and `most`."""
    for b, length in enumerate(lengths.tolist()):
        if not least <= length <= most:
            raise ValueError(f"{name}[{b}] must be between {least} and {most}, not {length}")


def check_numbers(name: str, b: int | None, numbers: Tensor) -> None:
    """Raise ValueError for the first NaN or +inf of item b."""
    bad = (numbers.isnan() | numbers.isposinf()).nonzero()
    if len(bad):
        where = bad[0].tolist()
        value = "NaN" if numbers[tuple(where)].isnan() else "+inf"
        raise ValueError(f"{name}{_item(b)} has {value} at {where}; it must be finite, or -inf")


def check_labels(name: str, b: int | None, labels: Tensor, num_outputs: int, null: int) -> None:
    """Raise ValueError for the first label of item b that is null or no output."""
    for u, k in enumerate(labels.tolist()):
        if k == null:
            raise ValueError(
                f"{name}{_item(b)} has the null symbol, {null}, at position {u}; labels are the "
                "other outputs"
            )
        if not 0 <= k < num_outputs:
            raise ValueError(
                f"{name}{_item(b)} has label {k} at position {u}, but there are only "
                f"{num_outputs} outputs, counted from 0"
            )


def _item(b: int | None) -> str:
    return "" if b is None else f" of item {b}"
