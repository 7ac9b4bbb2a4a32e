import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hmms import CLASSES, SETTINGS, SYMBOLS, D, random_hmm, random_mixtures
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.testing import assert_close

from transduce.alignment import boundaries as boundaries_module
from transduce.alignment import phone_hmm
from transduce.alignment.boundaries import Heard, boundaries, emission_boundaries
from transduce.alignment.phone_hmm import (
    ACOUSTIC_SCALE,
    LONGEST_CLOSURE,
    PAUSE,
    REACH,
    Edge,
    PhoneHMM,
    at_half_level,
    boundary_posterior,
    far_from_spans,
    shipped_hmm,
    state_lattice,
)
from transduce.audio.features import FeatureSettings
from transduce.decoding.hypothesis import lattice_timings
from transduce.decoding.search import transcribe
from transduce.model.model import load
from transduce.model.stream import vector_times
from transduce.model.tensors import CheckpointError, write_tensors


def mixture(hmm, state):
    normals = Normal(hmm.alone.means[state], hmm.alone.variances[state].sqrt())
    weights = Categorical(logits=hmm.alone.log_weights[state])
    return MixtureSameFamily(weights, Independent(normals, 1))


def draw(hmm, states, durations):
    """Draw frames from each state in turn."""
    torch.manual_seed(1)
    return torch.cat([mixture(hmm, s).sample((n,)) for s, n in zip(states, durations, strict=True)])


def speak(hmm, monkeypatch, frames):
    """Let the model hear these frames, all at one level; return samples of their duration."""
    heard = frames, torch.zeros(len(frames))
    monkeypatch.setattr(PhoneHMM, "frames_and_levels", lambda self, samples: heard)
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
    frames, states = torch.randn(7, D), [4, 12, 4, 0]
    wanted = torch.stack([mixture(hmm, s).log_prob(frames) for s in states], 1)
    assert_close(hmm.alone.log_likelihoods(frames, states), wanted, rtol=1e-5, atol=1e-4)


def test_a_state_averages_what_depends_on_the_phone_and_on_its_neighbour():
    hmm = random_hmm()
    hmm = replace(hmm, beside=random_mixtures(37, 1.0, 4, torch.Generator().manual_seed(5)))
    states, frames = hmm.state_sequence("AP", [False, False]), torch.randn(5, D)
    alone = hmm.alone.log_likelihoods(frames, states.alone)
    beside = hmm.beside.log_likelihoods(frames, states.beside)
    assert_close(hmm.log_likelihoods(frames, states), (alone + beside) / 2)


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
    median, low, high = phone_hmm.median_and_quantiles(posterior)
    for u in range(U):
        if low[u] < median[u] < high[u]:
            spread = [min(1.0, max(0.0, median[u] - t + 0.5)) for t in range(T)]
            assert float(wanted[:, u] @ wanted.new_tensor(spread)) == pytest.approx(0.5)
        assert wanted[: low[u], u].sum() < 0.05 <= wanted[: low[u] + 1, u].sum()
        assert wanted[: high[u], u].sum() < 0.95 <= wanted[: high[u] + 1, u].sum()


def test_the_lattice_takes_each_frame_in_one_state():
    log_likelihoods = torch.arange(20.0).view(5, 4)
    log_null, log_label = state_lattice(log_likelihoods)
    assert log_null.tolist() == [[0.0, 5.0, 10.0, 15.0], [4.0, 9.0, 14.0, 19.0]]
    assert_close(log_label, log_null[:, :3])


def test_planted_boundaries_are_found(monkeypatch):
    hmm = random_hmm(spread=4.0)
    phones, pauses = "APSAEPPE", [0, 0, 15, 0, 0, 0, 0, 12]
    frames, edges = planted(hmm, phones, pauses)
    samples = speak(hmm, monkeypatch, frames)
    true = [tuple(map(hmm.time, edge)) for edge in edges]
    spans = [(a + 0.03, b + 0.03) for a, b in true]
    found = hmm.boundaries(samples, phones, spans, range(len(phones)))
    assert [a[1] == b[0] for a, b in pairwise(found)] == [pause == 0 for pause in pauses[:-1]]
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
    alone, beside, first = hmm.state_sequence("APAS", [False, False, False, True])
    S = hmm.silence
    assert alone == [S, 0, 1, 2, 3, 4, 5, 0, 1, 2, S, 6, 7, 8, S]
    # Of the nine states of a phone, the first four have neighbours of class 0, 1, 2 and silence.
    assert beside == [36, 3, 4, 6, 9, 13, 14, 1, 4, 8, 36, 21, 22, 26, 36]
    assert first == [1, 4, 7, 11]


