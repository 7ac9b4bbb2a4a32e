"""A whole model under torch.compile: our LSTM and our loss in one graph."""

import pytest
import torch
from torch.testing import assert_close

from transduce import Transducer, beam_search, transducer_loss


def problem(seed=0):
    torch.manual_seed(seed)
    model = Transducer(6, 5, 8, num_layers=2, pooling=2)
    frames, num_frames = torch.randn(3, 14, 6), torch.tensor([14, 9, 3])
    labels, num_labels = torch.randint(1, 6, (3, 4)), torch.tensor([4, 2, 0])
    return model, frames, num_frames, labels, num_labels


def loss_of(model, frames, num_frames, labels, num_labels):
    f, g, num_vectors = model(frames, num_frames, labels)
    return transducer_loss(f, g, labels, num_vectors, num_labels, reduction="sum")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, in inductor
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.slow
def test_a_compiled_training_step_has_the_same_numbers(backend):
    model, *batch = problem()
    weights = list(model.parameters())
    expected_loss = loss_of(model, *batch)
    expected = torch.autograd.grad(expected_loss, weights)
    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    loss = compiled(model, *batch)
    found = torch.autograd.grad(loss, weights)
    assert_close(loss, expected_loss)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model_still_says_what_is_wrong():
    model, frames, num_frames, labels, num_labels = problem()
    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    labels[1, 1] = 9
    with pytest.raises(Exception, match="9"):
        compiled(model, frames, num_frames, labels, num_labels)


def test_the_gradient_of_a_function_of_the_weights_is_that_of_autograd():
    model, *batch = problem()
    weights = dict(model.named_parameters())

    def loss(weights):
        f, g, num_vectors = torch.func.functional_call(model, weights, tuple(batch[:3]))
        return transducer_loss(f, g, batch[2], num_vectors, batch[3]).sum()

    found = torch.func.grad(loss)(weights)
    expected = torch.autograd.grad(loss(weights), list(weights.values()))
    for name, other in zip(weights, expected, strict=True):
        assert_close(found[name], other)


def test_a_model_whose_networks_are_compiled_is_searched():
    model, frames, num_frames, *_ = problem()
    expected = beam_search(model, frames, num_frames, beam_width=3)
    torch.compiler.reset()
    model.transcription_network = torch.compile(model.transcription_network, backend="eager")
    found = beam_search(model, frames, num_frames, beam_width=3)
    for one, other in zip(found, expected, strict=True):
        assert [h.labels for h in one] == [h.labels for h in other]
        assert [h.log_prob for h in one] == pytest.approx([h.log_prob for h in other], abs=1e-4)
