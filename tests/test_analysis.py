"""The output lattice, its output distributions and sensitivities, and the figures."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from explored import text_model
from slow import slow_except
from torch.testing import assert_close

from transduce import cli
from transduce.alphabet import NULL, Alphabet
from transduce.analysis import arrows, output_bars, sensitivity, view_lattice
from transduce.analysis.colours import DECADES, heat_colours
from transduce.analysis.figures import (
    _map_size,
    lattice_figure,
    save_figure,
    sensitivity_figure,
    variables_figure,
)
from transduce.analysis.sensitivity import one_hot
from transduce.architectures import CTC, NetworkConfig, NextLabelPredictor, Transducer
from transduce.audio.features import FeatureSettings
from transduce.data.pairs import Notation
from transduce.decoding import Hypothesis
from transduce.lattice.loss import best_alignment, transducer_loss
from transduce.model.checkpoint import TrainedModel, save_model
from transduce.model.signature import Signature

INPUTS, LABELS = 3, 4
TARGET = [2, 4, 4, 1, 3]
SYMBOLS = Signature(Alphabet(list("abcd")), Notation("characters", None))


def transducer(pooling=1, num_layers=1, scale=8.0, backwards=False):
    """Return a transducer in float64 with large weights, so that its probabilities differ."""
    torch.manual_seed(3)
    network = Transducer(INPUTS, LABELS, 5, num_layers, pooling=pooling, backwards=backwards)
    for weights in network.parameters():
        weights.data *= scale
    config = NetworkConfig(pooling=pooling, backwards=backwards)
    return TrainedModel(network.double(), config, SYMBOLS)


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


def test_the_product_is_alpha_times_beta_over_the_likelihood(view):
    expected = view.log_alpha + view.log_beta - view.log_likelihood
    assert_close(view.log_product, expected)


def test_the_likelihood_matches_the_loss():
    model, frames = transducer(), random_frames()
    view = view_lattice(model, frames, TARGET)
    labels = torch.tensor([TARGET])
    f, g, num_vectors = model.network(frames[None], torch.tensor([7]), labels)
    loss = transducer_loss(f, g, labels, num_vectors, torch.tensor([5]))
    assert view.log_likelihood == pytest.approx(-loss.item())
    assert_close(view.transcription, f[0].detach())
    assert_close(view.prediction, g[0].detach())


def test_the_best_path_follows_single_arrows_from_the_first_node_to_the_last(view):
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
    """Return the central differences of a function with respect to each element of x."""
    found = torch.zeros_like(x)
    for i in range(x.numel()):
        apart = []
        for sign in (1, -1):
            moved = x.clone()
            moved.view(-1)[i] += sign * step
            apart.append(function(moved))
        found.view(-1)[i] = (apart[0] - apart[1]) / (2 * step)
    return found


@pytest.mark.parametrize(
    "t, u, label, kind",
    [
        (2, 3, None, {}),
        (3, 4, None, {}),  # the last label
        (6, 5, None, {}),  # the last row: null
        (0, 0, 4, {}),
        (1, 4, NULL, {"pooling": 3, "num_layers": 2}),
    ],
)
@torch.no_grad()
def test_sensitivities_are_finite_differences(t, u, label, kind):
    model, frames = transducer(**kind), random_frames()
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
def test_the_sensitivity_to_text_has_a_derivative_for_every_symbol_at_each_position():
    model, ids = transducer(), torch.tensor([1, 3, 0, 2])
    vectors = one_hot(ids, INPUTS).double()
    view = view_lattice(model, ids, TARGET)
    assert_close(view.transcription, view_lattice(model, vectors, TARGET).transcription)
    previous = one_hot(torch.tensor(TARGET), LABELS).double()
    by_hand = differences(lambda x: probability(model.network, x, previous, 1, 2, 4), vectors)
    assert_close(sensitivity(model, view, 1, 2).inputs, by_hand, atol=1e-8, rtol=1e-5)


def test_a_nearly_impossible_output_has_nonzero_sensitivities_in_float32():
    model, frames = transducer(), random_frames()
    model.network.transcription_network.output.bias.data[2] = -200  # exp(-200) is 0 in float32
    exact = sensitivity(model, view_lattice(model, frames, TARGET), 3, 2, label=2)
    model.network.float()
    found = sensitivity(model, view_lattice(model, frames.float(), TARGET), 3, 2, label=2)
    for single, double in zip(found, exact, strict=True):
        assert double.abs().max() > 0
        assert_close(single, double, atol=1e-4 * double.abs().max().item(), rtol=1e-3)


def test_sensitivities_leave_no_gradients_in_the_model():
    model = transducer()
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


def test_a_label_that_does_not_exist_is_refused(view):
    with pytest.raises(ValueError, match=r"no label 5; give 0 \(null\) to 4"):
        sensitivity(transducer(), view, 0, 0, 5)
    with pytest.raises(ValueError, match="label 5 at position 1"):
        view_lattice(transducer(), random_frames(), [1, 5])


def test_an_input_without_frames_is_refused():
    with pytest.raises(ValueError, match="the input has no frames"):
        view_lattice(transducer(), random_frames(0), TARGET)


@pytest.mark.parametrize(
    "network, kind, name",
    [
        (CTC(INPUTS, LABELS, 5), "ctc", "a CTC network"),
        (NextLabelPredictor(LABELS, 5, with_null=False), "prediction", "a prediction network"),
    ],
)
def test_networks_without_a_lattice_are_refused(network, kind, name):
    model = TrainedModel(network, NetworkConfig(kind), SYMBOLS)
    with pytest.raises(ValueError, match=f"{name} alone has no output lattice"):
        view_lattice(model, random_frames(), TARGET)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_posteriors_of_the_arrows_out_of_a_node_sum_to_that_of_the_node(backwards):
    view = view_lattice(transducer(backwards=backwards), random_frames(), TARGET)
    out, into = torch.zeros(8, 6).double(), torch.zeros(8, 6).double()
    best = []
    for arrow in arrows(view):
        probability = math.exp(arrow.log_posterior)
        out[arrow.start] += probability
        if arrow.end != view.terminal:
            into[arrow.end] += probability
        best += [arrow] * arrow.is_best
    assert_close(out[:7], view.log_product.exp())
    into[view.start] += 1
    assert_close(into[:7], view.log_product.exp())
    assert len(best) == 12
    _, log_prob = best_alignment(view.log_null, view.log_label)
    assert backwards or sum(arrow.log_prob for arrow in best) == pytest.approx(log_prob)


# --- Backwards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [1, 3])
def test_the_lattice_of_a_backward_transducer_is_shown_in_forward_time(pooling):
    model, frames = transducer(pooling, backwards=True), random_frames()
    view = view_lattice(model, frames, TARGET)
    T, U = -(-7 // pooling), 5
    own = view_lattice(transducer(pooling), frames.flip(0), TARGET[::-1])  # the same weights
    assert view.backwards and view.log_likelihood == own.log_likelihood
    assert torch.equal(view.frames, frames) and view.labels.tolist() == TARGET
    for name in ("log_alpha", "log_beta", "log_product", "log_null", "log_label"):
        assert torch.equal(getattr(view, name), getattr(own, name).flip(0, 1)), name
    assert view.best_path == tuple((T - 1 - t, U - u) for t, u in reversed(own.best_path))
    hypothesis = Hypothesis(tuple(TARGET[::-1]), 0.0, 0.0, (), own.timings)
    assert view.timings == hypothesis.reversed(T).timings
    assert view.start == (T - 1, U) and view.terminal == (-1, 0)
    for t, u in ((T - 1, U), (1, 2), (0, 0), (1, 5)):
        assert view.next_label(u) == own.next_label(U - u)
        assert output_bars(view, t, u) == output_bars(own, T - 1 - t, U - u)
        found = sensitivity(model, view, t, u)
        mirrored = sensitivity(transducer(pooling), own, T - 1 - t, U - u)
        for one, other in zip(found, mirrored, strict=True):
            assert torch.equal(one, other.flip(0))
        assert (found.outputs[:u] == 0).all() and (found.outputs[u:] != 0).all()
    for i in range(U):
        t, u = view.emitting_node(i)
        assert view.next_label(u) == TARGET[i] and (t, u - 1) in view.best_path


def test_a_backward_transducer_pools_from_the_end():
    view = view_lattice(transducer(3, backwards=True), random_frames(7), TARGET)
    assert [view.first_frame(t) for t in range(3)] == [-2, 1, 4]
    forward = view_lattice(transducer(3), random_frames(7), TARGET)
    assert [forward.first_frame(t) for t in range(3)] == [0, 3, 6]


# --- Figures ------------------------------------------------------------------------------------


def letters(backwards=False):
    """Return a model of letters to letters and the lattice of a word."""
    signature = Signature(
        Alphabet(list("abcd")), Notation("characters", None), Alphabet(list("xyz"))
    )
    model = replace(transducer(backwards=backwards), signature=signature)
    return model, view_lattice(model, torch.tensor([1, 3, 0, 2, 2, 1, 1]), TARGET)


def speech(pooling=3, num_frames=31, backwards=False):
    """Return a model of sound and the lattice of an utterance."""
    signature = replace(SYMBOLS, features=FeatureSettings())
    model = replace(transducer(pooling=pooling, backwards=backwards), signature=signature)
    return model, view_lattice(model, random_frames(num_frames), TARGET)


def frames():
    """Return a model of frames that were computed elsewhere, and a lattice."""
    model = transducer(pooling=2)
    return model, view_lattice(model, random_frames(15), TARGET)


def backwards():
    return letters(backwards=True)


FIGURES = {
    "lattice": lattice_figure,
    "variables": variables_figure,
    "sensitivity": lambda model, view: sensitivity_figure(model, view, 2, 3),
}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
@pytest.mark.parametrize("of", slow_except({1}, [letters, speech, frames, backwards]))
def test_figures_of_all_kinds_of_input_are_drawn(draw, of, tmp_path):
    save_figure(draw(*of()), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_bytes().startswith(b"<?xml")


def test_figures_are_written_in_the_format_of_the_suffix(tmp_path):
    figure = lattice_figure(*letters())
    for suffix, beginning in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        save_figure(figure, tmp_path / f"figure{suffix}")
        assert (tmp_path / f"figure{suffix}").read_bytes().startswith(beginning)
    content = (tmp_path / "figure.png").read_bytes()
    pixels = [int.from_bytes(content[i : i + 4]) for i in (16, 20)]
    assert pixels == pytest.approx(300 * figure.get_size_inches(), abs=1)
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".pdf"}
    with pytest.raises(ValueError, match=r"figure\.jpg must end in \.png, \.svg or \.pdf"):
        save_figure(figure, tmp_path / "figure.jpg")
    with pytest.raises(ValueError, match="cannot be written"):
        save_figure(figure, tmp_path / "figure.png" / "figure.png")


def test_the_plot_command_draws_a_transducer_that_reads_backwards(tmp_path, capsys):
    save_model(text_model(backwards=True), tmp_path)
    output = tmp_path / "figure.svg"
    for figure in ("lattice", "variables", "sensitivity"):
        cli.plot(figure, tmp_path, "cab", target="A DD", output=output)
        assert output.read_bytes().startswith(b"<?xml")
        output.unlink()
    assert capsys.readouterr().out == f"{output}\n" * 3


def test_the_arrows_of_the_best_alignment_have_their_probabilities_beside_them():
    model, view = letters()
    [axes] = lattice_figure(model, view).axes
    written = [float(text.get_text()) for text in axes.texts if text.get_text()]
    _, log_prob = best_alignment(view.log_null, view.log_label)
    arrows = pairwise([*view.best_path, (7, 5)])
    right = [(view.log_label if b[1] > a[1] else view.log_null)[a].exp().item() for a, b in arrows]
    assert sorted(written) == pytest.approx(sorted(right), abs=0.006)
    assert math.prod(right) == pytest.approx(math.exp(log_prob))
    num_arrows = 6 * 6 + 1 + 7 * 5  # to the right, the last null, and upwards
    assert len(arrows_of(axes)) == num_arrows
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list("xz∅yyxx")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["∅", *"bddac"]


def arrows_of(axes):
    """Return the shade of each arrow by its ends; 0 is black."""
    found = {}
    for text in axes.texts:
        if not text.get_text():
            ends = tuple(map(round, text.xyann)), tuple(map(round, text.xy))
            found[ends] = text.arrow_patch.get_edgecolor()
    return found


@pytest.mark.parametrize("backwards", [False, True])
def test_an_arrow_is_as_dark_as_its_posterior(backwards):
    model, view = letters(backwards)
    [axes] = lattice_figure(model, view).axes
    shades = arrows_of(axes)
    expected = {(arrow.start, arrow.end): arrow for arrow in arrows(view)}
    assert set(shades) == set(expected) and len(shades) == 6 * 6 + 1 + 7 * 5
    for ends, arrow in expected.items():
        if not arrow.is_best:
            darkness = 0.88 * (1 - math.exp(arrow.log_posterior))
            assert shades[ends][:3] == pytest.approx([darkness] * 3, abs=1e-3)
    direction = -1 if backwards else 1
    assert {(b[0] - a[0], b[1] - a[1]) for a, b in shades} == {(direction, 0), (0, direction)}
    rows = [tick.get_text() for tick in axes.get_yticklabels()]
    assert rows == ([*"bddac", "∅"] if backwards else ["∅", *"bddac"])


def test_the_figures_name_the_probability_of_the_target():
    model, view = letters()
    expected = f"Pr(y|x) = {math.exp(view.log_likelihood):.3g}"
    if view.log_likelihood < math.log(1e-3):
        digits, power = f"{math.exp(view.log_likelihood):.2e}".split("e-")
        expected = f"Pr(y|x) = {digits}·10⁻" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(power)]
    assert lattice_figure(model, view).axes[0].get_title() == expected
    assert variables_figure(model, view).get_suptitle() == expected
    assert sensitivity_figure(model, view, 2, 3).get_suptitle().endswith(expected)
    likely = replace(view, log_likelihood=math.log(0.5))
    assert lattice_figure(model, likely).axes[0].get_title() == "Pr(y|x) = 0.5"


def test_maps_that_are_compared_have_one_colour_scale():
    model, view = speech()
    figure = variables_figure(model, view)
    *maps, _, bar = figure.axes[:5]
    [limits] = {axes.images[0].get_clim() for axes in maps[:3]}
    lowest = min(
        float(log_values[node])
        for log_values in (view.log_alpha, view.log_beta, view.log_product)
        for node in view.best_path
    )
    assert limits == (pytest.approx(lowest - 40), 0)
    assert len(figure.axes) == 5 and bar.get_ylim() == pytest.approx(limits)
    figure = sensitivity_figure(model, view, 2, 3)
    maps = [image for axes in figure.axes for image in axes.images if image.get_clim()[0] == -3]
    assert len(maps) == 2
    for image in maps:
        assert image.get_clim() == (-DECADES, 0)
        expected = [*(heat_colours()[128] / 255), 1]
        assert image.get_cmap()(128) == pytest.approx(expected)


@pytest.mark.parametrize("num_labels, every", slow_except({0, 1}, [(27, 1), (115, 2), (240, 4)]))
def test_the_names_of_many_labels_do_not_overlap_and_none_is_left_out_silently(num_labels, every):
    model = replace(transducer(), signature=replace(SYMBOLS, features=FeatureSettings()))
    target = [1 + i % LABELS for i in range(num_labels)]
    view = view_lattice(model, random_frames(400), target)
    figure = variables_figure(model, view)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    ticks = axes.yaxis.get_major_ticks()
    names = ["∅", *(model.signature.targets.decode(target))]
    assert [tick.label1.get_text() for tick in ticks] == names[::every]
    boxes = [tick.label1.get_window_extent() for tick in ticks]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 : i + 6])
    note = {1: "", 2: "every 2nd label is named", 4: "every 4th label is named"}[every]
    assert axes.get_ylabel() == note
    assert every == 1 or len(axes.yaxis.get_minor_ticks()) >= num_labels - len(ticks)


def test_a_lattice_too_large_for_arrows_is_refused():
    model, view = speech(1, 21)
    with pytest.raises(ValueError, match=r"21 vectors and 5 labels, .* plot its variables instead"):
        lattice_figure(model, view)


def test_the_axis_of_time_is_shared_and_in_seconds():
    model, view = speech()
    spectrogram = torch.rand(31, 64)
    *maps, frames = variables_figure(model, view, spectrogram).axes[:4]
    for axes in maps:
        assert axes.images[0].get_extent() == pytest.approx([0, 11 * 0.03, -0.5, 5.5])
        assert axes.get_xlim() == frames.get_xlim()
    assert frames.images[0].get_extent()[:2] == pytest.approx([0, 0.31])
    assert frames.images[0].get_array().shape == (64, 31)
    assert frames.get_xlabel() == "time, seconds"
    for axes, values in zip(maps, (view.log_alpha, view.log_beta, view.log_product), strict=True):
        assert_close(torch.from_numpy(axes.images[0].get_array().data), values.T)


def test_a_backward_lattice_is_at_the_time_of_its_frames():
    model, view = speech(backwards=True)
    *maps, frames = variables_figure(model, view, torch.rand(31, 64)).axes[:4]
    assert maps[0].images[0].get_extent()[:2] == pytest.approx([-0.02, 0.31])
    assert frames.images[0].get_extent()[:2] == pytest.approx([0, 0.31])
    figure = sensitivity_figure(model, view, 2, 3)
    product, labels = figure.axes[0], figure.axes[2]
    assert product.lines[0].get_xdata() == pytest.approx([2.5 * 0.03 - 0.02] * 2)
    assert labels.images[0].get_extent()[2:] == [-0.5, 4.5]


def test_the_crosshair_is_at_the_middle_of_its_node():
    model, view = speech()
    product = sensitivity_figure(model, view, 2, 3).axes[0]
    across, along = product.lines
    assert across.get_xdata() == pytest.approx([2.5 * 0.03] * 2)
    assert list(along.get_ydata()) == [3, 3]


def test_equal_steps_of_a_map_have_equal_colour_differences():
    colours = heat_colours()[::8] / 255
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    # The matrices of Oklab, in which distances are differences as they are seen.
    cones = np.cbrt(
        linear
        @ [
            [0.4122214708, 0.2119034982, 0.0883024619],
            [0.5363325363, 0.6806995451, 0.2817188376],
            [0.0514459929, 0.1073969566, 0.6299787005],
        ]
    )
    seen = cones @ [
        [0.2104542553, 1.9779984951, 0.0259040371],
        [0.7936177850, -2.4285922050, 0.7827717662],
        [-0.0040720468, 0.4505937099, -0.8086757660],
    ]
    steps = np.linalg.norm(np.diff(seen, axis=0), axis=1)
    assert np.all(np.diff(seen[:, 0]) > 0) and steps.max() < 1.4 * steps.min()


def test_the_map_of_a_text_grows_with_it_within_bounds():
    sizes = {
        (num_letters, num_labels): _map_size(
            SimpleNamespace(frames=torch.zeros(num_letters), num_labels=num_labels)
        )
        for num_letters, num_labels in ((1, 1), (20, 19), (1000, 1000))
    }
    assert sizes == {(1, 1): (1.5, 3.5), (20, 19): (4.4, 8.0), (1000, 1000): (20.0, 20.0)}