def test_only_words_start_after_pauses():
    hmm = random_hmm(spread=4.0)
    frames, _ = planted(hmm, "ASAS", [0, 15, 0, 12])
    assert hmm.pauses(frames, "ASAS", {0, 2}) == [False, False, True, False]
    assert hmm.pauses(frames, "ASAS", {0}) == [False] * 4


@pytest.mark.parametrize("phone, least", [("S", PAUSE), ("P", LONGEST_CLOSURE)])
def test_short_silence_is_no_pause_and_before_a_stop_it_is_its_closure(phone, least):
    hmm = random_hmm(spread=4.0)
    for silent in (least - 1, least):
        frames, _ = planted(hmm, ["A", phone], [silent, 12])
        assert hmm.pauses(frames, ["A", phone], {0, 1}) == [False, silent == least]


def test_a_phone_stays_near_its_span():
    hmm = random_hmm(spread=4.0)
    frames, _ = planted(hmm, "SAS", [100, 100, 12])  # S, A and S, far from each other
    alone = hmm.pauses(frames, "S", {0})
    states = hmm.state_sequence("S", alone)
    for span in ((22, 30), (len(frames) - 25, len(frames) - 15)):
        log_likelihoods = hmm.log_likelihoods(frames, states)
        log_likelihoods -= far_from_spans(states, [span], len(frames))
        start = boundary_posterior(log_likelihoods)[:, 0]
        assert start[max(0, span[0] - REACH) : span[1] + REACH].sum() > 0.999


def test_phones_that_leave_no_time_for_pauses_have_none():
    hmm = random_hmm()
    assert hmm.pauses(torch.randn(8, D), "AS", {0, 1}) == [False, False]


def test_edges_beside_pauses_lie_halfway_between_the_levels():
    #         0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    levels = [0, 0, 1, 4, 6, 9, 8, 8, 7, 3, 2, 1, 6, 8, 7, 0]
    phones = [(Edge(2, 1, 3), Edge(6, 5, 7)), (Edge(6, 5, 7), Edge(10, 9, 11))]
    phones.append((Edge(11, 9, 12), Edge(15, 15, 16)))
    found = at_half_level(phones, "ASA", torch.tensor(levels, dtype=torch.float32))
    assert found[0] == (Edge(4, 1, 4), Edge(6, 5, 7))
    assert found[1] == (Edge(6, 5, 7), Edge(9, 9, 11))
    assert found[2] == (Edge(12, 9, 12), Edge(15, 15, 16))
    stop = at_half_level(phones, "APA", torch.tensor(levels, dtype=torch.float32))
    assert stop[1] == phones[1]


def test_frames_do_not_depend_on_loudness_and_levels_do():
    hmm = random_hmm()
    samples = 0.1 * torch.randn(8000, generator=torch.Generator().manual_seed(6))
    (frames, levels), (louder, higher) = map(hmm.frames_and_levels, (samples, 4 * samples))
    assert frames.shape == (97, D)
    assert_close(frames, louder, rtol=0, atol=2e-3)
    assert_close(higher - levels, torch.full((97,), math.log(16)), rtol=0, atol=1e-3)
    cepstra = (frames * hmm.scales)[:, :13]
    assert_close(cepstra.mean(0), torch.zeros(13), rtol=0, atol=1e-4)
    assert_close(cepstra.std(0, correction=0), torch.ones(13), rtol=0, atol=1e-4)


def test_boundaries_are_monotone_and_a_phone_without_pause_ends_where_the_next_starts():
    hmm = random_hmm()
    samples = torch.randn(16_000, generator=torch.Generator().manual_seed(3))
    spans = [(0.1, 0.2), (0.2, 0.3), (0.3, 0.5), (0.7, 0.9)]
    found = hmm.boundaries(samples, "APSE", spans, {0})
    edges = [edge for pair in found for edge in pair]
    for numbers in zip(*edges, strict=True):
        assert list(numbers) == sorted(numbers)
    assert all(e.earliest <= e.time <= e.latest for e in edges)
    assert edges[0].earliest >= 0 and edges[-1].latest <= 1.0
    assert [a[1] == b[0] for a, b in pairwise(found)] == [True, True, True]


def test_more_states_than_frames_have_no_boundaries():
    hmm = random_hmm()
    states = 3 * 4 + 2
    spans = [(0.01 * i, 0.01 * (i + 1)) for i in range(4)]
    samples = torch.randn((states - 1) * SETTINGS.shift_samples + SETTINGS.window_samples)
    assert len(hmm.frames_and_levels(samples)[0]) == states
    found = hmm.boundaries(samples, "APSE", spans, range(4))
    starts = [hmm.time(1 + 3 * i) for i in range(4)]  # each state has one frame
    assert [start.time for start, _ in found] == pytest.approx(starts)
    assert hmm.boundaries(samples[:-1], "APSE", spans, range(4)) is None
    assert hmm.boundaries(samples[:0], "A", [(0.0, 0.0)], [0]) is None


