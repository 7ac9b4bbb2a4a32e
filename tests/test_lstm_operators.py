"""The LSTM's PyTorch operators: torch.compile, functorch, autocast, activation checkpointing."""

from functools import lru_cache

import pytest
import torch
from lstms import problem
from slow import slow_except
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from transduce import PeepholeLSTM, Transducer
from transduce.lstm import cpu, operators, tensor_cores
from transduce.lstm.operators import lstm_layer, lstm_layer_backward


@pytest.fixture(autouse=True)
def forget_compilations():
    yield
    torch._dynamo.reset()


KINDS = {
    "vectors": dict(both=False, ids=False, given=True),
    "both ways": dict(both=True, ids=False, given=True),
    "ids": dict(both=True, ids=True, given=True),
    "no lengths and no state": dict(both=True, ids=False, given=False),
}


def arguments(both, ids, given, dtype=torch.float32):
    """The tensors of one call of `lstm_layer`."""
    model, x, lengths, state, _ = problem(3, 4, 5, 6, 1, both, [4, 2, 0], ids)
    weights = [w.detach().to(dtype).requires_grad_() for w in model.layers[0].weights()]
    x = x if ids else x.to(dtype).requires_grad_()
    state = [part.to(dtype).requires_grad_() for part in state] if given else [None, None]
    return x, lengths if given else None, *weights, *state


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_operator_is_registered_as_it_behaves(kind, with_gradients):
    tensors = arguments(**kind)
    if not with_gradients:
        tensors = [None if t is None else t.detach() for t in tensors]
    torch.library.opcheck(lstm_layer, (*tensors, "cpu", with_gradients))


