"""The peephole LSTM: Eqs. 4-8 by hand, gradients, and every backend against the reference."""

from math import exp, tanh

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lstms import (
    SHAPES,
    assert_as_exact_as_the_reference,
    assert_same_bits,
    problem,
    results,
)
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from transduce import PeepholeLSTM
from transduce.kernels.backends import resolve
from transduce.kernels.simd.products import DEPTH, pack
from transduce.lstm import cpu, reference
from transduce.lstm.cpu import PackedLSTM

KERNELS = ["cpu"]  # test_gpu.py tests those of a GPU
FAST = ["eager", *KERNELS]
BACKENDS = ["reference", *FAST]


# --- The equations ------------------------------------------------------------------------------


def steps_by_hand(x, h, s, input_weights, hidden_weights, peepholes, biases):
    """Compute all h(n) and s(n) one number at a time; gates are in the order α, β, s, γ."""
    H, results = len(h), []
    for frame in x:

        def weighted(gate, j, frame=frame, h=h):
            row = gate * H + j
            from_input = sum(w * v for w, v in zip(input_weights[row], frame, strict=True))
            from_hidden = sum(w * v for w, v in zip(hidden_weights[row], h, strict=True))
            return from_input + from_hidden + biases[row]

        new_h, new_s = [], []
        for j in range(H):
            input_gate = 1 / (1 + exp(-(weighted(0, j) + peepholes[0][j] * s[j])))  # Eq. 4
            forget_gate = 1 / (1 + exp(-(weighted(1, j) + peepholes[1][j] * s[j])))  # Eq. 5
            new_s.append(forget_gate * s[j] + input_gate * tanh(weighted(2, j)))  # Eq. 6
            output_gate = 1 / (1 + exp(-(weighted(3, j) + peepholes[2][j] * new_s[j])))  # Eq. 7
            new_h.append(output_gate * tanh(new_s[j]))  # Eq. 8
        h, s = new_h, new_s
        results.append((h, s))
    return results


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_is_equations_4_to_8(backend):
    model, x, lengths, state, upstream = problem(1, 3, 2, 3)
    weights = [w[0].tolist() for w in model.layers[0].weights()]
    steps = steps_by_hand(x[0].tolist(), *(part[0, 0].tolist() for part in state), *weights)
    found = results(backend, torch.float64, model, x, lengths, state, upstream)
    assert_close(found["output"][0], torch.tensor([h for h, _ in steps], dtype=torch.float64))
    assert_close(found["s"][0, 0], torch.tensor(steps[-1][1], dtype=torch.float64))


