"""The losses on a GPU, held against the reference like any backend's."""

import pytest
import torch
from lattices import (
    RAGGED,
    SHAPES,
    Joint,
    assert_as_exact_as_the_reference,
    loss_and_gradients,
    random_batch,
)

from transduce import rnnt_loss, transducer_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
]
WIDE = {"two blocks of labels": ([9], [1100], 3), "many labels": ([40, 7], [33, 64], 60)}


def joint(shape, scale=1.0):
    f, g, *rest = random_batch(*shape, scale=scale)
    return Joint(f[:, :, None] + g[:, None], *rest)


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("shape", (SHAPES | WIDE).values(), ids=SHAPES | WIDE)
def test_the_additive_loss_is_as_exact_as_the_reference(shape, scale):
    assert_as_exact_as_the_reference(transducer_loss, random_batch(*shape, scale=scale), "triton")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_loss_of_logits_is_as_exact_as_the_reference(shape, fused):
    batch = joint(shape)
    if not fused:
        batch = batch._replace(logits=batch.logits.log_softmax(-1))
    options = {"blank": 0, "reduction": "none", "fused_log_softmax": fused}
    assert_as_exact_as_the_reference(rnnt_loss, batch, "triton", **options)


def test_a_result_is_the_same_from_run_to_run_and_on_any_stream():
    batch = random_batch(*SHAPES["a long lattice"])
    first = loss_and_gradients(transducer_loss, batch, "triton")
    with torch.cuda.stream(torch.cuda.Stream()):
        second = loss_and_gradients(transducer_loss, batch, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_step_can_be_captured_in_a_graph():
    f, g, *rest = (x.cuda() for x in random_batch(*RAGGED))
    leaves = [x.requires_grad_() for x in (f, g)]

    def step():
        loss = transducer_loss(*leaves, *rest)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))


def test_what_cannot_be_is_nan_and_nothing_waits_to_say_so():
    f, g, labels, num_frames, num_labels = (x.cuda() for x in random_batch(*RAGGED))
    for bad in (0, -3, 10**9):
        wrong = labels.clone()
        wrong[0, 0] = bad
        loss = transducer_loss(f, g, wrong, num_frames, num_labels)
        assert loss.isnan().tolist() == [True, False, False, False, False]
