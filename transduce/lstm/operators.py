"""The LSTM layer of the compiled backends as PyTorch operators.

`transduce::lstm_layer` and `transduce::lstm_layer_backward` are opaque to torch.compile: their fake
kernels give the shapes of the results, and `torch.library` derives the autograd formula.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from transduce.kernels.backends import have_addresses, is_traced
from transduce.kernels.nvrtc import tf32_enabled
from transduce.lstm.reference import cast


class Kernels(Protocol):
    """A module of compiled kernels: `lstm.cpu` or `lstm.cuda`.

    Both functions compute in float32 or float64; `lstm.cpu` documents arguments and results.
    """

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None,
        input_weights: Tensor,
        hidden_weights: Tensor,
        peepholes: Tensor,
        biases: Tensor,
        h: Tensor | None,
        s: Tensor | None,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...

    def backward(
        self,
        grad_output: Tensor | None,
        grad_last_h: Tensor | None,
        grad_last_s: Tensor | None,
        x: Tensor,
        lengths: Tensor | None,
        input_weights: Tensor,
        hidden_weights: Tensor,
        peepholes: Tensor,
        biases: Tensor,
        h: Tensor | None,
        s: Tensor | None,
        output: Tensor,
        gates: Tensor,
        states: Tensor,
        with_x: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


def kernels(backend: str) -> Kernels:
    """Import the kernels of "cpu" or "cuda" when they are first used."""
    if backend == "cuda":
        import transduce.lstm.cuda

        return transduce.lstm.cuda
    import transduce.lstm.cpu

    return transduce.lstm.cpu


def layer(
    x: Tensor,  # [B, N, I], or ids [B, N]
    lengths: Tensor | None,  # [B]; None: all N
    input_weights: Tensor,  # [D, 4 H, I]
    hidden_weights: Tensor,  # [D, 4 H, H]
    peepholes: Tensor,  # [D, 3, H]
    biases: Tensor,  # [D, 4 H]
    h: Tensor | None,  # [D, B, H], the state before the first frame; None: zero
    s: Tensor | None,  # [D, B, H]
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of D directions; return its outputs [B, N, D H] and last h and s [D, B, H]."""
    tensors = (x, lengths, input_weights, hidden_weights, peepholes, biases, h, s)
    with_gradients = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
    call: Any = run
    if is_traced(biases):
        call = lstm_layer
    elif with_gradients:
        # Inside torch.func even the results of plain tensors have no address.
        plain = have_addresses(x.detach(), biases.detach())
        call = _DirectLayer.apply if plain else _EagerLayer.apply
    output, last_h, last_s, *_ = call(
        *tensors, backend, with_gradients, product_type_for(biases, backend)
    )
    return output, last_h, last_s


def product_type_for(biases: Tensor, backend: str) -> torch.dtype | None:
    """Return the type of the numbers that tensor cores may multiply, or None if they may not.

    It is that of autocast, or else of the weights. float32 stands for TF32.
    """
    if backend != "cuda" or biases.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else biases.dtype


def on_tensor_cores(product_type: torch.dtype | None, biases: Tensor) -> bool:
    """Return whether the products run on tensor cores: if asked for, and if the GPU can.

    TF32 is asked for by PyTorch's switch. torch.compile cannot read it, but compiles again when it
    changes, so that the operator and its fake kernel may.
    """
    if product_type is None or (product_type == torch.float32 and not tf32_enabled()):
        return False
    import transduce.lstm.tensor_cores

    D, columns = (int(size) for size in biases.shape)  # the sizes may be symbolic
    H, size, device = columns // 4, product_type.itemsize, biases.get_device()
    return transduce.lstm.tensor_cores.fits(H, D, size, device)


