"""The losses, the parts, the LSTM and the search on a GPU, held against the reference."""

import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

# cuBLAS repeats its bits where it keeps its own workspace; read when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import soundfile
import torch
from lattices import (
    RAGGED,
    SHAPES,
    Joint,
    assert_as_exact_as_the_reference,
    assert_exact_enough,
    assert_same_bits,
    cast,
    changed,
    loss_and_gradients,
    random_arrows,
    random_batch,
    random_lattice,
    twice,
)
from lstms import SHAPES as LSTM_SHAPES
from lstms import assert_as_exact_as_the_reference as assert_lstm_as_exact
from lstms import assert_same_bits as assert_same_results
from lstms import problem, relative_errors, results
from torch.testing import assert_close

import transduce
from transduce import (
    NGram,
    PeepholeLSTM,
    PredictionNetwork,
    SearchOptions,
    Transducer,
    beam_search,
    greedy_search,
    rnnt_loss,
    search,
    transducer_loss,
)
from transduce.architectures import ContinuousTransducer
from transduce.data.batches import Batch as TrainingBatch
from transduce.decoding import cuda, reference, utterances
from transduce.decoding.generation import GenerationOptions, generate
from transduce.decoding.problem import Problem
from transduce.kernels.nvrtc import full_float32_matmul
from transduce.lattice.consistency import lattice_symmetric_kl
from transduce.lattice.distillation import distillation_losses
from transduce.lattice.loss import lattice_loss
from transduce.lattice.mixtures import mixture_loss, num_parameters
from transduce.lattice.operators import additive_loss, arrow_loss, joint_loss
from transduce.lstm.operators import lstm_layer
from transduce.training.risk import CandidateErrors, risk_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.usefixtures("empty_is_nan"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # inductor's own
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # likewise
]

# --- The losses ---------------------------------------------------------------------------------

WIDE = {
    "a warp's columns, each": ([3, 4], [31, 32], 5),
    "two warps": ([5, 4], [63, 40], 5),
    "five warps": ([5, 4], [128, 127], 5),
    "two columns a thread": ([9], [1100], 3),
    "four columns a thread": ([2], [2100], 3),
    "many labels": ([40, 7], [33, 64], 60),
    "two outputs": ([30, 9], [12, 5], 1),
    "as many outputs as the kernels multiply": ([40, 7], [33, 64], 63),
    "as few outputs as cuBLAS multiplies": ([40, 7], [33, 64], 64),
    "five thousand outputs": ([6, 9], [4, 7], 4999),
}


def joint(shape, **options):
    f, g, *rest = random_batch(*shape, **options)
    return Joint(f[:, :, None] + g[:, None], *rest)


@pytest.mark.parametrize("scale", [1.0, 40.0, 400.0], ids=["usual", "peaked", "underflowing"])
@pytest.mark.parametrize("shape", (SHAPES | WIDE).values(), ids=SHAPES | WIDE)
def test_the_additive_loss_is_as_exact_as_the_reference(shape, scale):
    assert_as_exact_as_the_reference(transducer_loss, random_batch(*shape, scale=scale), "cuda")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", (SHAPES | WIDE).values(), ids=SHAPES | WIDE)
def test_the_loss_of_logits_is_as_exact_as_the_reference(shape, fused):
    batch = joint(shape)
    if not fused:
        batch = batch._replace(logits=batch.logits.log_softmax(-1))
    options = {"blank": 0, "reduction": "none", "fused_log_softmax": fused}
    assert_as_exact_as_the_reference(rnnt_loss, batch, "cuda", **options)


