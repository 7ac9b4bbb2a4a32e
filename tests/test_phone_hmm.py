import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.testing import assert_close

from transduce.alignment import boundaries as boundaries_module
from transduce.alignment import phone_hmm
from transduce.alignment.boundaries import Heard, boundaries, emission_boundaries
from transduce.alignment.phone_hmm import (
    ACOUSTIC_SCALE,
    Edge,
    PhoneHMM,
    boundary_posterior,
    shipped_hmm,
    state_lattice,
)
from transduce.audio.features import FeatureSettings
from transduce.decoding.search import transcribe
from transduce.model.model import load
from transduce.model.tensors import CheckpointError, write_tensors

SETTINGS = FeatureSettings(window=0.020, shift=0.005, num_deltas=2, delta_reach=3)
SYMBOLS = ("A", "B", "C", "D")


def random_hmm(spread=1.0, gaussians=2, seed=0):
    """Return a model of four phones; `spread` is the distance of the means from each other."""
    generator = torch.Generator().manual_seed(seed)
    S, M, D = 3 * len(SYMBOLS) + 1, gaussians, SETTINGS.size
    means = spread * torch.randn(S, 1, D, generator=generator)
    means = means + 0.3 * torch.randn(S, M, D, generator=generator)
    variances = 0.5 + torch.rand(S, M, D, generator=generator)
    log_weights = torch.randn(S, M, generator=generator).log_softmax(1)
    scales = 1 + torch.rand(D, generator=generator)
    return PhoneHMM(SYMBOLS, SETTINGS, scales, means, variances, log_weights)


def mixture(hmm, state):
    normals = Normal(hmm.means[state], hmm.variances[state].sqrt())
    return MixtureSameFamily(Categorical(logits=hmm.log_weights[state]), Independent(normals, 1))


def draw(hmm, states, durations):
    """Draw frames from each state in turn."""
    torch.manual_seed(1)
    return torch.cat([mixture(hmm, s).sample((n,)) for s, n in zip(states, durations, strict=True)])


def speak(hmm, monkeypatch, frames):
    """Let the model hear these frames; return samples of their duration."""
    monkeypatch.setattr(PhoneHMM, "frames", lambda self, samples: frames)
    settings = hmm.settings
    return torch.zeros((len(frames) - 1) * settings.shift_samples + settings.window_samples)


def planted(hmm, phones, pauses, seed=2):
    """Return frames of phones with pauses after them, and the first frame and end of each."""
    generator = torch.Generator().manual_seed(seed)
    states, durations, edges = [hmm.silence], [20], []
    for phone, pause in zip(phones, pauses, strict=True):
        start = sum(durations)
        states += [3 * SYMBOLS.index(phone) + i for i in range(3)]
        durations += torch.randint(1, 9, (3,), generator=generator).tolist()
        edges.append((start, sum(durations)))
        if pause:
            states.append(hmm.silence)
            durations.append(pause)
    return draw(hmm, states, durations), edges