def run(
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    backend: str,
    with_gradients: bool,
    product_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one layer; return its output, last h and last s, then three tensors for the backward op.

    These are the gates, the states and, if the weights are half precision, the output in float32.
    They are empty unless `with_gradients`. If tensor cores multiply numbers of `product_type`, the
    last tensor is h(n-1) at each frame [B, N, D, padded H].
    """
    check_values(x, lengths, input_weights.shape[2])
    weights = (input_weights, hidden_weights, peepholes, biases)
    if product_type is not None and on_tensor_cores(product_type, biases):
        import transduce.lstm.tensor_cores

        output, last_h, last_s, gates, states, before = transduce.lstm.tensor_cores.forward(
            x, lengths, *weights, h, s, with_gradients, product_type
        )
        last_h, last_s = (cast(part, biases.dtype) for part in (last_h, last_s))
        return cast(output, biases.dtype), last_h, last_s, gates, states, before
    *results, gates, states = kernels(backend).forward(x, lengths, *weights, h, s, with_gradients)
    exact = (
        results[0] if results[0].dtype != biases.dtype and with_gradients else gates.new_empty(0)
    )
    output, last_h, last_s = (cast(result, biases.dtype) for result in results)
    return output, last_h, last_s, gates, states, exact


lstm_layer = torch.library.custom_op("transduce::lstm_layer", run, mutates_args=())


@lstm_layer.register_fake
def _(
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    backend: str,
    with_gradients: bool,
    product_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, N), (D, _, H) = x.shape[:2], peepholes.shape
    dtype = torch.promote_types(biases.dtype, torch.float32)
    kept = N if with_gradients else 0
    results = biases.new_empty(B, N, D * H), biases.new_empty(D, B, H), biases.new_empty(D, B, H)
    exact = biases.new_empty(
        (B, N, D * H) if dtype != biases.dtype and with_gradients else (0,), dtype=dtype
    )
    if product_type is not None and on_tensor_cores(product_type, biases):
        import transduce.lstm.tensor_cores

        H = transduce.lstm.tensor_cores.padded(int(H))
        exact = biases.new_empty(B, kept, D, H, dtype=product_type)
    return (
        *results,
        biases.new_empty(B, kept, D, 4 * H, dtype=dtype),
        biases.new_empty(B, kept, D, H, dtype=dtype),
        exact,
    )


def run_backward(
    grad_output: Tensor | None,
    grad_last_h: Tensor | None,
    grad_last_s: Tensor | None,
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    output: Tensor,
    gates: Tensor,
    states: Tensor,
    backend: str,
    with_x: bool,
    product_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty unless `with_x`), the four weights, the first h and s.

    `output` is the last tensor that `run` kept, or its output if that is empty.
    """
    weights = (input_weights, hidden_weights, peepholes, biases)
    tensors = (
        grad_output, grad_last_h, grad_last_s, x, lengths, *weights, h, s, output, gates, states,
    )  # fmt: skip
    if product_type is not None and output.ndim == 4:  # what `run` kept, whatever the switch is now
        import transduce.lstm.tensor_cores

        grad_x, *grads = transduce.lstm.tensor_cores.backward(*tensors, with_x, product_type)
    else:
        grad_x, *grads = kernels(backend).backward(*tensors, with_x)
    inputs, hidden, peep, bias, first_h, first_s = (
        cast(grad, biases.dtype if tensor is None else tensor.dtype)
        for grad, tensor in zip(grads, (*weights, h, s), strict=True)
    )
    grad_x = biases.new_empty(0) if grad_x is None else cast(grad_x, x.dtype)
    return grad_x, inputs, hidden, peep, bias, first_h, first_s


lstm_layer_backward = torch.library.custom_op(
    "transduce::lstm_layer_backward", run_backward, mutates_args=()
)


@lstm_layer_backward.register_fake
def _(
    grad_output: Tensor | None,
    grad_last_h: Tensor | None,
    grad_last_s: Tensor | None,
    x: Tensor,
    lengths: Tensor | None,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor | None,
    s: Tensor | None,
    output: Tensor,
    gates: Tensor,
    states: Tensor,
    backend: str,
    with_x: bool,
    product_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    D, B, H = len(peepholes), len(x), peepholes.shape[2]
    grad_x = x.new_empty(x.shape) if with_x else biases.new_empty(0)
    weights = (input_weights, hidden_weights, peepholes, biases)
    inputs, hidden, peep, bias = (tensor.new_empty(tensor.shape) for tensor in weights)
    first_h, first_s = (
        (biases if tensor is None else tensor).new_empty(D, B, H) for tensor in (h, s)
    )
    return grad_x, inputs, hidden, peep, bias, first_h, first_s


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[3:])
    _keep(ctx, inputs, output)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the gradients need."""
    result, _, _, gates, states, exact = output
    ctx.set_materialize_grads(False)
    product_type = inputs[10] if len(inputs) > 10 else None
    if result.dtype != gates.dtype or exact.ndim == 4:
        result = exact
    ctx.save_for_backward(*inputs[:8], result, gates, states)
    ctx.backend, ctx.product_type = inputs[8], product_type


def _differentiate(
    ctx: Any, *upstream: Tensor | None, direct: bool = False
) -> tuple[Tensor | None, ...]:
    with_x, saved = ctx.needs_input_grad[0], ctx.saved_tensors
    call: Any = _EagerBackward.apply
    if is_traced(saved[5]):
        call = lstm_layer_backward
    elif direct and not torch.is_grad_enabled():  # `_EagerBackward` refuses second derivatives
        plain = have_addresses(*(part for part in upstream[:3] if part is not None))
        call = run_backward if plain else call
    grad_x, *grads = call(*upstream[:3], *saved, ctx.backend, with_x, ctx.product_type)
    state = (None, None) if saved[6] is None else grads[4:]
    return grad_x if with_x else None, None, *grads[:4], *state, None, None, None


def _refuse(ctx: Any, *upstream: Any) -> Any:
    raise RuntimeError(
        "the LSTM's kernels cannot be differentiated twice; use the backend 'eager' or 'reference'"
    )


lstm_layer.register_autograd(_differentiate, setup_context=_save)
lstm_layer_backward.register_autograd(_refuse)


class _DirectLayer(torch.autograd.Function):
    """The layer with its autograd formula, for calls that nothing compiles or transforms.

    Without what torch.func needs, a call takes half the time.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        outputs = run(*inputs)
        _keep(ctx, inputs, outputs)
        return outputs[:3]

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return _differentiate(ctx, *upstream, direct=True)


class _EagerLayer(torch.autograd.Function):
    """The layer with its autograd formula for the transforms of torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return run(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return _differentiate(ctx, *upstream)


class _EagerBackward(torch.autograd.Function):
    """The layer's gradients, as a Function of their own for the transforms of torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return run_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        _refuse(ctx)


def check_values(x: Tensor, lengths: Tensor | None, input_size: int) -> None:
    """Raise ValueError if a length or an id is out of range. Tensors on a GPU are not read."""
    if x.device.type != "cpu":
        return
    N = x.shape[1]
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            if not 0 <= length <= N:
                raise ValueError(f"lengths[{b}] must be between 0 and {N}, not {length}")
    if x.ndim == 2:
        outside = (x < 0) | (x > input_size)
        if lengths is not None:
            outside &= torch.arange(N) < lengths[:, None]
        if outside.any():
            b, n = outside.nonzero()[0].tolist()
            raise ValueError(
                f"x has id {int(x[b, n])} at position {n} of item {b}; ids are 0 to {input_size}"
            )
