"""Streams of models: any pieces give the transcript of the whole input, to the last bit."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce import load
from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.pairs import DataError, Notation
from transduce.decoding import NGram
from transduce.decoding.ensemble import Ensemble
from transduce.model.checkpoint import TrainedModel
from transduce.model.model import Model
from transduce.model.signature import Signature
from transduce.model.stream import Endpoints, Stream, vector_times

pytestmark = pytest.mark.filterwarnings("ignore:max_labels_per_frame")
RATE = 2000
SPACES, CHARACTERS = Notation("spaces", None), Notation("characters", None)


def sharp(network, factor=8.0, null=0.0):
    """Return the network with larger weights, so that its outputs depend on its input."""
    with torch.no_grad():
        for weights in network.parameters():
            weights *= factor
        network.transcription_network.output.bias[0] += null
    return network.eval()


def sound_model(features=None, **config):
    torch.manual_seed(3)
    features = features or FeatureSettings(sample_rate=RATE, num_channels=14, num_deltas=1)
    sizes = dict(hidden_size=11, num_layers=2, prediction_size=9, bidirectional=False)
    config = NetworkConfig(**(sizes | config))
    statistics = Statistics(torch.full((features.size,), 2.0), torch.full((features.size,), 5.0))
    signature = Signature(
        Alphabet(["A", "B", "C", "DD"]), SPACES, features=features, statistics=statistics
    )
    return Model(sharp(build_network(config, features.size, 4)), config, signature)


def text_model(**config):
    torch.manual_seed(4)
    config = NetworkConfig(hidden_size=8, prediction_size=8, bidirectional=False, **config)
    signature = Signature(Alphabet(["A", "B", "C"]), SPACES, Alphabet("abc"), CHARACTERS)
    return Model(sharp(build_network(config, 3, 3)), config, signature)


MODELS = {
    "plain": sound_model(),
    "lookahead": sound_model(lookahead=4, pooling=2),
    "log mel": sound_model(
        FeatureSettings("log_mel", RATE, num_channels=10, num_deltas=0), pooling=3, lookahead=2
    ),
}
OPTIONS = {
    "greedy": dict(beam_width=1, with_timings=False),
    "width 1": dict(beam_width=1),
    "width 4": dict(beam_width=4, n_best=3),
    "without timings": dict(beam_width=4, with_timings=False),
    "fusion": dict(beam_width=3, fusion=NGram(2, 4, [[1, 2], [2, 1]]), fusion_weight=0.3),
    "null bias": dict(beam_width=3, null_bias=-1.0, length_normalised=False),
}


def noise(number, seed=0):
    generator = np.random.default_rng(seed)
    loudness = np.repeat(generator.uniform(0, 0.3, number // 100 + 1), 100)[:number]
    return (loudness * generator.standard_normal(number)).astype(np.float32)


def pieces(samples, cuts):
    edges = [0, *sorted(min(cut, len(samples)) for cut in cuts), len(samples)]
    return [samples[first:last] for first, last in pairwise(edges)]


def streamed(model, parts, **options):
    stream = model.stream(**options)
    for part in parts:
        stream.accept(part)
    return stream.finish()


def saved_in_int8(model):
    """Return a model as it is after it was saved in int8 and loaded."""
    with TemporaryDirectory() as folder:
        return load(model.save_pretrained(folder, dtype=torch.int8))


MODELS["int8"] = saved_in_int8(sound_model(lookahead=4, pooling=2))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None)
@given(length=st.integers(1, 2500), cuts=st.lists(st.integers(0, 2500), max_size=12))
def test_any_pieces_give_the_transcript_of_the_whole(name, kind, length, cuts):
    model, samples = MODELS[name], noise(length, length)
    options = {"with_timings": True} | OPTIONS[kind]
    assert streamed(model, pieces(samples, cuts), **options) == model(samples, **options)


def test_the_weights_of_an_int8_file_stay_int8_in_streams():
    network = MODELS["int8"].stream()._network
    for layer in (*network.lower.layers, *network.upper.layers):
        assert layer.panels.dtype == layer.hidden.dtype == np.int8
    for layer in MODELS["lookahead"].stream()._network.lower.layers:
        assert layer.hidden.dtype == np.float32


def test_one_sample_at_a_time_gives_the_transcript_of_the_whole():
    model, samples = MODELS["lookahead"], noise(1700)
    found = streamed(model, np.split(samples, len(samples)), beam_width=4)
    assert found == model(samples, beam_width=4, with_timings=True)
    assert len(found.symbols) > 5


def test_the_whole_among_others_is_as_it_is_in_a_stream():
    model = MODELS["lookahead"]
    sounds = [noise(length, length) for length in (900, 2500, 1400)]
    for sound, whole in zip(sounds, model(sounds, beam_width=3, with_timings=True), strict=True):
        assert streamed(model, [sound], beam_width=3).hypotheses == whole.hypotheses


@settings(max_examples=20, deadline=None)
@given(text=st.text("abcC", min_size=1, max_size=30), cuts=st.lists(st.integers(0, 30)))
@pytest.mark.parametrize("config", [{}, {"pooling": 2, "embedding_size": 3}], ids=str)
def test_any_pieces_of_text_give_the_transcript_of_the_whole(config, text, cuts):
    model = text_model(**config)
    found = streamed(model, pieces(text, cuts), beam_width=3)
    assert found.hypotheses == model(text, beam_width=3, with_timings=True).hypotheses


def test_frames_stream_too():
    model = MODELS["plain"]
    model = Model(model.network, model.config, replace(model.signature, features=None))
    frames = torch.randn(50, 26) * 5
    found = streamed(model, frames.split(7), beam_width=3)
    assert found.hypotheses == model(frames, beam_width=3, with_timings=True).hypotheses


def test_whole_numbers_are_scaled_as_in_a_call():
    model, samples = MODELS["plain"], (32767 * noise(1500)).astype(np.int16)
    assert streamed(model, [samples[:700], samples[700:]]) == model(
        samples, beam_width=4, with_timings=True
    )


def test_no_input_gives_an_empty_transcript():
    for model in (MODELS["plain"], text_model()):
        for options in OPTIONS.values():
            found = model.stream(**(options | {"fusion": None, "fusion_weight": None})).finish()
            assert found.symbols == () and found.hypotheses[0].log_prob == 0


# --- Partial results ----------------------------------------------------------------------------


def test_stable_labels_never_change_and_begin_the_result():
    model, samples = MODELS["lookahead"], noise(6000)
    stream, before, timings = model.stream(beam_width=4), (), ()
    for part in np.split(samples, 60):
        partial = stream.accept(part)
        stable = partial.stable
        assert stable.symbols[: len(before)] == before
        [timed] = stable.hypotheses
        assert len(stable.spans(timed)) == len(stable.symbols)
        assert timed.timings[: len(timings)] == timings
        before, timings = stable.symbols, timed.timings
        unstable = partial.unstable
        assert len(unstable.spans(unstable.hypotheses[0])) == len(unstable.symbols)
        assert str(partial).split() == [*stable.symbols, *unstable.symbols]
    found = stream.finish()
    assert found.symbols[: len(before)] == before and len(before) > 10


def test_a_partial_result_stays_as_it_was():
    stream, samples = MODELS["plain"].stream(), noise(4000)
    partial = stream.accept(samples[:2000])
    text = repr(partial)
    stream.accept(samples[2000:])
    stream.reset()
    assert repr(partial) == text


def test_nothing_is_an_allowed_piece():
    model, samples = MODELS["plain"], noise(900)
    stream = model.stream()
    for part in (samples[:0], samples[:500], [], samples[500:], torch.empty(0)):
        stream.accept(part)
    assert stream.finish() == model(samples, beam_width=4, with_timings=True)


def test_a_stream_begins_anew_after_a_reset():
    model, samples = MODELS["lookahead"], noise(2000)
    stream = model.stream(beam_width=3)
    first = [stream.accept(samples), stream.finish()][1]
    stream.reset()
    stream.accept(samples[:700])
    stream.reset()
    stream.accept(samples)
    assert stream.finish() == first


# --- Several streams at once --------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_side_by_side_are_as_each_is_alone(threads, set_num_threads):
    set_num_threads(threads)
    model = MODELS["lookahead"]
    sounds = [noise(length, length) for length in (2500, 700, 0, 1900, 30)]
    streams = [model.stream(beam_width=3) for _ in sounds]
    for step in range(10):
        parts = [sound[step * 257 : (step + 1) * 257] for sound in sounds]
        together = Stream.accept_many(streams, parts)
        assert len(together) == 5
    for stream, sound in zip(streams, sounds, strict=True):
        assert stream.finish() == streamed(model, [sound], beam_width=3)
    assert Stream.accept_many([], []) == []


def test_a_bad_piece_among_others_harms_no_stream():
    model, samples = MODELS["plain"], noise(800)
    streams = [model.stream() for _ in range(3)]
    bad = samples.copy()
    bad[5] = np.nan
    with pytest.raises(DataError, match=r"the piece of stream 1 was left out: .*NaN"):
        Stream.accept_many(streams, [samples, bad, samples])
    for stream in streams:
        assert stream.seconds == 0
        stream.accept(samples)
        assert stream.finish() == model(samples, beam_width=4, with_timings=True)


def test_streams_that_do_not_go_together_are_refused():
    a, b = MODELS["plain"].stream(), MODELS["lookahead"].stream()
    with pytest.raises(ValueError, match="of several models"):
        Stream.accept_many([a, b], [noise(5), noise(5)])
    with pytest.raises(ValueError, match="given twice"):
        Stream.accept_many([a, a], [noise(5), noise(5)])
    with pytest.raises(ValueError, match="1 pieces for 2 streams"):
        Stream.accept_many([a, b], [noise(5)])


# --- Endpoints ----------------------------------------------------------------------------------


def test_the_rules_of_endpoints():
    rules = Endpoints(silence_after_speech=1.0, silence_alone=5.0, length=30.0)
    assert not rules.met(4.9, None) and rules.met(5.0, None)
    assert not rules.met(7.9, 7.0) and rules.met(8.0, 7.0)
    assert not rules.met(29.9, 29.8) and rules.met(30.0, 29.9)
    assert not Endpoints(None, None, None).met(1000.0, 1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="length must be a positive number of seconds"):
            Endpoints(length=bad)


def test_an_utterance_ends_after_silence_and_not_without_rules():
    model = MODELS["plain"]
    stream = model.stream(endpoints=Endpoints(None, None, length=0.5))
    ends = [stream.accept(noise(200, i)).is_endpoint for i in range(8)]
    assert ends == sorted(ends) and not ends[3] and ends[-1]
    stream.reset()
    assert not stream.accept(noise(200)).is_endpoint
    assert not any(model.stream().accept(noise(8000)).is_endpoint for _ in range(1))


class Asked(Endpoints):
    """Rules that are never met, and keep what they are asked."""

    def met(self, seconds, last_label):
        self.__dict__["last_label"] = last_label
        return False


def test_silence_begins_where_the_vector_of_the_last_label_ends():
    model, rules = MODELS["plain"], Asked()
    step, _ = vector_times(model)
    stream, ends = model.stream(endpoints=rules), set()
    for part in np.split(noise(4000), 20):
        partial = stream.accept(part)
        frames = [f for one in (partial.stable, partial.unstable) for f in one.hypotheses[0].frames]
        assert rules.last_label == ((frames[-1] + 1) * step if frames else None)
        ends.add(rules.last_label)
    assert len(ends) > 5


# --- Long sound ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_long_sound_goes_through_a_stream_from_samples_and_files_alike(tmp_path):
    features = FeatureSettings("log_mel", 1000, num_channels=8, num_deltas=0)
    model = sound_model(features, pooling=4, lookahead=2, num_layers=1)
    model.network.transcription_network.output.bias.data[0] += 1.5  # fewer labels
    samples = noise(150_000)
    options = dict(beam_width=2, with_timings=True)
    whole = model(samples, **options)
    assert streamed(model, np.split(samples, 25), **options) == whole
    assert whole.seconds == 150.0 and len(whole.symbols) > 10
    soundfile.write(tmp_path / "long.wav", samples, 1000, subtype="FLOAT")
    read = model(tmp_path / "long.wav", **options)
    assert read.hypotheses == whole.hypotheses
    assert (read.name, read.path, read.seconds) == ("long", tmp_path / "long.wav", 150.0)
    assert read.recording == whole.recording


def test_blocks_of_a_file_are_resampled_without_seams(tmp_path):
    from transduce.audio.sound import read_wave
    from transduce.audio.windows import sound_blocks
    from transduce.data.pairs import Audio, Origin

    path = Path(tmp_path / "sound.wav")
    soundfile.write(path, noise(1500 * 131 + 77), 1500, subtype="FLOAT")
    for audio in (Audio(path), Audio(path, 3.25, 125.5)):
        whole = read_wave(audio, 1000, convert=True)
        found = torch.cat(list(sound_blocks(audio, 1000, Origin(path))))
        assert found.shape == whole.shape
        torch.testing.assert_close(found, whole, atol=2e-7, rtol=0)


# --- Errors -------------------------------------------------------------------------------------

MISTAKES = {
    "NaN": (np.array([0.1, np.nan], np.float32), "NaN or an infinite number"),
    "infinity": (np.array([np.inf], np.float32), "NaN or an infinite number"),
    "too loud": (np.array([20.0], np.float32), "the samples reach 20"),
    "another type": (np.array([1, 2]), "no known scale"),
    "complex numbers": (np.array([1j]), "neither samples nor frames"),
    "text": ("hello", "the model reads sound, not text"),
    "two channels": (np.zeros((5, 2), np.float32), r"must be samples \[N\], not \[5, 2\]"),
}


@pytest.mark.parametrize("piece, message", MISTAKES.values(), ids=MISTAKES)
def test_a_bad_piece_is_refused_in_a_sentence_and_the_stream_goes_on(piece, message):
    model, samples = MODELS["plain"], noise(1200)
    stream = model.stream()
    stream.accept(samples[:500])
    with pytest.raises(DataError, match=message) as raised:
        stream.accept(piece)
    assert "\n" not in str(raised.value)
    stream.accept(samples[500:])
    assert stream.finish() == model(samples, beam_width=4, with_timings=True)


def test_unknown_letters_are_refused_and_the_stream_goes_on():
    model = text_model()
    stream = model.stream()
    stream.accept("ab")
    for piece, message in (("x", "'x' is no symbol"), (noise(3), "reads text, not ndarray")):
        with pytest.raises(DataError, match=message):
            stream.accept(piece)
    stream.accept("c")
    assert stream.finish().hypotheses == model("abc", beam_width=4, with_timings=True).hypotheses


def test_a_finished_stream_takes_nothing_more():
    stream = MODELS["plain"].stream()
    stream.finish()
    for call in (lambda: stream.accept(noise(10)), stream.finish):
        with pytest.raises(ValueError, match="the input has finished; call reset"):
            call()
    stream.reset()
    stream.accept(noise(10))


def test_models_that_need_the_whole_input_do_not_stream():
    plain = MODELS["plain"]
    whole = TrainedModel(plain.network, replace(plain.config, bidirectional=True), plain.signature)
    back = TrainedModel(plain.network, replace(plain.config, backwards=True), plain.signature)
    both = TrainedModel(Ensemble([plain.network] * 2), plain.config, plain.signature)
    ctc_config = replace(plain.config, network="ctc")
    ctc = TrainedModel(build_network(ctc_config, 26, 4), ctc_config, plain.signature)
    for model, message in (
        (whole, "the model is bidirectional and needs the whole input"),
        (back, "reads its input from the end"),
        (both, "streams are for one transducer, not for"),
        (ctc, "streams are for one transducer, not for CTC"),
    ):
        with pytest.raises(ValueError, match=message):
            Model.of(model).stream()


def test_a_stream_of_another_rate_or_option_is_refused():
    model = MODELS["plain"]
    with pytest.raises(ValueError, match="takes 2000 samples a second, not 8000; record at"):
        model.stream(sample_rate=8000)
    model.stream(sample_rate=2000)
    with pytest.raises(TypeError, match="a model has no option beams"):
        model.stream(beams=3)
    with pytest.raises(ValueError, match="endpoints are for models of sound"):
        text_model().stream(endpoints=Endpoints())