def test_log_likelihoods_are_those_of_mixtures_of_normal_distributions():
    hmm = random_hmm(gaussians=3)
    frames, states = torch.randn(7, SETTINGS.size), torch.tensor([4, 12, 4, 0])
    wanted = torch.stack([mixture(hmm, int(s)).log_prob(frames) for s in states], 1)
    assert_close(hmm.log_likelihoods(frames, states), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("T, U", [(2, 1), (6, 1), (5, 4), (8, 3), (7, 5)])
def test_the_posterior_is_that_of_all_ways_to_divide_the_frames(T, U):
    torch.manual_seed(T)
    log_likelihoods = 10 * torch.randn(T, U + 1, dtype=torch.float64)
    ways = list(combinations(range(1, T), U))  # the first frame of each state but the first
    assert len(ways) == math.comb(T - 1, U)
    scores = torch.stack(
        [
            sum(log_likelihoods[a:b, u].sum() for u, (a, b) in enumerate(pairwise((0, *way, T))))
            for way in ways
        ]
    )
    wanted = torch.zeros(T, U, dtype=torch.float64)
    for way, probability in zip(ways, (ACOUSTIC_SCALE * scores).softmax(0), strict=True):
        for u, t in enumerate(way):
            wanted[t, u] += probability
    posterior = boundary_posterior(log_likelihoods)
    assert_close(posterior, wanted)
    assert_close(posterior.sum(0), torch.ones(U, dtype=torch.float64))
    mean, low, high = phone_hmm._mean_and_quantiles(posterior)
    exact = torch.arange(T, dtype=torch.float64) @ wanted
    for u in range(U):
        assert mean[u] == pytest.approx(min(max(float(exact[u]), low[u]), high[u]))
        assert wanted[: low[u], u].sum() < 0.05 <= wanted[: low[u] + 1, u].sum()
        assert wanted[: high[u], u].sum() < 0.95 <= wanted[: high[u] + 1, u].sum()


def test_the_lattice_takes_each_frame_in_one_state():
    log_likelihoods = torch.arange(20.0).view(5, 4)
    log_null, log_label = state_lattice(log_likelihoods)
    assert log_null.tolist() == [[0.0, 5.0, 10.0, 15.0], [4.0, 9.0, 14.0, 19.0]]
    assert_close(log_label, log_null[:, :3])


def test_planted_boundaries_are_found(monkeypatch):
    hmm = random_hmm(spread=4.0)
    phones, pauses = "ABCADBBD", [0, 0, 15, 0, 0, 0, 0, 12]
    frames, edges = planted(hmm, phones, pauses)
    samples = speak(hmm, monkeypatch, frames)
    true = [tuple(map(hmm.time, edge)) for edge in edges]
    found = hmm.boundaries(samples, phones, [(a + 0.03, b + 0.03) for a, b in true])
    for wanted, edges in zip(true, found, strict=True):
        for time, edge in zip(wanted, edges, strict=True):
            assert edge.time == pytest.approx(time, abs=SETTINGS.shift)
            assert edge.earliest - 1e-9 <= time <= edge.latest + 1e-9


def test_a_boundary_lies_midway_between_the_middles_of_two_windows():
    hmm = random_hmm()
    middle = [0.010 + 0.005 * t for t in range(3)]
    assert hmm.time(1) == pytest.approx((middle[0] + middle[1]) / 2)
    assert hmm.time(2) == pytest.approx((middle[1] + middle[2]) / 2)


def test_silence_stands_at_both_ends_and_only_in_pauses():
    hmm = random_hmm()
    spans = [(0.1, 0.2), (0.2, 0.3), (0.325, 0.4), (0.44, 0.5)]
    states, first = hmm.state_sequence("ABAC", spans)
    S = hmm.silence
    assert states == [S, 0, 1, 2, 3, 4, 5, 0, 1, 2, S, 6, 7, 8, S]
    assert first == [1, 4, 7, 11]


def test_boundaries_are_monotone_and_a_phone_without_pause_ends_where_the_next_starts():
    hmm = random_hmm()
    samples = torch.randn(16_000, generator=torch.Generator().manual_seed(3))
    spans = [(0.1, 0.2), (0.2, 0.3), (0.3, 0.5), (0.7, 0.9)]
    found = hmm.boundaries(samples, "ABCD", spans)
    edges = [edge for pair in found for edge in pair]
    for numbers in zip(*edges, strict=True):
        assert list(numbers) == sorted(numbers)
    assert all(e.earliest <= e.time <= e.latest for e in edges)
    assert edges[0].earliest >= 0 and edges[-1].latest <= 1.0
    assert [a[1] == b[0] for a, b in pairwise(found)] == [True, True, False]


def test_more_states_than_frames_have_no_boundaries():
    hmm = random_hmm()
    states = 3 * 4 + 2
    spans = [(0.01 * i, 0.01 * (i + 1)) for i in range(4)]
    samples = torch.randn((states - 1) * SETTINGS.shift_samples + SETTINGS.window_samples)
    assert len(hmm.frames(samples)) == states
    found = hmm.boundaries(samples, "ABCD", spans)
    starts = [hmm.time(1 + 3 * i) for i in range(4)]  # each state has one frame
    assert [start.time for start, _ in found] == pytest.approx(starts)
    assert hmm.boundaries(samples[:-1], "ABCD", spans) is None
    assert hmm.boundaries(samples[:0], "A", [(0.0, 0.0)]) is None


def test_sound_divided_in_pauses_has_the_same_boundaries(monkeypatch):
    hmm = random_hmm(spread=4.0)
    phones, pauses = "ABCD" * 5, [0, 0, 0, 80] * 5
    frames, edges = planted(hmm, phones, pauses)
    samples = speak(hmm, monkeypatch, frames)
    spans = [tuple(map(hmm.time, edge)) for edge in edges]
    whole = hmm.boundaries(samples, phones, spans)
    monkeypatch.setattr(phone_hmm, "PIECE", 0.5)
    assert len(list(hmm._pieces(spans, len(frames)))) == 5
    for a, b in zip(whole, hmm.boundaries(samples, phones, spans), strict=True):
        for edge, other in zip(a, b, strict=True):
            assert edge == pytest.approx(other, abs=1e-3)


def test_a_file_keeps_the_model(tmp_path):
    hmm = random_hmm()
    hmm.save(tmp_path / "a.safetensors")
    loaded = PhoneHMM.load(tmp_path / "a.safetensors")
    assert (loaded.symbols, loaded.settings) == (hmm.symbols, hmm.settings)
    assert_close(loaded.scales, hmm.scales, rtol=0, atol=0)
    for name in ("means", "variances", "log_weights"):
        assert_close(getattr(loaded, name), getattr(hmm, name).half().float(), rtol=0, atol=0)
    loaded.save(tmp_path / "b.safetensors")
    contents = [(tmp_path / name).read_bytes() for name in ("a.safetensors", "b.safetensors")]
    assert contents[0] == contents[1]


def test_another_file_is_refused(tmp_path):
    hmm, path = random_hmm(), tmp_path / "a.safetensors"
    replace(hmm, symbols=SYMBOLS[:3]).save(path)
    with pytest.raises(CheckpointError, match="other shapes"):
        PhoneHMM.load(path)
    write_tensors(path, {"means": hmm.means}, {"symbols": SYMBOLS, "features": {}}, "phone HMM")
    with pytest.raises(CheckpointError, match="incomplete"):
        PhoneHMM.load(path)
    write_tensors(path, {"means": hmm.means}, {}, "model")
    with pytest.raises(CheckpointError, match="is model, not phone HMM"):
        PhoneHMM.load(path)


def test_the_shipped_model_has_the_phones_of_english_and_small_files():
    hmm = shipped_hmm()
    assert len(hmm.symbols) == 39 and list(hmm.symbols) == sorted(hmm.symbols)
    assert hmm.settings == SETTINGS
    assert_close(hmm.log_weights.logsumexp(1), torch.zeros(118), rtol=0, atol=2e-2)
    assert phone_hmm.SHIPPED.stat().st_size < 400_000
    assert phone_hmm.SHIPPED.with_suffix(".md").is_file()


@pytest.fixture(scope="module")
def recogniser():
    return load("english-phone-recogniser")


@pytest.fixture(scope="module")
def heard(recogniser):
    samples = 0.1 * torch.randn(16_000, generator=torch.Generator().manual_seed(4))
    frames = recogniser.signature.example(samples).frames
    [vectors] = transcribe(recogniser.network, frames[None], torch.tensor([len(frames)]))
    return Heard(lambda: samples, vectors, 1.0)


def test_alignment_takes_the_boundaries_of_the_shipped_model(recogniser, heard):
    phones = ["HH", "AH", "L", "OW"]
    labels = tuple(recogniser.signature.targets.encode(phones))
    emitted = emission_boundaries(recogniser, heard, labels)
    spans = [(one.start.time, one.end.time) for one in emitted]
    wanted = shipped_hmm().boundaries(heard.read(), phones, spans)
    found = boundaries(recogniser, heard, labels)
    assert [(one.start, one.end) for one in found] == wanted
    assert [one.confidence for one in found] == [one.confidence for one in emitted]
    assert found != emitted


@pytest.mark.parametrize(
    "other",
    [
        {"symbols": tuple("abc")},
        {"settings": FeatureSettings(sample_rate=8000)},
    ],
    ids=["symbols", "sample rate"],
)
def test_other_phones_and_sample_rates_keep_the_boundaries_of_emissions(
    recogniser, heard, monkeypatch, other
):
    hmm = replace(shipped_hmm(), **other)
    monkeypatch.setattr(boundaries_module, "shipped_hmm", lambda: hmm)
    labels = tuple(recogniser.signature.targets.encode(["HH", "AH"]))
    found = boundaries(recogniser, heard, labels)
    assert found == emission_boundaries(recogniser, heard, labels)


def test_phones_without_enough_frames_keep_the_boundaries_of_emissions(recogniser, heard):
    labels = tuple(recogniser.signature.targets.encode(["AH", "T"] * 33))  # 200 states
    found = boundaries(recogniser, heard, labels)
    assert found == emission_boundaries(recogniser, heard, labels)


def test_an_edge_can_be_shifted():
    assert Edge(1.0, 0.5, 1.5).shifted(2.0) == Edge(3.0, 2.5, 3.5)