@pytest.mark.parametrize("shape", [RAGGED, WIDE["five warps"]], ids=["ragged", "five warps"])
def test_float64_is_float64(shape):
    batch = random_batch(*shape, dtype=torch.float64)
    found = loss_and_gradients(transducer_loss, batch, "cuda")
    assert_close(found, loss_and_gradients(transducer_loss, batch), rtol=1e-11, atol=1e-11)
    options = {"blank": 0, "reduction": "none"}
    found = loss_and_gradients(rnnt_loss, joint(shape, dtype=torch.float64), "cuda", **options)
    expected = loss_and_gradients(rnnt_loss, joint(shape, dtype=torch.float64), **options)
    assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_the_loss_of_what_they_hold(dtype):
    for loss_function, batch, options in (
        (transducer_loss, random_batch(*RAGGED, dtype=dtype), {}),
        (rnnt_loss, joint(RAGGED, dtype=dtype), {"blank": 0, "reduction": "none"}),
    ):
        loss, *grads = loss_and_gradients(loss_function, batch, "cuda", **options)
        exact, *exact_grads = loss_and_gradients(
            loss_function, cast(batch, torch.float64), **options
        )
        assert loss.dtype == torch.float32
        assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)
        for grad, exact_grad in zip(grads, exact_grads, strict=True):
            assert grad.dtype == dtype
            assert_close(grad.double(), exact_grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("shape", [([5000], [100], 40), ([400], [2000], 20), ([3000], [1500], 5)])
def test_long_lattices_agree_with_float64(shape):
    # The reference would take hours; the same kernels in float64 are held against it above.
    batch = random_batch(*shape)
    exact = loss_and_gradients(transducer_loss, cast(batch, torch.float64), "cuda")
    found = loss_and_gradients(transducer_loss, batch, "cuda")
    assert_close(found[0].double(), exact[0], rtol=1e-6, atol=0)
    # α and β are stored as float32: what they are known to is what an occupancy is.
    known = 4 * torch.finfo(torch.float32).eps * float(exact[0])
    for grad, exact_grad in zip(found[1:], exact[1:], strict=True):
        assert_close(grad.double(), exact_grad, rtol=0, atol=known * float(exact_grad.abs().max()))


def test_padding_is_never_read():
    batch = random_batch(*RAGGED, padding=3)
    expected = loss_and_gradients(transducer_loss, batch, "cuda")
    f, g, labels = (x.clone() for x in batch[:3])
    for b, (T, U) in enumerate(zip(*(x.tolist() for x in batch[3:]), strict=True)):
        f[b, T:], g[b, U + 1 :], labels[b, U:] = torch.nan, torch.nan, -7
    poisoned = batch._replace(transcription=f, prediction=g, labels=labels)
    assert_same_bits(loss_and_gradients(transducer_loss, poisoned, "cuda"), expected)
    logits = f[:, :, None] + g[:, None]
    options = {"blank": 0, "reduction": "none"}
    found = loss_and_gradients(rnnt_loss, Joint(logits, *poisoned[2:]), "cuda", **options)
    clean = (batch[0][:, :, None] + batch[1][:, None], *batch[2:])
    assert_same_bits(found, loss_and_gradients(rnnt_loss, Joint(*clean), "cuda", **options))


def test_upstream_gradients_of_any_sign_scale():
    upstream = torch.tensor([-2.0, 0.5, 0.0, -1e-3, 7.0])
    batch = random_batch(*RAGGED)
    assert_as_exact_as_the_reference(transducer_loss, batch, "cuda", upstream=upstream)
    options = {"blank": 0, "reduction": "none", "upstream": upstream}
    assert_as_exact_as_the_reference(rnnt_loss, joint(RAGGED), "cuda", **options)


@pytest.mark.parametrize("clamp", [0.01, 0.3])
def test_the_gradient_is_clamped_before_it_is_scaled(clamp):
    options = {"blank": 0, "reduction": "none", "clamp": clamp}
    options["upstream"] = torch.tensor([3.0, -3.0, 1.0, 1.0, 1.0])
    assert_as_exact_as_the_reference(rnnt_loss, joint(RAGGED), "cuda", **options)


def test_what_cannot_be_emitted_has_an_infinite_loss_and_no_gradient():
    batch = random_batch([4, 5], [2, 3], 5)
    impossible = batch.transcription.clone()
    impossible[1, :, batch.labels[1, 1]] = -torch.inf
    batch = batch._replace(transcription=impossible)
    loss, grad_f, grad_g = loss_and_gradients(transducer_loss, batch, "cuda")
    assert loss.isinf().tolist() == [False, True]
    assert (grad_f[1] == 0).all() and (grad_g[1] == 0).all() and grad_f[0].any()
    assert_exact_enough(
        [x[:1] for x in (loss, grad_f, grad_g)],
        [x[:1] for x in loss_and_gradients(transducer_loss, batch)],
        [x[:1] for x in loss_and_gradients(transducer_loss, cast(batch, torch.float64))],
    )


def test_a_result_is_the_same_from_run_to_run_and_on_any_stream():
    batch = random_batch(*SHAPES["a long lattice"])
    first = loss_and_gradients(transducer_loss, batch, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        second = loss_and_gradients(transducer_loss, batch, "cuda")
    assert_same_bits(second, first)


def test_a_loss_goes_back_twice_the_same():
    f, g, *rest = (x.cuda() for x in random_batch(*RAGGED))
    loss = transducer_loss(f.requires_grad_(), g, *rest).sum()
    first = torch.autograd.grad(loss, f, retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, f), first)


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"  # left as it was
    torch.backends.cuda.matmul.fp32_precision = before


def test_autocast_changes_nothing():
    batch = random_batch(*SHAPES["many labels"])
    expected = loss_and_gradients(transducer_loss, batch, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = loss_and_gradients(transducer_loss, batch, "cuda")
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["many labels", "a long lattice"])
def test_with_tf32_the_loss_is_as_exact_as_the_reference(name, tf32):
    assert_as_exact_as_the_reference(transducer_loss, random_batch(*SHAPES[name]), "cuda")


@pytest.mark.parametrize("shape", [(70, 300), (3, 70, 300)], ids=["matrices", "batches"])
def test_with_tf32_a_full_product_is_not_rounded(shape, request):
    draw = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", generator=draw) for _ in range(2))
    exact = a.double() @ b.double().mT
    request.getfixturevalue("tf32")
    rounded = (a @ b.mT - exact).abs().max()
    with torch.autocast("cuda", torch.bfloat16):
        error = (full_float32_matmul(a, b.mT) - exact).abs().max()
    assert error < rounded / 50  # tensor cores add less exactly than float32 does
    into = torch.empty_like(exact, dtype=torch.float32)
    assert full_float32_matmul(a, b.mT, out=into) is into
    assert (into - exact).abs().max() < rounded / 50


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["transcription", "prediction"])
def test_a_number_that_is_none_makes_its_items_loss_nan(which, value):
    batch = random_batch(*RAGGED)
    broken = batch._replace(**{which: changed(getattr(batch, which), 2, 1, 3, value)})
    loss, *_ = loss_and_gradients(transducer_loss, broken, "cuda")
    assert loss.isnan().tolist() == [False, False, True, False, False]
    f, g, *rest = broken
    logits = Joint(f[:, :, None] + g[:, None], *rest)
    loss, *_ = loss_and_gradients(rnnt_loss, logits, "cuda", blank=0, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False, False]


def test_what_cannot_be_is_nan_and_nothing_waits_to_say_so():
    f, g, labels, num_frames, num_labels = (x.cuda() for x in random_batch(*RAGGED))
    for bad in (0, -3, 10**9):
        wrong = labels.clone()
        wrong[0, 0] = bad
        loss = transducer_loss(f, g, wrong, num_frames, num_labels)
        assert loss.isnan().tolist() == [True, False, False, False, False]
    for bad in (0, -1, 10**6):
        wrong = num_frames.clone()
        wrong[1] = bad
        loss = transducer_loss(f, g, labels, wrong, num_labels)
        assert loss.isnan().tolist() == [False, True, False, False, False]