def test_the_reference_step_is_equations_4_to_8():
    model, x, _, (h, s), _ = problem(1, 1, 2, 3)
    input_weights, hidden_weights, peepholes, biases = (w[0] for w in model.layers[0].weights())
    inputs = x[:, 0] @ input_weights.T + biases
    found = reference.step(inputs, h[0], s[0], hidden_weights, peepholes)
    weights = [w.tolist() for w in (input_weights, hidden_weights, peepholes, biases)]
    [by_hand] = steps_by_hand(x[0].tolist(), h[0, 0].tolist(), s[0, 0].tolist(), *weights)
    for part, expected in zip(found, by_hand, strict=True):
        assert_close(part[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.parametrize("layers, both", [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_agree_with_differences(backend, layers, both, ids):
    model, x, lengths, state, _ = problem(3, 3, 2, 2, layers, both, lengths=[2, 3, 1], ids=ids)
    inputs = [*state, *model.parameters()] + ([] if ids else [x])
    for tensor in inputs:
        tensor.requires_grad_()

    def call(*_):
        output, last = model(x, lengths, state, backend=backend)
        return output, *last

    # PyTorch differentiates the other backends, so there one random direction is enough.
    assert gradcheck(call, inputs, fast_mode=backend not in KERNELS)


# --- Parity -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_agree_with_the_reference(backend, shape):
    assert_as_exact_as_the_reference(backend, *problem(*shape))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("B", range(1, 21))
def test_every_batch_size_agrees_with_the_reference(backend, B):
    lengths = [1 + 5 * b % 4 for b in range(B)]
    assert_as_exact_as_the_reference(backend, *problem(B, 4, 3, 20, 1, B % 2 == 0, lengths))


# The examples are the same every time: the rule compares two rounding errors, and in about one of
# three thousand shapes a backend as exact as the reference breaks it by chance.
@st.composite
def problems(draw):
    B, N = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(0, N), min_size=B, max_size=B))
    sizes = draw(st.integers(1, 20)), draw(st.integers(1, 40)), draw(st.integers(1, 3))
    both, ids = draw(st.booleans()), draw(st.booleans())
    return problem(B, N, *sizes, both, lengths, ids, draw(st.integers(0, 99)))


@pytest.mark.parametrize("backend", FAST)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(problems())
def test_any_shape_agrees_with_the_reference(backend, arguments):
    assert_as_exact_as_the_reference(backend, *arguments)


@pytest.mark.parametrize("integer", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_is_a_one_hot_vector_and_id_0_is_zero(backend, integer):
    model, _, *rest = problem(3, 6, 5, 20, 2, True, [6, 4, 1])
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 5, 0, 1, 2, 2], [2, 0, 0, 0, 0, 0]])
    vectors = torch.eye(6, dtype=torch.float64)[ids, 1:]
    expected = results(backend, torch.float64, model, vectors, *rest)
    found = results(backend, torch.float64, model, ids.to(integer), *rest)
    expected.pop("grad x")
    assert_close(found, expected)


