"""What is seen in an output lattice: variables, bars, sensitivities."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from transduce.alphabet import NULL, Alphabet
from transduce.analysis import output_bars, sensitivity, view_lattice
from transduce.analysis.sensitivity import one_hot
from transduce.checkpoint import TrainedModel
from transduce.corpus import Signature
from transduce.data.pairs import Notation
from transduce.lattice.loss import transducer_loss
from transduce.networks import PredictionNetwork, TranscriptionNetwork, Transducer
from transduce.recipe import NetworkConfig

INPUTS, LABELS = 3, 4
TARGET = [2, 4, 4, 1, 3]
SYMBOLS = Signature(Alphabet(list("abcd")), Notation("characters", None))


def transducer(backend="reference", pooling=1, num_layers=1, scale=8.0):
    """A transducer of large weights, so that its probabilities differ, in float64."""
    torch.manual_seed(3)
    network = Transducer(INPUTS, LABELS, 5, num_layers, pooling=pooling, backend=backend)
    for weights in network.parameters():
        weights.data *= scale
    return TrainedModel(network.double(), NetworkConfig(pooling=pooling), SYMBOLS)


def random_frames(num_frames=7):
    return torch.randn(num_frames, INPUTS, dtype=torch.float64)


@pytest.fixture
def view():
    model = transducer()
    return view_lattice(model, random_frames(), TARGET)


def test_the_product_sums_to_one_on_every_diagonal(view):
    T, U = view.num_vectors, view.num_labels
    for n in range(T + U):
        diagonal = [view.log_product[t, n - t] for t in range(T) if 0 <= n - t <= U]
        assert_close(torch.stack(diagonal).exp().sum().item(), 1.0)  # Eq. 19


def test_the_product_is_that_of_the_variables(view):
    expected = view.log_alpha + view.log_beta - view.log_likelihood
    assert_close(view.log_product, expected)


def test_the_likelihood_is_that_of_the_loss():
    model, frames = transducer(), random_frames()
    view = view_lattice(model, frames, TARGET)
    labels = torch.tensor([TARGET])
    f, g, num_vectors = model.network(frames[None], torch.tensor([7]), labels)
    loss = transducer_loss(f, g, labels, num_vectors, torch.tensor([5]))
    assert view.log_likelihood == pytest.approx(-loss.item())
    assert_close(view.transcription, f[0].detach())
    assert_close(view.prediction, g[0].detach())


def test_the_best_path_goes_by_single_arrows_from_the_first_node_to_the_last(view):
    path = view.best_path
    assert path[0] == (0, 0) and path[-1] == (6, 5) and len(path) == 7 + 5
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(path)}
    assert steps == {(1, 0), (0, 1)}
    emitted = [a[0] for a, b in pairwise(path) if b[1] > a[1]]
    assert emitted == [timing.frame for timing in view.timings]


def test_the_bars_are_softmaxes_of_f_plus_g_and_of_each(view):
    t, u = 4, 2
    f, g = view.transcription[t], view.prediction[u]
    bars = output_bars(view, t, u, num=LABELS + 1)
    for found, vector in zip(bars, (f + g, f, g), strict=True):
        probabilities = vector.softmax(0)
        assert [bar.label for bar in found] == probabilities.argsort(descending=True).tolist()
        for bar in found:
            assert bar.probability == pytest.approx(probabilities[bar.label].item())
    by_label = dict(bars.output)
    assert by_label[NULL] == pytest.approx(view.log_null[t, u].exp().item())
    assert by_label[view.next_label(u)] == pytest.approx(view.log_label[t, u].exp().item())
    assert output_bars(view, t, u, num=2).output == bars.output[:2]


def probability(network, frames, previous, t, u, k):
    f, _ = network.transcription_network(frames[None])
    g = network.prediction_network(previous[None])
    return (f[0, t] + g[0, u]).softmax(0)[k].item()


def differences(function, x, step=1e-6):
    """The central differences of a function of x, element by element."""
    found = torch.zeros_like(x)
    for i in range(x.numel()):
        apart = []
        for sign in (1, -1):
            moved = x.clone()
            moved.view(-1)[i] += sign * step
            apart.append(function(moved))
        found.view(-1)[i] = (apart[0] - apart[1]) / (2 * step)
    return found


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "t, u, label, kind",
    [
        (2, 3, None, {}),
        (6, 5, None, {}),  # the last row: null
        (0, 0, 4, {}),
        (1, 4, NULL, {"pooling": 3, "num_layers": 2}),
    ],
)
@torch.no_grad()
def test_sensitivities_are_finite_differences(backend, t, u, label, kind):
    model, frames = transducer(backend, **kind), random_frames()
    view = view_lattice(model, frames, TARGET)
    k = label if label is not None else [*TARGET, NULL][u]
    previous = one_hot(torch.tensor(TARGET), LABELS).double()
    by_inputs, by_outputs = sensitivity(model, view, t, u, label)
    by_hand = differences(lambda x: probability(model.network, x, previous, t, u, k), frames)
    assert_close(by_inputs, by_hand, atol=1e-8, rtol=1e-5)
    by_hand = differences(lambda y: probability(model.network, frames, y, t, u, k), previous)
    assert_close(by_outputs, by_hand, atol=1e-8, rtol=1e-5)
    assert by_inputs.abs().amax(1).min() > 0  # both ways in time
    assert (by_outputs[:u] != 0).all() and (by_outputs[u:] == 0).all()


@torch.no_grad()
def test_the_sensitivity_to_text_is_by_every_symbol_at_each_place():
    model, ids = transducer(), torch.tensor([1, 3, 0, 2])
    vectors = one_hot(ids, INPUTS).double()
    view = view_lattice(model, ids, TARGET)
    assert_close(view.transcription, view_lattice(model, vectors, TARGET).transcription)
    previous = one_hot(torch.tensor(TARGET), LABELS).double()
    by_hand = differences(lambda x: probability(model.network, x, previous, 1, 2, 4), vectors)
    assert_close(sensitivity(model, view, 1, 2).inputs, by_hand, atol=1e-8, rtol=1e-5)


def test_looking_leaves_no_gradients_in_the_model():
    model = transducer("cpu")
    sensitivity(model, view_lattice(model, random_frames(), TARGET), 2, 3)
    assert all(weights.grad is None for weights in model.network.parameters())


def test_a_target_may_be_empty():
    model = transducer()
    view = view_lattice(model, random_frames(), [])
    assert view.log_product.shape == (7, 1) and view.timings == ()
    by_inputs, by_outputs = sensitivity(model, view, 3, 0)
    assert by_inputs.abs().sum() > 0 and by_outputs.shape == (0, LABELS)


@pytest.mark.parametrize("t, u", [(-1, 0), (7, 0), (0, 6), (0, -1)])
def test_a_node_outside_of_the_lattice_is_refused(view, t, u):
    message = f"no node {t},{u} in the output lattice; t is 0 to 6 and u 0 to 5"
    with pytest.raises(ValueError, match=message):
        output_bars(view, t, u)
    with pytest.raises(ValueError, match=message):
        sensitivity(transducer(), view, t, u)


def test_a_label_that_is_none_is_refused(view):
    with pytest.raises(ValueError, match="no label 5; they are 0, which is null, to 4"):
        sensitivity(transducer(), view, 0, 0, 5)
    with pytest.raises(ValueError, match="label 5 at position 1"):
        view_lattice(transducer(), random_frames(), [1, 5])


def test_an_input_without_frames_is_refused():
    with pytest.raises(ValueError, match="the input has no frames"):
        view_lattice(transducer(), random_frames(0), TARGET)


@pytest.mark.parametrize(
    "network, kind, name",
    [
        (TranscriptionNetwork(INPUTS, LABELS, 5), "ctc", "a CTC network"),
        (PredictionNetwork(LABELS, 5), "prediction", "a prediction network"),
    ],
)
def test_networks_without_a_lattice_are_refused(network, kind, name):
    model = TrainedModel(network, NetworkConfig(kind), SYMBOLS)
    with pytest.raises(ValueError, match=f"{name} alone has no output lattice"):
        view_lattice(model, random_frames(), TARGET)