def test_sound_divided_in_pauses_has_the_same_boundaries(monkeypatch):
    hmm = random_hmm(spread=4.0)
    phones, pauses = "APSE" * 5, [0, 0, 0, 80] * 5
    frames, edges = planted(hmm, phones, pauses)
    samples = speak(hmm, monkeypatch, frames)
    spans = [tuple(map(hmm.time, edge)) for edge in edges]
    whole = hmm.boundaries(samples, phones, spans, range(20))
    monkeypatch.setattr(phone_hmm, "PIECE", 0.5)
    assert len(list(hmm._pieces(spans, len(frames)))) == 5
    for a, b in zip(whole, hmm.boundaries(samples, phones, spans, range(20)), strict=True):
        for edge, other in zip(a, b, strict=True):
            assert edge == pytest.approx(other, abs=1e-3)


def test_a_file_keeps_the_model(tmp_path):
    hmm = random_hmm()
    hmm.save(tmp_path / "a.safetensors")
    loaded = PhoneHMM.load(tmp_path / "a.safetensors")
    assert (loaded.symbols, loaded.classes) == (hmm.symbols, hmm.classes)
    assert loaded.settings == hmm.settings
    assert_close(loaded.scales, hmm.scales, rtol=0, atol=0)
    for one, other in ((loaded.alone, hmm.alone), (loaded.beside, hmm.beside)):
        for name in ("means", "variances", "log_weights"):
            assert_close(getattr(one, name), getattr(other, name).half().float(), rtol=0, atol=0)
    loaded.save(tmp_path / "b.safetensors")
    contents = [(tmp_path / name).read_bytes() for name in ("a.safetensors", "b.safetensors")]
    assert contents[0] == contents[1]


def test_another_file_is_refused(tmp_path):
    hmm, path = random_hmm(), tmp_path / "a.safetensors"
    replace(hmm, symbols=SYMBOLS[:3]).save(path)
    with pytest.raises(CheckpointError, match="other shapes"):
        PhoneHMM.load(path)
    header = {"symbols": SYMBOLS, "classes": CLASSES, "features": {}}
    write_tensors(path, {"means": hmm.alone.means}, header, "phone HMM")
    with pytest.raises(CheckpointError, match="incomplete"):
        PhoneHMM.load(path)
    write_tensors(path, {"means": hmm.alone.means}, {}, "model")
    with pytest.raises(CheckpointError, match="is model, not phone HMM"):
        PhoneHMM.load(path)


def test_the_shipped_model_has_the_phones_of_english_and_small_files():
    hmm = shipped_hmm()
    assert len(hmm.symbols) == 39 and list(hmm.symbols) == sorted(hmm.symbols)
    assert hmm.settings == SETTINGS
    for mixtures, states in ((hmm.alone, 118), (hmm.beside, 820)):
        assert_close(mixtures.log_weights.logsumexp(1), torch.zeros(states), rtol=0, atol=2e-2)
    assert phone_hmm.SHIPPED.stat().st_size < 1_500_000
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
    wanted = shipped_hmm().boundaries(heard.read(), phones, spans, {0})
    found = boundaries(recogniser, heard, labels, {0})
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
    found = boundaries(recogniser, heard, labels, {0})
    assert found == emission_boundaries(recogniser, heard, labels)


def test_the_start_of_a_phone_is_as_uncertain_as_its_emission(recogniser, heard):
    labels = tuple(recogniser.signature.targets.encode(["HH", "AH", "L", "OW"]))
    with torch.no_grad():
        prediction = recogniser.network.prediction_network(torch.tensor([labels]))[0]
    timings = lattice_timings(heard.vectors, prediction, labels)
    step, _ = vector_times(recogniser)
    found = emission_boundaries(recogniser, heard, labels)
    for one, timing in zip(found, timings, strict=True):
        before, after = timing.frame - timing.start + 0.5, timing.end - timing.frame + 0.5
        earliest, latest = one.start.time - before * step, one.start.time + after * step
        assert one.start.earliest == pytest.approx(max(0, earliest))
        assert one.start.latest == pytest.approx(min(heard.seconds, latest))
    assert any(timing.start > 1 for timing in timings)


def test_phones_without_enough_frames_keep_the_boundaries_of_emissions(recogniser, heard):
    labels = tuple(recogniser.signature.targets.encode(["AH", "T"] * 33))  # 200 states
    found = boundaries(recogniser, heard, labels, {0})
    assert found == emission_boundaries(recogniser, heard, labels)


def test_an_edge_can_be_shifted():
    assert Edge(1.0, 0.5, 1.5).shifted(2.0) == Edge(3.0, 2.5, 3.5)