@pytest.mark.parametrize("backend", FAST)
def test_views_of_any_strides_are_taken(backend):
    model, x, lengths, state, upstream = problem(3, 6, 5, 20, 1, True, [6, 4, 1])
    expected = results(backend, torch.float32, model, x, lengths, state, upstream)
    strided = torch.stack([lengths, lengths], dim=1)[:, 0]
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, *state, *upstream)]
    views = turned[0], strided, turned[1:3], turned[3:]
    assert not any(t.is_contiguous() for t in (strided, *turned))
    assert_same_bits(results(backend, torch.float32, model, *views), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_types_agree_with_float32(backend, dtype):
    model, *tensors = problem(3, 6, 5, 20, 2, True, [6, 4, 1])
    x, lengths, state, upstream = tensors
    rounded = x.to(dtype), lengths, [t.to(dtype) for t in state], [t.to(dtype) for t in upstream]
    half = results(backend, dtype, model, *tensors)
    full = results("reference", torch.float32, model.to(dtype), *rounded)
    # Two layers of roundings, six steps of them in the reference.
    spacing = torch.finfo(dtype).eps
    for name, expected in full.items():
        assert half[name].dtype == dtype
        largest = float(expected.abs().max())
        assert_close(half[name].float(), expected, rtol=0, atol=8 * spacing * largest, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", KERNELS)
def test_half_types_are_rounded_only_where_a_layer_ends(backend, dtype):
    model, x, lengths, state, upstream = problem(3, 6, 5, 20, 1, True, [6, 4, 1])
    half = results(backend, dtype, model, x, lengths, state, upstream)
    rounded = x.to(dtype), lengths, [t.to(dtype) for t in state], [t.to(dtype) for t in upstream]
    full = results(backend, torch.float32, model.to(dtype), *rounded)
    assert_same_bits(half, {name: t.to(dtype) for name, t in full.items()})


# --- Ragged batches -----------------------------------------------------------------------------

LENGTHS = [3, 9, 0, 1, 8]


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.parametrize("layers, both", [(1, False), (2, True)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_in_the_padding_changes_nothing(backend, layers, both, ids):
    model, x, lengths, state, upstream = problem(5, 9, 4, 20, layers, both, LENGTHS, ids)
    expected = results(backend, torch.float32, model, x, lengths, state, upstream)
    poisoned = x.clone()
    poisoned[torch.arange(9) >= lengths[:, None]] = 10**6 if ids else torch.nan
    found = results(backend, torch.float32, model, poisoned, lengths, state, upstream)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradients_in_the_padding_change_nothing(backend):
    model, x, lengths, state, (on_output, *on_state) = problem(5, 9, 4, 20, 2, True, LENGTHS)
    expected = results(backend, torch.float32, model, x, lengths, state, (on_output, *on_state))
    changed = on_output.clone()
    changed[torch.arange(9) >= lengths[:, None]] = 7.0
    found = results(backend, torch.float32, model, x, lengths, state, (changed, *on_state))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_and_the_gradient_of_x_are_zero_in_the_padding(backend):
    model, x, lengths, *rest = problem(5, 9, 4, 20, 2, True, LENGTHS)
    found = results(backend, torch.float32, model, x, lengths, *rest)
    padding = torch.arange(9) >= lengths[:, None]
    for name in ("output", "grad x"):
        assert (found[name][padding] == 0).all() and (found[name][~padding] != 0).all()


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "both ways"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_sequence_of_a_batch_is_as_if_alone(backend, both, ids):
    model, x, lengths, state, upstream = problem(5, 9, 4, 33, 2, both, LENGTHS, ids)
    together = results(backend, torch.float32, model, x, lengths, state, upstream)
    sums = {}
    for b, length in enumerate(LENGTHS):
        one, n = slice(b, b + 1), max(length, 1)
        arguments = (
            x[one, :n],
            lengths[one],
            [part[:, one] for part in state],
            [upstream[0][one, :n], upstream[1][:, one], upstream[2][:, one]],
        )
        alone = results(backend, torch.float32, model, *arguments)
        own = {k: together[k][one, :n] for k in ("output", "grad x") if k in together}
        own |= {k: together[k][:, one] for k in ("h", "s", "grad h0", "grad s0")}
        if backend not in KERNELS:  # PyTorch's products depend on the number of rows
            assert_close({k: alone[k] for k in own}, own, rtol=0, atol=1e-6)
        else:
            assert_same_bits(alone, own)
        for name in alone.keys() - own.keys():
            sums[name] = sums.get(name, 0) + alone[name]
    assert len(sums) == 8
    assert_close({name: together[name] for name in sums}, sums, rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_direction_starts_at_each_sequences_own_last_frame(backend):
    model, x, lengths, state, _ = problem(5, 9, 4, 20, 1, True, LENGTHS)
    one_way = PeepholeLSTM(4, 20).double()
    own = [weights[1:] for weights in model.state_dict().values()]
    one_way.load_state_dict(dict(zip(one_way.state_dict(), own, strict=True)))
    output, (h, s) = model(x, lengths, state, backend=backend)
    for b, length in enumerate(LENGTHS):
        if length == 0:
            continue
        first = tuple(part[1:, b : b + 1] for part in state)
        turned, last = one_way(x[b : b + 1, :length].flip(1), state=first, backend=backend)
        assert_close(output[b : b + 1, :length, 20:], turned.flip(1))
        assert_close((h[1:, b : b + 1], s[1:, b : b + 1]), last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_state_is_that_of_each_sequences_last_frame(backend):
    model, x, lengths, state, _ = problem(5, 9, 4, 20, 1, True, LENGTHS)
    output, (h, s) = model(x, lengths, state, backend=backend)
    for b, length in enumerate(LENGTHS):
        if length == 0:
            assert_close((h[:, b], s[:, b]), (state[0][:, b], state[1][:, b]), rtol=0, atol=0)
            continue
        ends = output[b, length - 1, :20], output[b, 0, 20:]
        assert_close(h[:, b], torch.stack(ends), rtol=0, atol=0)
        first = tuple(part[:, b : b + 1] for part in state)
        _, (_, shorter) = model(x[b : b + 1, :length], state=first, backend=backend)
        assert_close(s[:, b], shorter[:, 0])


# --- Layers, steps and threads ------------------------------------------------------------------


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_frame_at_a_time_is_the_whole(backend, ids):
    model, x, _, state, _ = problem(3, 7, 5, 20, 2, ids=ids)
    model = model.float()
    x, state = x if ids else x.float(), tuple(part.float() for part in state)
    whole, last = model(x, state=state, backend=backend)
    for n in range(7):
        output, state = model(x[:, n : n + 1], state=state, backend=backend)
        assert_close(output[:, 0], whole[:, n], rtol=0, atol=1e-6)
    assert_close(state, last, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_layers_are_one_upon_the_other(backend):
    model, x, lengths, (h, s), _ = problem(5, 9, 4, 20, 2, True, LENGTHS)
    parts = [PeepholeLSTM(size, 20, 1, True) for size in (4, 40)]
    for part, layer in zip(parts, model.layers, strict=True):
        part.layers[0] = layer
    between, (lower_h, lower_s) = parts[0](x, lengths, (h[:2], s[:2]), backend=backend)
    output, (upper_h, upper_s) = parts[1](between, lengths, (h[2:], s[2:]), backend=backend)
    last = torch.cat([lower_h, upper_h]), torch.cat([lower_s, upper_s])
    assert_close(model(x, lengths, (h, s), backend=backend), (output, last))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_lengths_and_state_all_frames_count_and_the_state_is_zero(backend):
    model, x, lengths, (h, s), _ = problem(3, 7, 5, 20, 2, True)
    expected = model(x, lengths, (h * 0, s * 0), backend=backend)
    assert_close(model(x, backend=backend), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", FAST)
def test_parts_that_nothing_hangs_on_get_no_gradient(backend):
    model, x, lengths, state, _ = problem(3, 7, 5, 20, 1, True, [7, 3, 5])
    found, expected = (
        torch.autograd.grad(model(x, lengths, state, backend=b)[1][1].sum(), model.parameters())
        for b in (backend, "reference")
    )
    assert_close(found, expected)


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both ways"])
@pytest.mark.parametrize("backend", FAST)
def test_results_are_the_same_from_run_to_run(backend, both):
    arguments = problem(7, 20, 5, 33, 2, both, [20, 3, 11, 0, 17, 20, 8])
    first = results(backend, torch.float32, *arguments)
    for _ in range(3):
        assert_same_bits(results(backend, torch.float32, *arguments), first)


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operator returns."""

    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return result


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.parametrize("backend", KERNELS)
def test_without_gradients_the_results_are_the_same_and_nothing_is_kept(backend, ids):
    B, N, H = 3, 90, 33
    model, x, lengths, state, _ = problem(B, N, 4, H, 2, True, [N, 0, 5], ids)
    with Largest() as with_gradients:
        expected, (h, s) = model(x, lengths, state, backend=backend)
    with torch.no_grad(), Largest() as without:
        found, last = model(x, lengths, state, backend=backend)
    assert_same_bits(
        {"output": found, "h": last[0], "s": last[1]}, {"output": expected, "h": h, "s": s}
    )
    assert with_gradients.size == B * N * 2 * 4 * H  # the gates
    assert without.size == max(B * N * 2 * H, *(w.numel() for w in model.parameters()))


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both ways"])
def test_only_the_weights_gradients_depend_on_the_number_of_threads(set_num_threads, both):
    arguments = problem(7, 20, 5, 33, 2, both, [20, 3, 11, 0, 17, 20, 8])
    found = {}
    for number in (1, 2, 3):
        set_num_threads(number)
        found[number] = results("cpu", torch.float32, *arguments)
    for number in (2, 3):
        of_weights = {name: found[number].pop(name) for name in list(found[number]) if "." in name}
        assert_same_bits(found[number], {name: found[1][name] for name in found[number]})
        assert_close(of_weights, {n: found[1][n] for n in of_weights}, rtol=0, atol=1e-5)


def test_auto_takes_the_cpu_kernels_and_never_the_reference():
    assert resolve("auto", torch.device("cpu")) == "cpu"


# --- The module ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_acts_in_training_and_between_layers_only(backend):
    torch.manual_seed(1)
    plain = PeepholeLSTM(4, 50, 2, True)
    model = PeepholeLSTM(4, 50, 2, True, dropout=0.5)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 6, 4)
    expected, (expected_h, _) = plain(x, backend=backend)
    assert_close(model.eval()(x, backend=backend)[0], expected, rtol=0, atol=0)
    output, (h, _) = model.train()(x, backend=backend)
    assert_close(h[:2], expected_h[:2], rtol=0, atol=0)  # the first layer's
    assert (output != expected).all() and (output != 0).all()  # the second's inputs were dropped

    single = PeepholeLSTM(4, 50, dropout=0.5)
    dropped = single.train()(x, backend=backend)[0]
    assert_close(dropped, single.eval()(x, backend=backend)[0], rtol=0, atol=0)


def test_all_weights_are_uniform_between_minus_and_plus_a_tenth():
    torch.manual_seed(0)
    for name, weights in PeepholeLSTM(26, 128, 2, True).named_parameters():
        values = weights.detach().flatten()
        assert -0.1 <= values.min() < -0.098 and 0.098 < values.max() <= 0.1, name
        for part, share in ((values < -0.05, 0.25), (values < 0, 0.5), (values < 0.05, 0.75)):
            assert abs(part.double().mean() - share) < 0.05, name


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((1, 1), 4 * 3 + 3),
        ((39, 128), 86_400),
        ((26, 128, 1, True), 159_488),
        ((26, 128, 2, True), 159_488 + 2 * (4 * 128 * (256 + 128 + 1) + 3 * 128)),
    ],
)
def test_the_number_of_weights_is_the_papers(sizes, expected):
    assert sum(w.numel() for w in PeepholeLSTM(*sizes).parameters()) == expected


def test_a_state_dict_carries_the_whole_model():
    torch.manual_seed(0)
    model, other = PeepholeLSTM(4, 20, 2, True), PeepholeLSTM(4, 20, 2, True)
    x = torch.randn(3, 6, 4)
    assert not torch.equal(model(x)[0], other(x)[0])
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x)[0], other(x)[0])


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


CALLS = {
    "input size": ((zeros(2, 3, 5),), r"x must be \[B, N, 4\], not \[2, 3, 5\]"),
    "two dimensions": ((zeros(3, 4),), r"x must be \[B, N, 4\], not \[3, 4\]"),
    "dtype": ((zeros(2, 3, 4).double(),), "x is torch.float64, but the weights are torch.float32"),
    "integer vectors": ((zeros(2, 3, 4).long(),), r"x must be ids \[B, N\], not \[2, 3, 4\]"),
    "no sequence": ((zeros(0, 3, 4),), "must have a sequence and a frame"),
    "no frame": ((zeros(2, 0, 4),), "must have a sequence and a frame"),
    "too long": ((zeros(2, 3, 4), torch.tensor([3, 4])), r"lengths\[1\] .* 0 and 3, not 4"),
    "negative": ((zeros(2, 3, 4), torch.tensor([-1, 3])), r"lengths\[0\] .* 0 and 3, not -1"),
    "lengths' shape": ((zeros(2, 3, 4), torch.tensor([3])), r"lengths must be integers \[B\]"),
    "float lengths": ((zeros(2, 3, 4), torch.tensor([3.0, 3.0])), r"lengths must be integers"),
    "large id": ((torch.tensor([[1, 2], [4, 5]]),), "id 5 at position 1 of item 1; ids are 0 to 4"),
    "negative id": ((torch.tensor([[-1, 2]]),), "id -1 at position 0 of item 0"),
    "h": ((zeros(2, 3, 4), None, (zeros(1, 2, 6), zeros(2, 2, 6))), r"h must be \[2, 2, 6\]"),
    "s": ((zeros(2, 3, 4), None, (zeros(2, 2, 6), zeros(2, 3, 6))), r"s must be \[2, 2, 6\]"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arguments, message", CALLS.values(), ids=CALLS)
def test_arguments_that_do_not_go_together_are_refused(backend, arguments, message):
    model = PeepholeLSTM(4, 6, 1, True)
    with pytest.raises(ValueError, match=message):
        model(*arguments, backend=backend)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"input_size": 0}, "input_size must be at least 1, not 0"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), not -0.1"),
    ],
)
def test_sizes_that_make_no_network_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PeepholeLSTM(**{"input_size": 2, "hidden_size": 2} | options)


def test_an_unknown_backend_is_refused():
    model = PeepholeLSTM(2, 2)
    with pytest.raises(ValueError, match="auto, reference, eager, cpu or cuda, not 'numpy'"):
        model(torch.zeros(1, 1, 2), backend="numpy")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frame_that_is_not_a_number_is_not_hidden(backend):
    model = PeepholeLSTM(3, 20)
    x = torch.randn(2, 5, 3)
    x[1, 2, 0] = torch.nan
    output, (h, s) = model(x, backend=backend)
    broken = torch.tensor([[False] * 5, [False, False, True, True, True]])
    assert torch.equal(output.isnan().all(2), broken)
    assert torch.equal(output.isnan().any(2), broken)
    assert h[0, 1].isnan().all() and s[0, 1].isnan().all() and not h[0, 0].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_autocast_rounded_may_come_before_it(backend):
    model = PeepholeLSTM(3, 4)
    x = torch.randn(2, 5, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = model(x, backend=backend)
    assert output.dtype == torch.float32
    assert_close(output, model(x.float(), backend=backend)[0], rtol=2e-2, atol=2e-3)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, but the weights are"):
        model(x, backend=backend)


# --- Embeddings ---------------------------------------------------------------------------------


def embedded_and_folded():
    """Return an LSTM with an embedding, and an equal one whose input weights include it."""
    model = PeepholeLSTM(4, 5, 2, True, embedding_size=3).double()
    folded = PeepholeLSTM(4, 5, 2, True).double()
    weights = model.state_dict()
    embedding = weights.pop("layers.0.embedding")
    weights["layers.0.input_weights"] = weights["layers.0.input_weights"] @ embedding.mT
    folded.load_state_dict(weights)
    return model, folded


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_ids", [True, False])
def test_an_embedding_is_a_factor_of_the_input_weights(backend, as_ids):
    model, folded = embedded_and_folded()
    ids = torch.tensor([[1, 4, 0, 2], [3, 2, 0, 0]])
    one_hot = torch.nn.functional.one_hot(ids, 5)[..., 1:].double()
    lengths = torch.tensor([4, 2])
    x = ids if as_ids else one_hot
    found, state = model(x, lengths, backend=backend)
    expected, expected_state = folded(x, lengths, backend=backend)
    assert_close(found, expected)
    assert_close(state, expected_state)
    found.square().sum().backward()
    expected.square().sum().backward()
    first, plain = model.layers[0], folded.layers[0].input_weights.grad
    assert_close(first.embedding.grad, (plain.mT @ first.input_weights).sum(0))
    assert_close(first.input_weights.grad, plain @ first.embedding)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_acts_on_embeddings_in_training_alone(backend):
    """Each of a letter's three numbers is either dropped or doubled, at random in every call."""
    model = PeepholeLSTM(4, 5, dropout=0.5, embedding_size=3).double()
    embedding = model.layers[0].embedding
    letter = torch.tensor([[2]])
    with torch.no_grad():
        whole, before = model.eval()(letter, backend=backend)[0], embedding.clone()
        possible = []
        for kept in torch.cartesian_prod(*[torch.tensor([0.0, 2.0])] * 3):
            embedding[1] = before[1] * kept
            possible.append(model(letter, backend=backend)[0])
            embedding[1] = before[1]
        assert torch.equal(model(letter, backend=backend)[0], whole)
        model.train()
        drawn = set()
        for seed in range(40):
            torch.manual_seed(seed)
            found = model(letter, backend=backend)[0]
            differences = [float((found - one).abs().max()) for one in possible]
            assert min(differences) < 1e-12
            drawn.add(differences.index(min(differences)))
    assert len(drawn) == 8


def test_a_negative_embedding_is_refused():
    with pytest.raises(ValueError, match="embedding_size must be at least 0, not -1"):
        PeepholeLSTM(4, 5, embedding_size=-1)


# --- Packed layers ------------------------------------------------------------------------------


def in_int8(lstm):
    """Set the matrices of an LSTM to int8 numbers times powers of two."""
    with torch.no_grad():
        for layer in lstm.layers:
            for matrix in (layer.input_weights, layer.hidden_weights):
                integers = torch.randint(-127, 128, matrix.shape)
                integers[..., 0] = 127
                scale = 2.0 ** torch.randint(-12, -6, (*matrix.shape[:2], 1))
                matrix.copy_(integers * scale)
    return lstm


def packed_types(packed):
    return [(str(layer.panels.dtype), str(layer.hidden.dtype)) for layer in packed.layers]


def assert_packed_is_the_layer(lstm, B, N=9):
    """Compare a `PackedLSTM` in two calls with the kernel of whole sequences; return it."""
    packed = PackedLSTM(layer.weights() for layer in lstm.layers)
    dtype = lstm.layers[0].biases.dtype
    x = torch.randn(B, N, lstm.input_size, dtype=dtype)
    lengths = torch.randint(5, N + 1, (B,))
    whole, _ = lstm(x, lengths, backend="cpu")
    zeros = torch.zeros(lstm.num_layers, B, lstm.hidden_size, dtype=dtype).numpy()
    first, state = packed(
        x[:, :4].contiguous().numpy(), torch.full((B,), 4).numpy(), (zeros, zeros)
    )
    second, _ = packed(x[:, 4:].contiguous().numpy(), (lengths - 4).numpy(), state)
    found = torch.cat([torch.from_numpy(first), torch.from_numpy(second)], 1)
    assert torch.equal(found, whole)
    return packed


@pytest.mark.parametrize("H", [1, 5, 16, 33, 70])
def test_packed_int8_weights_give_the_bits_of_float32(H):
    torch.manual_seed(H)
    lstm = in_int8(PeepholeLSTM(300, H, 2))
    for B in (1, 2, 3, 7, 20):
        packed = assert_packed_is_the_layer(lstm, B)
        assert packed_types(packed) == [("int8", "int8")] * 2


@pytest.mark.slow
def test_each_matrix_of_another_form_stays_in_float32():
    lstm = in_int8(PeepholeLSTM(12, 20, 2))
    with torch.no_grad():
        lstm.layers[0].hidden_weights[0, 3] = 0  # a row of zeros is int8 as well
        lstm.layers[0].input_weights[0, 70, 4] += 1e-4
        lstm.layers[1].hidden_weights[0, 0, 0] *= 1.001
    packed = assert_packed_is_the_layer(lstm, 3)
    assert packed_types(packed) == [("float32", "int8"), ("int8", "float32")]


def test_random_weights_and_those_in_float64_stay_as_they_are():
    lstm = PeepholeLSTM(12, 20, 2)
    assert packed_types(assert_packed_is_the_layer(lstm, 2)) == [("float32", "float32")] * 2
    lstm = in_int8(lstm).double()
    assert packed_types(assert_packed_is_the_layer(lstm, 2)) == [("float64", "float64")] * 2


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize("hidden, inputs", [(1, 1), (16, 40), (20, 300), (80, 37)])
def test_gates_are_packed_as_their_padded_columns_are(hidden, inputs, number):
    rows = np.random.default_rng(0).integers(-100, 100, (4 * hidden, inputs)).astype(number)
    columns = cpu.gate_columns(rows)
    found, expected = np.full(columns.size, 99, number), np.empty(columns.size, number)
    cpu._pack_rows(rows, DEPTH, found)
    for k in range(0, inputs, DEPTH):
        part, start = columns[k : k + DEPTH], k * columns.shape[1]
        pack(part, columns.shape[1], expected[start : start + part.size])
    assert np.array_equal(found, expected)