def test_the_symmetric_kl_of_two_lattices_is_that_of_the_cpu():
    one, other = (random_batch(*RAGGED, padding=1, seed=seed) for seed in (0, 1))
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        arguments = twice(one, other, dtype, device)
        apart = lattice_symmetric_kl(*arguments)
        gradients = torch.autograd.grad(apart.sum(), arguments[:2])
        found.append([x.cpu().double() for x in (apart, *gradients)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@contextmanager
def refusing_to_wait():
    """Let every wait of the host for the GPU raise an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_distillation_loss_is_that_of_the_cpu_and_does_not_wait_for_the_gpu():
    batch = random_batch(*RAGGED, padding=1)
    targets = torch.rand(batch.prediction.shape, dtype=torch.float64)
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        f, g = (x.to(device, dtype).requires_grad_() for x in batch[:2])
        rest = [x.to(device) for x in (*batch[2:], targets)]
        with refusing_to_wait():
            loss, log_loss = distillation_losses(f, g, *rest)
            gradients = torch.autograd.grad(loss.sum(), (f, g))
        found.append([x.detach().cpu().double() for x in (loss, log_loss, *gradients)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- Given arrows -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("shape", (SHAPES | WIDE).values(), ids=SHAPES | WIDE)
def test_the_loss_of_arrows_is_as_exact_as_the_reference(shape, scale):
    arrows = random_arrows(*shape[:2], scale=scale)
    assert_as_exact_as_the_reference(lattice_loss, arrows, "cuda")


@pytest.mark.parametrize("impossible", [0.0, 0.2])
def test_the_loss_of_arrows_in_float64_is_float64(impossible):
    for shape in (RAGGED, WIDE["five warps"], WIDE["two columns a thread"]):
        options = {"dtype": torch.float64, "impossible": impossible, "padding": 1}
        arrows = random_arrows(*shape[:2], **options)
        expected = loss_and_gradients(lattice_loss, arrows)
        found = loss_and_gradients(lattice_loss, arrows, "cuda")
        assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_arrows_padding_is_never_read():
    clean = random_arrows(*RAGGED[:2], padding=2)
    poisoned = clean._replace(log_null=clean.log_null.clone(), log_label=clean.log_label.clone())
    for b, (T, U) in enumerate(zip(*clean[2:], strict=True)):
        poisoned.log_null[b, T:], poisoned.log_null[b, :, U + 1 :] = torch.nan, torch.nan
        poisoned.log_label[b, T:], poisoned.log_label[b, :, U:] = torch.nan, torch.nan
    found = loss_and_gradients(lattice_loss, poisoned, "cuda")
    assert_same_bits(found, loss_and_gradients(lattice_loss, clean, "cuda"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_arrow_that_is_no_number_makes_its_items_loss_nan(value):
    arrows = random_arrows(*RAGGED[:2])
    broken = arrows._replace(log_label=changed(arrows.log_label, 2, 1, 3, value))
    loss, *_ = loss_and_gradients(lattice_loss, broken, "cuda")
    assert loss.isnan().tolist() == [False, False, True, False, False]


# --- Continuous outputs -------------------------------------------------------------------------


def mixture_batch(dtype):
    """Return f, g, outputs and lengths of a mixture of three Gaussians of five numbers."""
    draw = torch.Generator().manual_seed(0)
    num_frames, num_outputs, _ = RAGGED
    B, T, U, P = len(num_frames), max(num_frames), max(num_outputs), num_parameters(3, 2, 5)
    shapes = [(B, T, P), (B, U + 1, P), (B, U, 5)]
    vectors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [*(x.to(dtype) for x in vectors), *map(torch.tensor, (num_frames, num_outputs))]


def test_the_mixture_loss_is_that_of_the_cpu():
    options = {"num_components": 3}
    exact = loss_and_gradients(mixture_loss, mixture_batch(torch.float64), **options)
    found = loss_and_gradients(mixture_loss, mixture_batch(torch.float64), "cuda", **options)
    assert_close(found, exact, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(
        loss_and_gradients(mixture_loss, mixture_batch(torch.float32), "cuda", **options),
        exact,
        strict=True,
    ):
        assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_a_continuous_transducer_trains_and_generates_as_on_the_cpu():
    torch.manual_seed(0)
    network = ContinuousTransducer(7, 4, 16, prediction_size=16, num_components=2, product_rank=3)
    ids, outputs = torch.randint(1, 8, (3, 5)), torch.randn(3, 9, 4)
    batch = TrainingBatch((), ids, torch.tensor([5, 2, 3]), outputs, torch.tensor([9, 0, 4]))
    found = []
    for device in ("cpu", "cuda"):
        network.to(device).zero_grad()
        losses = network.losses(batch.to(device))
        losses.sum().backward()
        gradients = [weights.grad.cpu().clone() for weights in network.parameters()]
        here = batch.to(device)
        generated = generate(network, here.frames, here.num_frames)
        found.append([losses.detach().cpu(), *gradients, *(one.outputs.cpu() for one in generated)])
        assert all(len(one.outputs) for one in generated)
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    drawn = [
        generate(network, here.frames, here.num_frames, GenerationOptions(1.0, "drawn", seed=3))
        for _ in "ab"
    ]
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one.outputs, other.outputs)


# --- Operators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operators_keep_pytorchs_rules(dtype):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, batch, options in (
        (additive_loss, random_batch(*RAGGED, dtype=dtype), (True, "cuda")),
        (joint_loss, joint(RAGGED, dtype=dtype), (0, True, -1.0, True, "cuda")),
        (arrow_loss, random_arrows(*RAGGED[:2], dtype=dtype), (True, "cuda")),
    ):
        tensors = [x.cuda() for x in batch]
        for x in tensors:
            x.requires_grad_(x.is_floating_point())
        torch.library.opcheck(operator.operator, (*tensors, *options), test_utils=checks)


ON_GPU = {
    "transducer_loss": (transducer_loss, lambda: random_batch(*RAGGED)),
    "rnnt_loss": (
        lambda *x, **y: rnnt_loss(*x, blank=0, reduction="none", **y),
        lambda: joint(RAGGED),
    ),
    "lattice_loss": (lattice_loss, lambda: random_arrows(*RAGGED[:2])),
}


@pytest.mark.parametrize("loss_function, draw", ON_GPU.values(), ids=ON_GPU)
def test_compiled_transformed_and_captured_losses_have_the_same_bits(loss_function, draw):
    batch = draw()
    tensors = [x.cuda() for x in batch]
    leaves = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    rest = tensors[len(leaves) :]

    def gradients(function):
        loss = function(*leaves, *rest)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]

    expected = gradients(loss_function)
    torch.compiler.reset()
    compiled = torch.compile(loss_function, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients(compiled), expected)
    places = tuple(range(len(leaves)))
    found = torch.func.grad(lambda *x: loss_function(*x, *rest).sum(), argnums=places)(
        *(x.detach() for x in leaves)
    )
    assert_same_bits(found, expected[1:])
    with torch.cuda.stream(torch.cuda.Stream()):
        gradients(loss_function)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(loss_function)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, expected)


def test_the_gradient_of_logits_needs_no_more_memory_than_they():
    logits = torch.randn(8, 200, 51, 300, device="cuda", requires_grad=True)
    labels = torch.randint(1, 300, (8, 50), device="cuda")
    lengths = torch.full((8,), 200, device="cuda"), torch.full((8,), 50, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rnnt_loss(logits, labels, *lengths, blank=0).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.05 * logits.numel() * 4


def test_logits_of_more_than_two_thousand_million_elements():
    B, T, columns, K = 2, 300, 101, 36_000  # 2.2e9
    logits = torch.zeros(B, T, columns, K, dtype=torch.bfloat16, device="cuda").requires_grad_()
    labels = torch.full((B, columns - 1), K - 1, device="cuda")
    lengths = torch.tensor([T, 7], device="cuda"), torch.tensor([columns - 1, 5], device="cuda")
    loss = rnnt_loss(logits, labels, *lengths, blank=0, reduction="none")
    # Every alignment has the same probability, K^-(T+U), and there are C(T+U-1, U) of them.
    n = torch.stack(lengths).double()
    paths = torch.lgamma(n.sum(0)) - torch.lgamma(n[0]) - torch.lgamma(n[1] + 1)
    expected = n.sum(0) * torch.log(torch.tensor(K, dtype=torch.float64)) - paths
    assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    loss[1].backward()
    last = logits.grad[1, 6, 5]  # of the second item's last node, which every alignment passes
    assert_close(float(last[0]), 1 / K - 1, rtol=1e-2, atol=0)
    assert (logits.grad[1, 7:] == 0).all() and (logits.grad[0, -1, -1] == 0).all()


# --- The parts ----------------------------------------------------------------------------------

PARTS = ["forward_variables", "backward_variables", "log_occupancy", "log_likelihood"]


@pytest.mark.parametrize("T, U", [(1, 0), (1, 3), (4, 1), (30, 40), (3, 200)])
@pytest.mark.parametrize("impossible", [0.0, 0.2])
@pytest.mark.parametrize("name", PARTS)
def test_the_parts_agree_with_the_reference(name, T, U, impossible):
    arrows, part = random_lattice(T, U, impossible=impossible), getattr(transduce, name)
    found = part(*(x.cuda() for x in arrows))
    assert found.is_cuda
    assert_close(found.cpu(), part(*arrows, backend="reference"), rtol=1e-9, atol=1e-9)
    single = [x.float() for x in arrows]
    assert_exact_enough(
        [part(*(x.cuda() for x in single)).cpu()],
        [part(*single, backend="reference")],
        [part(*(x.double() for x in single), backend="reference")],
    )


def test_the_transitions_agree_with_the_reference():
    for shape in (([6], [4], 7), ([1], [0], 2), ([20], [70], 30)):
        f, g, labels, *_ = (x[0] for x in random_batch(*shape))
        found = transduce.lattice_transitions(f.cuda(), g.cuda(), labels.cuda())
        exact = transduce.lattice_transitions(f.double(), g.double(), labels, backend="reference")
        theirs = transduce.lattice_transitions(f, g, labels, backend="reference")
        assert_exact_enough([x.cpu() for x in found], theirs, exact)


def test_the_best_alignment_is_found_whatever_the_device():
    arrows = random_lattice(9, 4)
    on_gpu = [x.cuda() for x in arrows]
    expected = transduce.best_alignment(*arrows, backend="reference")
    assert transduce.best_alignment(*on_gpu, backend="reference") == expected


# --- The LSTM -----------------------------------------------------------------------------------

LARGE = {
    "one unit too many for vectors": (3, 5, 4, 129, 1, True),
    "several groups": (70, 6, 5, 128, 1, True, [b % 7 for b in range(70)]),
    "rows of two": (9, 6, 5, 512, 1, True, [6, 1, 0, 5, 3, 6, 6, 2, 4]),
    "a quarter of a block": (2, 4, 3, 7, 1, True),
    "256": (21, 5, 80, 256, 1, True, [1 + b % 5 for b in range(21)]),
    "512": (5, 4, 80, 512, 1, True),
    "one direction at a time": (3, 4, 6, 1200, 1, True, [4, 2, 3]),
    "weights that do not fit": (5, 3, 6, 1500, 1, False, [3, 1, 2, 3, 3]),
    "many frames": (2, 400, 5, 20, 1, True, [400, 399]),
}


@pytest.mark.parametrize("shape", (LSTM_SHAPES | LARGE).values(), ids=LSTM_SHAPES | LARGE)
def test_the_lstm_is_as_exact_as_the_reference(shape):
    assert_lstm_as_exact("cuda", *problem(*shape))


@pytest.mark.parametrize("B", [1, 2, 3, 5, 8, 31, 33, 64, 132, 133, 500])
def test_the_lstm_takes_every_batch_size(B):
    lengths = [1 + 5 * b % 4 for b in range(B)]
    assert_lstm_as_exact("cuda", *problem(B, 4, 3, 20, 1, B % 2 == 0, lengths))


def test_the_lstm_in_float64_is_float64():
    for shape in ((5, 9, 4, 33, 2, True, [3, 9, 0, 1, 8]), (2, 3, 4, 300, 1, True)):
        arguments = problem(*shape)
        expected = results("reference", torch.float64, *arguments)
        found = results("cuda", torch.float64, *arguments)
        assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_the_lstm_never_reads_its_padding(ids):
    lengths = [3, 9, 0, 1, 8]
    model, x, lengths, state, (above, *rest) = problem(5, 9, 4, 20, 2, True, lengths, ids)
    expected = results("cuda", torch.float32, model, x, lengths, state, (above, *rest))
    padding = torch.arange(9) >= lengths[:, None]
    x[padding] = 10**6 if ids else torch.nan
    above[padding] = 7.0
    found = results("cuda", torch.float32, model, x, lengths, state, (above, *rest))
    assert_same_results(found, expected)
    assert (found["output"][padding] == 0).all()
    assert ids or (found["grad x"][padding] == 0).all()


def test_the_lstm_is_the_same_from_run_to_run_and_on_any_stream():
    arguments = problem(33, 40, 5, 128, 2, True, [40 - b for b in range(33)])
    first = results("cuda", torch.float32, *arguments)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same_results(results("cuda", torch.float32, *arguments), first)


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_the_lstm_operator_is_registered_as_it_behaves(ids):
    model, x, lengths, state, _ = problem(3, 4, 5, 6, 1, True, None, ids)
    tensors = [t.detach().float().cuda() for t in (*model.layers[0].weights(), *state)]
    tensors = [t.requires_grad_() for t in tensors]
    x = x.cuda() if ids else x.float().cuda().requires_grad_()
    torch.library.opcheck(lstm_layer, (x, lengths.cuda(), *tensors, "cuda", True))


def test_tf32_rounds_what_the_lstm_multiplies(request):
    arguments = problem(33, 7, 256, 128, 1, True)
    first = results("cuda", torch.float32, *arguments)
    request.getfixturevalue("tf32")
    found = results("cuda", torch.float32, *arguments)
    assert not torch.equal(found["output"], first["output"])
    for name, numbers in found.items():
        close = 2e-3 * first[name].abs().max()
        torch.testing.assert_close(numbers, first[name], rtol=0, atol=float(close), msg=name)


def test_weights_need_not_lie_where_vectors_are_loaded():
    model = PeepholeLSTM(3, 128).cuda()
    x = torch.randn(2, 5, 3, device="cuda")
    expected, _ = model(x)
    for weights in model.parameters():
        room = weights.new_empty(weights.numel() + 1)
        room[1:] = weights.detach().flatten()
        weights.data = room[1:].view_as(weights)
    assert torch.equal(model(x)[0], expected)


def test_tensors_on_two_devices_are_refused():
    model = PeepholeLSTM(3, 20).cuda()
    with pytest.raises(ValueError, match="lengths is on cpu, but x is on cuda:0"):
        model(torch.randn(2, 5, 3, device="cuda"), torch.tensor([5, 2]))


def test_a_frame_that_is_not_a_number_neither_hides_nor_hangs():
    model = PeepholeLSTM(3, 128, bidirectional=True).cuda()
    x = torch.randn(2, 5, 3, device="cuda")
    # All bits set is how the kernels mark what is not there yet.
    x.view(torch.int32)[1, 2, 0] = -1
    output, _ = model(x)
    whole, later = [False] * 5, [False, False, True, True, True]
    assert output[..., :128].isnan().all(2).tolist() == [whole, later]
    assert output[..., 128:].isnan().all(2).tolist() == [whole, [True, True, True, False, False]]
    state = torch.zeros(2, 2, 128, device="cuda")
    state.view(torch.int32).fill_(-1)
    assert model(torch.randn(2, 5, 3, device="cuda"), state=(state, state))[0].isnan().all()


def test_lengths_out_of_range_do_not_hang():
    model = PeepholeLSTM(3, 20).cuda()
    x = torch.randn(3, 5, 3, device="cuda")
    output, _ = model(x, torch.tensor([-1, 900, 5], device="cuda"))
    expected, _ = model(x, torch.tensor([0, 5, 5], device="cuda"))
    assert torch.equal(output, expected)


def test_the_way_back_may_be_the_first_that_a_thread_does():
    code = """
import torch
from transduce import PeepholeLSTM
x = torch.randn(2, 5, 3, device="cuda")
PeepholeLSTM(3, 20).cuda()(x)[0].sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- The LSTM on tensor cores -------------------------------------------------------------------

HALVES = [torch.float16, torch.bfloat16]
# The relative errors are those of rounding: 2^-11 and 2^-8, some of them several times.
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TF32_ROUNDING = 2e-3  # of as many bits as float16
ROUNDED_SHAPES = {
    name: LSTM_SHAPES[name]
    for name in ("one number", "one input", "ragged both ways", "all of length zero", "one id")
}
ROUNDED_SHAPES |= {
    "more than a tile of sequences": (70, 6, 5, 128, 1, True, [b % 7 for b in range(70)]),
    "several chunks": (500, 3, 4, 96, 1, True, [b % 4 for b in range(500)]),
    "320": (33, 7, 80, 320, 1, True, [1 + b % 7 for b in range(33)]),
    "640": (24, 5, 16, 640),
    "768": (16, 6, 24, 768),
    "1024": (64, 4, 8, 1024, 1, True, [1 + b % 4 for b in range(64)]),
    "one direction at a time": (3, 4, 6, 1500, 1, True, [4, 2, 3]),
}


def half_results(dtype, parameters, *arguments):
    """Return the results with parameters of half precision, or with autocast."""
    if parameters:
        return results("cuda", dtype, *arguments)
    with torch.autocast("cuda", dtype):
        return results("cuda", torch.float32, *arguments)


@pytest.mark.parametrize(
    "dtype, parameters",
    [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float16", "bfloat16", "parameters in bfloat16"],
)
@pytest.mark.parametrize("shape", ROUNDED_SHAPES.values(), ids=ROUNDED_SHAPES)
def test_the_lstm_of_half_precision_errs_by_rounding_alone(shape, dtype, parameters):
    model, x, *rest = problem(*shape)
    if parameters:
        model, x = model.to(dtype).double(), x.to(dtype).double() if x.is_floating_point() else x
    exact = results("reference", torch.float64, model, x, *rest)
    found = half_results(dtype, parameters, model, x, *rest)
    assert found["output"].dtype == (dtype if parameters else torch.float32)
    bad = {n: e for n, e in relative_errors(found, exact).items() if not e <= ROUNDING[dtype]}
    assert not bad


@pytest.mark.parametrize("shape", ROUNDED_SHAPES.values(), ids=ROUNDED_SHAPES)
def test_the_lstm_in_tf32_errs_by_rounding_alone(shape, tf32):
    arguments = problem(*shape)
    exact = results("reference", torch.float64, *arguments)
    errors = relative_errors(results("cuda", torch.float32, *arguments), exact)
    assert not {name: error for name, error in errors.items() if not error <= TF32_ROUNDING}


NAMES = {
    "input_weights": "weight_ih_l0",
    "hidden_weights": "weight_hh_l0",
    "biases": "bias_ih_l0",
}


def call_lstm(lstm, x, upstream, dtype):
    """Return the output and gradients of a PeepholeLSTM or nn.LSTM in a type, as float64."""
    layer, names = lstm, NAMES.values()
    if isinstance(lstm, PeepholeLSTM):
        layer, names = lstm.layers[0], NAMES
    lstm.to("cuda", dtype)
    inputs, weights = x.to(dtype).requires_grad_(), [getattr(layer, name) for name in names]
    output = lstm(inputs)[0]
    grads = torch.autograd.grad(output, [inputs, *weights], upstream.to(dtype))
    return [t.detach().double().flatten() for t in (output, *grads)]


def lstm_and_cudnns(I, H, weights_type):  # noqa: E741
    """Return a PeepholeLSTM without peepholes and an nn.LSTM of the same weights."""
    torch.manual_seed(0)
    model, other = PeepholeLSTM(I, H), torch.nn.LSTM(I, H, batch_first=True)
    with torch.no_grad():
        model.layers[0].peepholes.zero_()
        other.bias_hh_l0.zero_()
        for weights in model.parameters():
            weights.copy_(weights.to(weights_type))
        for ours, theirs in NAMES.items():
            getattr(other, theirs).copy_(getattr(model.layers[0], ours)[0])
    return model, other


def assert_as_exact_as_cudnns(made, theirs, exact, factor):
    for name, *numbers in zip(("output", "x", *NAMES), made, theirs, exact, strict=True):
        found, other, right = numbers
        errors = float((found - right).norm()), float((other - right).norm())
        assert errors[0] <= factor * errors[1], (name, *errors)


LSTMS = [(16, 1000, 40, 256), (32, 100, 80, 640)]  # B, N, inputs, H


@pytest.mark.parametrize("B, N, I, H", LSTMS)
def test_the_lstm_of_half_precision_is_as_exact_as_cudnns(B, N, I, H):  # noqa: E741
    model, other = lstm_and_cudnns(I, H, torch.bfloat16)  # float16 holds such weights too
    x, upstream = (torch.randn(B, N, size, device="cuda").bfloat16() for size in (I, H))
    exact = call_lstm(model, x, upstream, torch.float64)
    allowed = call_lstm(other, x, upstream, torch.float16)
    # bfloat16 rounds to 8 bits, float16 to 11.
    for dtype, factor in ((torch.bfloat16, 16), (torch.float16, 2)):
        made = call_lstm(model, x, upstream, dtype)
        assert_as_exact_as_cudnns(made, allowed, exact, factor)


@pytest.mark.parametrize("B, N, I, H", LSTMS)
def test_the_lstm_in_tf32_is_as_exact_as_cudnns_in_float16(B, N, I, H, tf32):  # noqa: E741
    # Both round to 11 bits. With TF32 enabled, cuDNN still computes some shapes in full float32.
    model, other = lstm_and_cudnns(I, H, torch.float32)
    x, upstream = (torch.randn(B, N, size, device="cuda") for size in (I, H))
    exact = call_lstm(model, x, upstream, torch.float64)
    allowed = call_lstm(other, x, upstream, torch.float16)
    assert_as_exact_as_cudnns(call_lstm(model, x, upstream, torch.float32), allowed, exact, 2)


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_the_lstm_of_half_precision_never_reads_its_padding(ids):
    lengths = [3, 9, 0, 1, 8]
    model, x, lengths, state, (above, *rest) = problem(5, 9, 4, 20, 2, True, lengths, ids)
    expected = half_results(torch.bfloat16, False, model, x, lengths, state, (above, *rest))
    padding = torch.arange(9) >= lengths[:, None]
    x[padding] = 10**6 if ids else torch.nan
    above[padding] = 7.0
    found = half_results(torch.bfloat16, False, model, x, lengths, state, (above, *rest))
    assert_same_results(found, expected)
    assert (found["output"][padding] == 0).all()
    assert ids or (found["grad x"][padding] == 0).all()


def test_the_lstm_of_half_precision_is_the_same_from_run_to_run_and_on_any_stream():
    arguments = problem(33, 40, 5, 128, 2, True, [40 - b for b in range(33)])
    first = half_results(torch.bfloat16, False, *arguments)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same_results(half_results(torch.bfloat16, False, *arguments), first)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_frame_that_is_not_a_number_does_not_stop_the_lstm_of_half_precision(dtype):
    model = PeepholeLSTM(3, 128, bidirectional=True).cuda()
    x = torch.randn(2, 5, 3, device="cuda")
    # All bits set is how the kernels mark what is not there yet.
    x.view(torch.int32)[1, 2, 0] = -1
    with torch.autocast("cuda", dtype):
        output, _ = model(x)
    whole, later = [False] * 5, [False, False, True, True, True]
    assert output[..., :128].isnan().all(2).tolist() == [whole, later]
    assert output[..., 128:].isnan().all(2).tolist() == [whole, [True, True, True, False, False]]
    state = torch.zeros(2, 2, 128, device="cuda")
    state.view(torch.int32).fill_(-1)
    with torch.autocast("cuda", dtype):
        output, _ = model(x.nan_to_num(), state=(state, state))
        output.sum().backward()
    assert output.isnan().all()


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "parameters"])
def test_the_lstm_operator_of_half_precision_is_registered_as_it_behaves(dtype, ids):
    model, x, lengths, state, _ = problem(3, 4, 5, 6, 1, True, None, ids)
    tensors = [t.detach().to("cuda", dtype) for t in (*model.layers[0].weights(), *state)]
    tensors = [t.requires_grad_() for t in tensors]
    x = x.cuda() if ids else x.to("cuda", dtype).requires_grad_()
    arguments = (x, lengths.cuda(), *tensors, "cuda", True, torch.bfloat16)
    torch.library.opcheck(lstm_layer, arguments)


def test_a_compiled_lstm_of_half_precision_has_the_same_bits():
    model, x = PeepholeLSTM(4, 20, 2, True).cuda(), torch.randn(3, 5, 4, device="cuda")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cuda", torch.bfloat16):
        expected, found = model(x)[0], compiled(x)[0]
    assert torch.equal(found, expected)
    weights = list(model.parameters())
    pairs = (torch.autograd.grad(output.sum(), weights) for output in (found, expected))
    assert all(map(torch.equal, *pairs))
    with torch.no_grad():
        assert not torch.equal(model(x)[0], expected)  # float32 without autocast


@pytest.mark.parametrize("ids", [False, True], ids=["vectors", "ids"])
def test_the_lstm_in_tf32_never_reads_its_padding(ids, tf32):
    lengths = [3, 9, 0, 1, 8]
    model, x, lengths, state, (above, *rest) = problem(5, 9, 4, 20, 2, True, lengths, ids)
    expected = results("cuda", torch.float32, model, x, lengths, state, (above, *rest))
    padding = torch.arange(9) >= lengths[:, None]
    x[padding] = 10**6 if ids else torch.nan
    above[padding] = 7.0
    found = results("cuda", torch.float32, model, x, lengths, state, (above, *rest))
    assert_same_results(found, expected)
    assert (found["output"][padding] == 0).all()
    assert ids or (found["grad x"][padding] == 0).all()


def test_the_lstm_in_tf32_is_the_same_from_run_to_run_and_on_any_stream(tf32):
    arguments = problem(33, 40, 5, 128, 2, True, [40 - b for b in range(33)])
    first = results("cuda", torch.float32, *arguments)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same_results(results("cuda", torch.float32, *arguments), first)


def test_a_frame_that_is_not_a_number_does_not_stop_the_lstm_in_tf32(tf32):
    model = PeepholeLSTM(3, 128, bidirectional=True).cuda()
    x = torch.randn(2, 5, 3, device="cuda")
    x.view(torch.int32)[1, 2, 0] = -1
    state = torch.zeros(2, 2, 128, device="cuda")
    state.view(torch.int32).fill_(-1)
    assert model(x)[0].isnan().any() and not model(x)[0].isnan().all()
    output, _ = model(x.nan_to_num(), state=(state, state))
    output.sum().backward()
    assert output.isnan().all()


def test_a_compiled_lstm_follows_the_switch_of_tf32(tf32):
    model, x = PeepholeLSTM(4, 20, 2, True).cuda(), torch.randn(3, 5, 4, device="cuda")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = model(x)[0], compiled(x)[0]
    assert torch.equal(found, expected)
    weights = list(model.parameters())
    pairs = (torch.autograd.grad(output.sum(), weights) for output in (found, expected))
    assert all(map(torch.equal, *pairs))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    full = compiled(x)[0]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert not torch.equal(full, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_model_of_mixed_precision_searches_in_float32(precision):
    torch.manual_seed(0)
    model = transduce.load("english-phone-recogniser").to("cuda")
    frames, lengths = torch.randn(3, 40, 40, device="cuda"), torch.tensor([40, 7, 22]).cuda()
    network = model.network.transcription_network
    with torch.no_grad():
        exact, _ = network(frames, lengths)
        model.to("cuda", precision)
        found, _ = network(frames, lengths)
        again = model.to("cuda").network.transcription_network(frames, lengths)[0]
    assert found.dtype == torch.float32 and torch.equal(again, exact)
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < 2e-2
    model.to("cuda", precision)
    for hypothesis in greedy_search(model.network, frames, lengths):
        assert isinstance(hypothesis.log_prob, float)


# --- Together -----------------------------------------------------------------------------------


def test_a_whole_step_is_that_of_the_reference():
    torch.manual_seed(0)
    model = Transducer(7, 5, 20, num_layers=2, pooling=2).double()
    frames, num_frames = torch.randn(3, 9, 7, dtype=torch.float64), torch.tensor([9, 4, 5])
    labels, num_labels = torch.randint(1, 6, (3, 4)), torch.tensor([4, 0, 2])

    def gradients(device, backend):
        model.to(device)
        inputs = [x.to(device) for x in (frames, num_frames, labels, num_labels)]
        f, g, num_vectors = model(*inputs[:3], backend=backend)
        loss = transducer_loss(f, g, inputs[2], num_vectors, inputs[3], backend=backend).sum()
        return [x.cpu() for x in torch.autograd.grad(loss, model.parameters())]

    expected = gradients("cpu", "reference")
    assert_close(gradients("cuda", "cuda"), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_step_of_minimum_risk_is_that_of_the_cpu_and_has_the_same_bits_again(backwards):
    torch.manual_seed(0)
    model = Transducer(7, 5, 20, pooling=2, backwards=backwards).double()
    frames, num_frames = torch.randn(3, 9, 7, dtype=torch.float64), torch.tensor([9, 4, 5])
    none = torch.zeros(3, 0).long(), torch.zeros(3).long()
    candidates = [{(1, 2, 5): 0, (2, 5): 1, (2, 2, 2, 1): 3}, {(): 0, (4,): 1}, {(3, 3): 0}]

    def step(device):
        model.to(device)
        batch = TrainingBatch((), frames, num_frames, *none).to(device)
        rows = CandidateErrors(candidates).rows([0, 1, 2]).to(device)
        losses, objective = risk_losses(model, batch, rows)
        found = losses.detach(), *torch.autograd.grad(objective.sum(), model.parameters())
        return [x.cpu() for x in found]

    found, again = step("cuda"), step("cuda")
    assert_same_bits(found, again)
    assert_close(found, step("cpu"), rtol=1e-9, atol=1e-10)


def test_a_whole_step_can_be_captured_in_a_graph():
    torch.manual_seed(0)
    model = Transducer(7, 5, 32).cuda()
    frames, num_frames = torch.randn(3, 9, 7).cuda(), torch.tensor([9, 4, 5]).cuda()
    labels, num_labels = torch.randint(1, 6, (3, 4)).cuda(), torch.tensor([4, 0, 2]).cuda()

    def step():
        f, g, num_vectors = model(frames, num_frames, labels)
        loss = transducer_loss(f, g, labels, num_vectors, num_labels)
        return loss.detach(), *torch.autograd.grad(loss.sum(), model.parameters())

    with torch.cuda.stream(torch.cuda.Stream()):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU here")
def test_a_second_gpu_computes_the_same_while_the_first_is_current():
    f, g, *rest = random_batch(*RAGGED)
    model = PeepholeLSTM(3, 20, bidirectional=True)
    x = torch.randn(2, 5, 3)
    found = {}
    for device in ("cuda:0", "cuda:1"):
        tensors = [t.to(device) for t in (f, g, *rest)]
        found[device] = transducer_loss(*tensors).cpu(), model.to(device)(x.to(device))[0].cpu()
    assert_same_bits(found["cuda:1"], found["cuda:0"])


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("width", [1, 7, 200])
def test_the_search_finds_what_the_sequential_loop_finds_on_the_cpu(width):
    torch.manual_seed(width)
    model = Transducer(4, 6, 20).double()
    with torch.no_grad():
        for network in (model.prediction_network, model.transcription_network):
            network.output.weight *= 10
        model.transcription_network.output.bias[0] += 2
    frames, num_frames = torch.randn(3, 12, 4).double(), torch.tensor([12, 0, 5])
    options = {"beam_width": width, "n_best": width}
    expected = beam_search(model, frames, num_frames, backend="reference", **options)
    found = beam_search(model.cuda(), frames.cuda(), num_frames.cuda(), **options)
    for one, other in zip(found, expected, strict=True):
        assert [h.labels for h in one] == [h.labels for h in other]
        for h, e in zip(one, other, strict=True):
            assert h.log_prob == pytest.approx(e.log_prob, abs=1e-9)
            assert h.frames == e.frames


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("width, most", [(1, 20), (7, 20), (300, 20), (300, 1)])
def test_the_kernels_of_the_search_find_what_tensor_operations_find(width, most, layers, fused):
    torch.manual_seed(width)
    sizes = {"prediction_size": 37, "prediction_layers": layers}
    model = Transducer(4, 45, 20, **sizes).double()
    with torch.no_grad():
        for network in (model.prediction_network, model.transcription_network):
            network.output.weight *= 10
        model.transcription_network.output.bias[0] += 2
    frames, num_frames = torch.randn(2, 14, 4).double().cuda(), torch.tensor([14, 5]).cuda()
    options = {"beam_width": width, "n_best": width, "max_labels_per_frame": most}
    if fused:
        corpus = [torch.randint(1, 46, (9,)).tolist() for _ in range(50)]
        options |= {"fusion": NGram(2, 45, corpus), "fusion_weight": 0.4}
    model.cuda()
    exact = beam_search(model, frames, num_frames, **options)  # float64 has no kernels
    found = beam_search(model.float(), frames.float(), num_frames, **options)
    for one, other in zip(found, exact, strict=True):
        expected = {h.labels: h.log_prob for h in other}
        both = [h for h in one if h.labels in expected]
        assert len(both) >= 0.98 * len(other)  # the last places are decided by a rounding
        assert one[0].labels == other[0].labels
        for h in both:
            assert h.log_prob == pytest.approx(expected[h.labels], abs=1e-4)


@pytest.fixture
def ragged():
    """Some utterances of different lengths, and the network to search them with, on the CPU."""
    torch.manual_seed(1)
    network = PredictionNetwork(11, 21, 2)
    with torch.no_grad():
        for weights in network.parameters():
            weights *= 3
    num_vectors = torch.tensor([23, 0, 7, 1, 40])
    f = 2 * torch.randn(5, 40, 12)
    f[..., 0] += 5
    return f, num_vectors, network


SEARCHES = [(9, None), (40, None), (40, "together"), (9, "no room")]


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("width, how", SEARCHES)
def test_a_batch_is_searched_at_once_as_by_the_sequential_loop(width, how, ragged, monkeypatch):
    f, num_vectors, network = ragged
    options = dict(beam_width=width, n_best=width, length_normalised=False, with_timings=True)
    expected = search(f, num_vectors, network, backend="reference", **options)
    if how == "together":
        monkeypatch.setattr(utterances, "WIDTH_TOGETHER", 0)
    if how == "no room":  # what does not fit is searched again, by another search
        monkeypatch.setattr(utterances, "PREFIXES", 20)
        monkeypatch.setattr(utterances, "PREFIXES_PER_HYPOTHESIS", 0)
    found = search(f.cuda(), num_vectors.cuda(), network.cuda(), **options)
    for one, other in zip(found, expected, strict=True):
        assert [h.labels for h in one] == [h.labels for h in other]
        for h, e in zip(one, other, strict=True):
            assert h.log_prob == pytest.approx(e.log_prob, abs=1e-4)
            assert [t[:3] for t in h.timings] == [t[:3] for t in e.timings]
            for ours, theirs in zip(h.timings, e.timings, strict=True):
                assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-4)


@pytest.mark.parametrize("null", [15.0, 9.0, -9.0])
def test_the_greedy_search_of_a_batch_is_the_references(null):
    torch.manual_seed(2)
    network = PredictionNetwork(39, 128)
    transcriptions = [6 * torch.randn(T, 40) for T in (30, 0, 1, 29, 30, 5, 17, 18, 30)]
    with torch.no_grad():
        for weights in network.parameters():
            weights *= 5
        for f in transcriptions:
            f[:, 0] += null
    options = SearchOptions(max_labels_per_frame=3)
    expected = reference.greedy_searches(Problem(transcriptions, network, None, 40, options))
    on_gpu = [f.cuda() for f in transcriptions]
    found = cuda.greedy_searches(Problem(on_gpu, network.cuda(), None, 40, options))
    for one, other in zip(found, expected, strict=True):
        assert (one.labels, one.frames) == (other.labels, other.frames)
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)
        assert one.num_bounded == other.num_bounded
    assert any(len(one.labels) > 5 and one.num_bounded for one in expected)


class StatelessPredictor(torch.nn.Module):
    """A predictor that is not ours: an embedding of the last two labels."""

    def __init__(self, num_labels):
        super().__init__()
        self.embedding = torch.nn.Embedding(num_labels + 1, 8)
        self.output = torch.nn.Linear(16, num_labels + 1)

    def start(self, batch):
        return torch.zeros(batch, 2, dtype=torch.int64, device=self.output.weight.device)

    def step(self, labels, state):
        state = torch.cat([state[:, 1:], labels[:, None]], 1)
        return self.output(self.embedding(state).flatten(1)), state


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize("joint", [None, lambda f, g: torch.tanh(f) * 3 + g], ids=["sum", "tanh"])
def test_any_networks_are_searched_on_the_gpu_as_by_the_sequential_loop_on_the_cpu(joint):
    torch.manual_seed(0)
    network = StatelessPredictor(6).double()
    f, num_vectors = 3 * torch.randn(2, 15, 7).double(), torch.tensor([15, 8])
    options = dict(beam_width=12, n_best=12, joint=joint, max_labels_per_frame=5)
    expected = search(f, num_vectors, network, backend="reference", **options)
    found = search(f.cuda(), num_vectors.cuda(), network.cuda(), **options)
    for one, other in zip(found, expected, strict=True):
        assert [h.labels for h in one] == [h.labels for h in other]
        for h, e in zip(one, other, strict=True):
            assert h.log_prob == pytest.approx(e.log_prob, abs=1e-9)
            assert h.frames == e.frames


def test_a_compiled_training_step_has_the_same_numbers():
    torch.manual_seed(0)
    model = Transducer(6, 9, 32, num_layers=2).cuda()
    frames, num_frames = torch.randn(3, 20, 6).cuda(), torch.tensor([20, 11, 5]).cuda()
    labels, num_labels = torch.randint(1, 10, (3, 7)).cuda(), torch.tensor([7, 4, 0]).cuda()

    def loss(frames, labels):
        f, g, num_vectors = model(frames, num_frames, labels)
        return transducer_loss(f, g, labels, num_vectors, num_labels).sum()

    expected = torch.autograd.grad(loss(frames, labels), list(model.parameters()))
    compiled = torch.compile(loss, fullgraph=True)
    found = torch.autograd.grad(compiled(frames, labels), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5)


# --- From files ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(with_timings=False),
        SearchOptions(4, n_best=2, with_timings=False),
        SearchOptions(4, with_timings=True),
    ],
    ids=["greedy", "beam", "timings"],
)
def test_files_have_the_transcripts_of_the_cpu(tmp_path, options):
    generator = torch.Generator().manual_seed(0)
    paths = [tmp_path / f"{n}.flac" for n in range(40)]
    for n, path in enumerate(paths):
        tone = torch.sin(torch.arange(4000 + 997 * n) * (0.05 + 0.01 * n))
        wave = 0.1 * tone + 0.02 * torch.randn(len(tone), generator=generator)
        soundfile.write(path, wave.numpy(), 16_000)
    paths[7].write_bytes(b"no sound")
    model = transduce.load("english-phone-recogniser")
    expected = list(model.transcribe(paths, options))
    found = list(model.to("cuda").transcribe(paths, options))
    assert str(found.pop(7)) == str(expected.pop(7))  # the error
    assert [one.recording for one in found] == [one.recording for one in expected]
    same = [a.symbols == b.symbols for a, b in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 1  # rounding of the frames may turn a close decision
    likelihoods = [[one.hypotheses[0].log_prob for one in every] for every in (found, expected)]
    for a, b, is_same in zip(*likelihoods, same, strict=True):
        assert not is_same or a == pytest.approx(b, abs=0.05)