@pytest.mark.parametrize("dtype", slow_except({0}, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("kind", slow_except({1}, KINDS.values()), ids=KINDS)
def test_the_backward_operator_is_registered_as_it_behaves(kind, dtype):
    tensors = [None if t is None else t.detach() for t in arguments(**kind, dtype=dtype)]
    output, h, s, gates, states, exact = lstm_layer(*tensors, "cpu", True)
    output = output if output.dtype == gates.dtype else exact
    for upstream in ((torch.ones_like(output), h, s), (None, h, None)):
        for with_x in {False, not kind["ids"]}:
            backward = (*upstream, *tensors, output, gates, states, "cpu", with_x)
            torch.library.opcheck(lstm_layer_backward, backward)


@pytest.fixture
def tensor_cores_on_the_cpu(monkeypatch):
    """Let the kernels for tensor cores be those of the CPU, with padded units."""

    def pad(tensor, units, dtype=torch.float32):
        return torch.nn.functional.pad(tensor, (0, tensor_cores.padded(units) - units)).to(dtype)

    def forward(*arguments):
        *arguments, dtype = arguments
        output, h, s, gates, states = cpu.forward(*arguments)
        (B, N, D), H = gates.shape[:3], gates.shape[3] // 4
        gates = pad(gates.view(B, N, D, 4, H), H).flatten(3)
        before = output[:, :N].view(B, N, D, H)
        return output, h, s, gates, pad(states, H), pad(before, H, dtype)

    def backward(*arguments):
        *tensors, output, gates, states, with_x, _ = arguments
        H = tensors[7].shape[2]
        gates = gates.unflatten(3, (4, -1))[..., :H].flatten(3)
        output = output[..., :H].flatten(2).float()
        # A view with other strides would compile the kernel once more.
        return cpu.backward(*tensors, output, gates, states[..., :H].contiguous(), with_x)

    monkeypatch.setattr(operators, "tf32_enabled", lambda: True)
    monkeypatch.setattr(tensor_cores, "fits", lru_cache(lambda H, D, size, device: True))
    monkeypatch.setattr(tensor_cores, "forward", forward)
    monkeypatch.setattr(tensor_cores, "backward", backward)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", slow_except({0}, [torch.bfloat16, torch.float32]))
def test_the_operator_on_tensor_cores_is_registered_as_it_behaves(
    dtype, kind, tensor_cores_on_the_cpu
):
    tensors = arguments(**kind)
    torch.library.opcheck(lstm_layer, (*tensors, "cpu", True, dtype))
    without = [None if t is None else t.detach() for t in tensors]
    torch.library.opcheck(lstm_layer, (*without, "cpu", False, dtype))


def test_a_switch_of_tf32_between_the_passes_does_no_harm(tensor_cores_on_the_cpu, monkeypatch):
    tensors = arguments(**KINDS["both ways"])
    for first, second in ((True, False), (False, True)):
        monkeypatch.setattr(operators, "tf32_enabled", lambda on=first: on)
        output, *_ = operators._EagerLayer.apply(*tensors, "cpu", True, torch.float32)
        monkeypatch.setattr(operators, "tf32_enabled", lambda on=second: on)
        output.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_parameters_choose_half_precision_on_a_gpu_alone(dtype, monkeypatch):
    single, double = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.float64)
    assert operators.product_type_for(single, "cuda") == torch.float32
    assert operators.product_type_for(single.to(dtype), "cuda") == dtype
    assert operators.product_type_for(single.to(dtype), "cpu") is None
    # PyTorch does not enable CUDA's autocast where there is no GPU.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: dtype)
    assert operators.product_type_for(single, "cuda") == dtype
    assert operators.product_type_for(double, "cuda") is None
    assert operators.product_type_for(single, "cpu") is None


def test_float32_is_multiplied_on_tensor_cores_only_if_tf32_is_enabled(monkeypatch):
    monkeypatch.setattr(tensor_cores, "fits", lru_cache(lambda H, D, size, device: True))
    biases, before = torch.zeros(1, 4), torch.backends.cuda.matmul.fp32_precision
    try:
        for switch in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = switch
            assert operators.on_tensor_cores(torch.float32, biases) == (switch == "tf32")
            assert operators.on_tensor_cores(torch.bfloat16, biases)
            assert not operators.on_tensor_cores(None, biases)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def batch(ids=False):
    frames = torch.randint(0, 7, (3, 5)) if ids else torch.randn(3, 5, 6)
    return frames, torch.tensor([5, 3, 4]), torch.tensor([[1, 4, 2], [3, 0, 0], [2, 2, 0]])


def loss_and_gradients(model, call, *tensors):
    f, g, _ = call(*tensors)
    loss = f.square().sum() + g.square().sum()
    return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, as it traces
@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.slow
def test_a_compiled_transducer_computes_the_same(ids):
    torch.manual_seed(0)
    model = Transducer(6, 4, 9, num_layers=2, pooling=2, embedding_size=3 if ids else 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tensors = batch(ids)
    expected = loss_and_gradients(model, model, *tensors)
    assert_close(loss_and_gradients(model, compiled, *tensors), expected)
    with torch.no_grad():
        assert_close(compiled(*tensors), model(*tensors))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_lstm_takes_any_batch_and_state():
    model = PeepholeLSTM(4, 6, 2, True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, N in ((2, 5), (3, 7)):
        x, lengths = torch.randn(B, N, 4), torch.tensor([N, 2, 3][:B])
        state = torch.randn(4, B, 6), torch.randn(4, B, 6)
        for rest in ((), (lengths,), (lengths, state)):
            assert_close(compiled(x, *rest), model(x, *rest))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_the_backends_without_an_operator_compile_too(backend):
    model, x, lengths = PeepholeLSTM(4, 6), torch.randn(2, 3, 4), torch.tensor([3, 2])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(x, lengths, backend=backend)
        assert_close(found, model(x, lengths, backend=backend))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the code generator's
def test_generated_code_computes_the_same():
    torch.manual_seed(0)
    model = Transducer(6, 4, 9, num_layers=2)
    tensors = batch()
    compiled = torch.compile(model, fullgraph=True)
    expected = loss_and_gradients(model, model, *tensors)
    assert_close(loss_and_gradients(model, compiled, *tensors), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "x, lengths, message",
    [
        (torch.zeros(2, 3, 4), torch.tensor([3, 4]), r"lengths\[1\] .* 0 and 3, not 4"),
        (torch.tensor([[1, 2], [4, 5]]), None, "id 5 at position 1 of item 1; ids are 0 to 4"),
    ],
    ids=["length", "id"],
)
def test_a_compiled_lstm_refuses_values_out_of_range(x, lengths, message):
    compiled = torch.compile(PeepholeLSTM(4, 6), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=message):
        compiled(x, lengths)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_transducer_refuses_labels_out_of_range():
    compiled = torch.compile(Transducer(6, 4, 5), fullgraph=True, backend="aot_eager")
    frames, num_frames, labels = batch()
    labels[1, 0] = 41
    with pytest.raises(ValueError, match="id 41 at position 1 of item 1; ids are 0 to 4"):
        compiled(frames, num_frames, labels)


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_functorch_differentiates_the_transducer(ids):
    model, tensors = Transducer(6, 4, 5).double(), batch(ids)
    tensors = (tensors[0] if ids else tensors[0].double(), *tensors[1:])
    weights = {name: w.detach() for name, w in model.named_parameters()}

    def loss(weights):
        f, g, _ = torch.func.functional_call(model, weights, tensors)
        return f.square().sum() + g.square().sum()

    found = torch.func.grad(loss)(weights)
    _, *expected = loss_and_gradients(model, model, *tensors)
    assert_close(list(found.values()), expected)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.func.grad(lambda w: sum(g.sum() for g in torch.func.grad(loss)(w).values()))(weights)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    model = PeepholeLSTM(4, 6, 2, True)
    x, lengths = torch.randn(3, 5, 4, requires_grad=True), torch.tensor([5, 0, 3])
    inputs = [x, *model.parameters()]
    output, state = model(x, lengths)
    expected = torch.autograd.grad(output.square().sum() + state[1].sum(), inputs)

    def flat(*arguments):  # a reentrant checkpoint sees no tensors inside of tuples
        output, state = model(*arguments)
        return output, *state

    output, *state = checkpoint(flat, x, lengths, use_reentrant=reentrant)
    for tensor in inputs:
        tensor.grad = None
    (output.square().sum() + state[1].sum()).backward()
    assert_close([tensor.grad for tensor in inputs], list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("embedding_size", [0, 3])
def test_autocast_leaves_results_and_gradients_in_their_types(embedding_size):
    torch.manual_seed(0)
    model = PeepholeLSTM(4, 6, 2, True, embedding_size=embedding_size)
    x = torch.randn(3, 5, 4, requires_grad=True)
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x)[0].square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = model(x)
        found = torch.autograd.grad(output.square().sum(), inputs)
    assert output.dtype == torch.float32
    exact = embedding_size == 0  # autocast rounds the product with the embedding alone
    for ours, theirs in zip(found, expected, strict=True):
        bound = 0 if exact else 0.05 * float(theirs.abs().max())
        assert_close(ours, theirs, rtol=0, atol=bound)


def test_differentiating_twice_is_refused():
    model, x = PeepholeLSTM(4, 6), torch.randn(2, 3, 4, requires_grad=True)
    [grad] = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()
