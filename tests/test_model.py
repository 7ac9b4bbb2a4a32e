"""Models as functions: loaded by name or path, called on words and sound, saved again."""

import json
import pickle
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open
from slow import slow_except
from test_cli import transduce as command

import transduce
from transduce import SearchOptions, transducer_loss
from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, Transducer, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.batches import Batch
from transduce.data.pairs import Audio, DataError, Notation, Origin, Pair
from transduce.decoding.ensemble import Ensemble
from transduce.model import model as module
from transduce.model.checkpoint import CheckpointError, TrainedModel, save_model
from transduce.model.evaluate import evaluate
from transduce.model.model import Model, load
from transduce.model.signature import Signature

LETTERS = Signature(
    Alphabet(["AA", "BB", "S"]),
    Notation("spaces", None),
    Alphabet("abs'"),
    Notation("characters", None),
)
SOUND = Signature(
    Alphabet(["aa", "b"]),
    Notation("spaces", None),
    features=FeatureSettings(),
    statistics=Statistics(torch.full((26,), 0.5), torch.full((26,), 20.0)),
)


def model_of(signature, seed=0, num_steps=0):
    """Return a small transducer, trained for `num_steps` to write letters as capitals."""
    torch.manual_seed(seed)
    config = NetworkConfig(hidden_size=12, num_layers=2, prediction_size=12)
    network = build_network(config, signature.input_size, len(signature.targets))
    optimiser = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(num_steps):
        letters, lengths = torch.randint(1, 4, (16, 6)), torch.randint(1, 7, (16,))
        f, g, num_vectors = network(letters, lengths, letters)
        optimiser.zero_grad()
        transducer_loss(f, g, letters, num_vectors, lengths).mean().backward()
        optimiser.step()
    return Model.of(TrainedModel(network.eval(), config, signature))


@pytest.fixture(scope="module")
def pronouncer():
    return model_of(LETTERS, num_steps=300)


def test_an_input_that_is_larger_than_a_batch_is_a_batch_by_itself(monkeypatch):
    monkeypatch.setitem(module.CELLS, "cpu", 4)
    pairs = [Pair("x", ("a",) * T, ("S",) * U, Origin(Path("x"))) for T, U in ((9, 5), (1, 1))]
    examples = LETTERS.examples(pairs)
    assert [ids for ids, _ in module.batches_of(model_of(LETTERS), examples)] == [[1], [0]]


def test_the_latency_counts_the_window_pooling_lookahead_and_deltas():
    sizes = dict(hidden_size=4, prediction_size=4, pooling=3)
    for settings, config, expected in (
        (FeatureSettings(), dict(bidirectional=False), 0.025 + 0.01 * (2 + 2)),
        (FeatureSettings(num_deltas=0), dict(bidirectional=False), 0.025 + 0.01 * 2),
        (FeatureSettings(), dict(bidirectional=False, lookahead=7), 0.025 + 0.01 * (2 + 2 + 7)),
        (FeatureSettings(), dict(bidirectional=False, backwards=True), None),
        (FeatureSettings(), {}, None),
        (None, dict(bidirectional=False), None),
    ):
        config = NetworkConfig(**sizes, **config)
        signature = LETTERS if settings is None else replace(SOUND, features=settings)
        model = Model(build_network(config, 26, 2), config, signature)
        assert model.latency == pytest.approx(expected)


@pytest.fixture
def shipped(tmp_path, monkeypatch, pronouncer):
    """Put a folder of models in place of the package's own."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(module, "FOLDER", folder)
    for name, model in (("tiny-pronouncer", pronouncer), ("tiny-recogniser", model_of(SOUND))):
        save_model(model, folder / f"{name}.safetensors", torch.float16)
    return folder


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.float16, 2)])
def test_a_model_is_the_same_after_saving_and_loading(tmp_path, pronouncer, dtype, size):
    model = pronouncer
    path = model.save_pretrained(tmp_path / "new" / "folder", dtype=dtype)
    found = load(path.parent)
    expected = {
        name: weights.to(dtype).float() for name, weights in model.network.state_dict().items()
    }
    weights = found.network.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert all(w.dtype == torch.float32 for w in weights.values())
    assert str(load(path)("abba")) == str(found("abba")) == "AA BB BB AA"
    count = sum(w.numel() for w in expected.values())
    assert size * count < path.stat().st_size < size * count + 5000
    assert [one.name for one in path.parent.iterdir()] == ["model.safetensors"]


def test_int8_matrices_are_within_half_a_step_of_each_rows_scale(tmp_path, pronouncer):
    path = pronouncer.save_pretrained(tmp_path, dtype=torch.int8)
    found = load(path).network.state_dict()
    for name, weights in pronouncer.network.state_dict().items():
        if name.endswith(("weight", "weights")):
            # The scale is a power of two below twice what 127 steps need.
            bound = weights.abs().amax(-1, keepdim=True) / 127 + 1e-7
            assert ((found[name] - weights).abs() <= bound).all()
            assert not torch.equal(found[name], weights)
        else:
            assert torch.equal(found[name], weights.half().float())
    count = sum(w.numel() for w in found.values())
    scales = sum(w.numel() // w.shape[-1] for n, w in found.items() if n.endswith(("weight", "s")))
    assert path.stat().st_size < count + 4 * scales + 2 * scales + 5000
    assert str(load(path)("abba")) == "AA BB BB AA"


def test_int8_weights_stay_as_they_are_when_they_are_saved_again(tmp_path, pronouncer):
    for model in (pronouncer, load("english-pronouncer")):  # with scales of an earlier file
        once = load(model.save_pretrained(tmp_path, dtype=torch.int8))
        twice = load(once.save_pretrained(tmp_path, dtype=torch.int8))
        weights = once.network.state_dict()
        again = twice.network.state_dict()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
    shipped = load("english-pronouncer").network.state_dict()
    assert all(torch.equal(shipped[name], weights[name]) for name in weights)


def test_statistics_keep_their_precision_in_a_half_precision_file(tmp_path):
    signature = replace(SOUND, statistics=Statistics(torch.full((26,), 1 / 3), torch.ones(26)))
    model_of(signature).save_pretrained(tmp_path, dtype=torch.float16)
    statistics = load(tmp_path).signature.statistics
    assert torch.equal(statistics.mean, torch.full((26,), 1 / 3))


def test_weights_too_large_for_a_dtype_are_not_written(tmp_path):
    model = model_of(LETTERS)
    with torch.no_grad():
        model.network.prediction_network.output.bias[0] = 1e6
    with pytest.raises(ValueError, match=r"prediction_network.output.bias.*too large for"):
        model.save_pretrained(tmp_path / "a", dtype=torch.float16)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_model_that_ships_is_loaded_by_its_name(shipped):
    model = transduce.load("tiny-pronouncer")
    found = model("abba's")
    assert str(found) == " ".join(found.symbols) != ""
    assert set(found.symbols) <= {"AA", "BB", "S"}
    assert repr(found) == f'Transcript("abba\'s": {found})'
    assert repr(model).startswith("Model(transducer: 4 symbols to 3 symbols, ")


def test_the_error_of_an_unknown_name_lists_the_names(shipped):
    with pytest.raises(CheckpointError) as error:
        load("tiny-pronounser")
    assert "'tiny-pronounser'" in str(error.value) and "\n" not in str(error.value)
    assert "did you mean tiny-pronouncer? the models that ship are tiny-pronouncer, tiny-recog" in (
        str(error.value)
    )


def test_a_name_cannot_leave_the_folder(shipped, tmp_path, monkeypatch):
    model_of(LETTERS).save_pretrained(tmp_path)  # tmp_path/model.safetensors
    monkeypatch.chdir(shipped)
    with pytest.raises(CheckpointError, match="models that ship"):
        load("../../nowhere/model")


def test_a_pickle_is_not_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load(tmp_path)


def test_several_models_make_an_ensemble_which_cannot_be_saved(tmp_path):
    paths = [
        model_of(LETTERS, seed=seed).save_pretrained(tmp_path / str(seed)) for seed in range(2)
    ]
    both = load(*paths)
    assert len(both.network.members) == 2
    assert str(both("abba")) == str(both(["abba"])[0]) and len(both("ab", n_best=2).hypotheses) == 2
    with pytest.raises(ValueError, match="save its members"):
        both.save_pretrained(tmp_path / "both")


def test_a_list_of_words_gives_a_list_in_the_same_order(pronouncer):
    model = pronouncer
    words = ["abba", "a", "sabsab", "bs", "a"]
    assert [str(one) for one in model(words)] == [str(model(word)) for word in words]
    assert str(model(words)[3]) == "BB S"
    assert [one.name for one in model(words)] == words
    assert model([]) == []


def test_letters_are_tried_in_the_other_case_and_unknown_ones_named(pronouncer):
    model = pronouncer
    assert str(model("ABBA\N{RIGHT SINGLE QUOTATION MARK}S")) == str(model("abba's"))
    assert str(model(("a", "b"))) == str(model("ab"))
    capitals = replace(model.signature, sources=Alphabet("ABS'"))
    shouting = replace(model, signature=capitals)
    assert str(shouting("abba's")) == str(model("abba's"))
    with pytest.raises(DataError, match="'ß' is no symbol that the model knows; it knows ' a b s"):
        model("baß")
    with pytest.raises(DataError, match="has nothing to read"):
        model("  ")


def test_n_best_hypotheses_are_sorted_and_print_with_their_probabilities(pronouncer):
    found = pronouncer("abs", n_best=3, beam_width=10)
    assert len(found.hypotheses) == 3
    scores = [h.score for h in found.hypotheses]
    assert scores == sorted(scores, reverse=True)
    assert len(str(found).splitlines()) == 3 and "and 2 more" in repr(found)


def test_the_reference_search_finds_the_same(pronouncer):
    model, asked = pronouncer, ["abba", "s", "ba"]
    batch = Batch.of([model.signature.example(word, unknown="refuse") for word in asked])
    plain = model.network.search(batch, SearchOptions(5, n_best=2), backend="reference")
    for ours, theirs in zip(plain, model(asked, n_best=2, beam_width=5), strict=True):
        assert [h.labels for h in ours] == [h.labels for h in theirs.hypotheses]
        assert ours[0].log_prob == pytest.approx(theirs.hypotheses[0].log_prob, abs=1e-4)


def test_a_file_and_its_samples_give_the_same_output(tmp_path):
    model = model_of(SOUND)
    samples = np.random.default_rng(0).normal(0, 0.1, 8000).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    found = model(
        [str(tmp_path / "a.wav"), tmp_path / "a.wav", samples, torch.from_numpy(samples)],
        with_timings=True,
    )
    assert len({one.hypotheses for one in found}) == 1
    assert all(one.seconds == 0.5 for one in found)
    assert len(found[0].hypotheses[0].timings) == len(found[0].symbols)
    with pytest.raises(DataError, match="no file"):
        model(tmp_path / "nothing.wav")


def test_another_sample_rate_and_a_second_channel_are_converted(tmp_path):
    model = model_of(SOUND)
    times = np.arange(44_100) / 44_100
    wave = 0.3 * np.sin(2 * np.pi * 440 * times) * np.sin(2 * np.pi * 3 * times)
    soundfile.write(tmp_path / "stereo.wav", np.stack([2 * wave, 0 * wave], 1), 44_100, "FLOAT")
    times = np.arange(16_000) / 16_000
    wave = 0.3 * np.sin(2 * np.pi * 440 * times) * np.sin(2 * np.pi * 3 * times)
    soundfile.write(tmp_path / "plain.wav", wave, 16_000, "FLOAT")
    files = (tmp_path / name for name in ("stereo.wav", "plain.wav"))
    stereo, plain = (model.signature.example(file) for file in files)
    assert stereo.num_frames == plain.num_frames == 98
    # The first coefficient is the energy of the whole spectrum.
    torch.testing.assert_close(stereo.frames[5:-5, 0], plain.frames[5:-5, 0], atol=1e-3, rtol=0)
    soundfile.write(tmp_path / "odd.wav", wave, 44_101)
    with pytest.raises(DataError, match=r"odd.wav: 44101 and 16000 .* convert it with `sox"):
        model(tmp_path / "odd.wav")


# --- Streams of inputs --------------------------------------------------------------------------

GREEDY, BEAM = SearchOptions(with_timings=False), SearchOptions(4, n_best=2, with_timings=False)


class Drawn:
    """An iterator over inputs that counts how many have been drawn."""

    def __init__(self, sources):
        self.sources, self.count = iter(sources), 0

    def __iter__(self):
        return self

    def __next__(self):
        source = next(self.sources)
        self.count += 1
        return source


def words(count):
    letters = "abs"
    return ["".join(letters[(n // 3**i) % 3] for i in range(1 + n % 5)) for n in range(count)]


def test_transcribe_holds_a_bounded_number_of_inputs(pronouncer):
    sources = Drawn(words(40))
    for number, found in enumerate(pronouncer.transcribe(sources, GREEDY, at_once=8)):
        assert found.name == words(40)[number]
        assert sources.count == 8 * (number // 8 + 1)
    assert number == 39


def test_transcribe_takes_few_inputs_first_and_more_later(pronouncer, monkeypatch):
    monkeypatch.setitem(module.FIRST_INPUTS, "cpu", 2)
    sources = Drawn(words(30))
    drawn = [sources.count for _ in pronouncer.transcribe(sources, GREEDY, at_once=8)]
    assert drawn == [2] * 2 + [6] * 4 + [14] * 8 + [22] * 8 + [30] * 8


def test_transcribe_holds_a_bounded_number_of_frames(pronouncer, monkeypatch):
    monkeypatch.setitem(module.HELD_FRAMES, "cpu", 10)
    sources = Drawn(["abbas"] * 9)
    drawn = [sources.count for _ in pronouncer.transcribe(sources, GREEDY)]
    assert drawn == [2, 2, 4, 4, 6, 6, 8, 8, 9]


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")  # the model is not trained
def test_transcribe_reads_a_bounded_number_of_sounds_ahead(set_num_threads):
    set_num_threads(1)
    model = model_of(SOUND)
    generator = torch.Generator().manual_seed(0)
    sounds = [0.1 * torch.randn(1000 + 100 * n, generator=generator) for n in range(30)]
    sources, expected = Drawn(sounds), [model(sound).hypotheses[0].labels for sound in sounds]
    found = []
    for number, one in enumerate(model.transcribe(sources, GREEDY, at_once=4)):
        found.append(one.hypotheses[0].labels)
        # A thread reads two inputs ahead, and one more as each result is taken.
        assert sources.count <= 4 * (number // 4 + 1) + 2
    assert found == expected


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_transcribe_yields_errors_in_the_place_of_bad_inputs(pronouncer, at_once):
    sources = ["ab", "", "baß", "s", torch.zeros(3), "a"]
    found = list(pronouncer.transcribe(sources, BEAM, at_once=at_once))
    kinds = [isinstance(one, DataError) for one in found]
    assert kinds == [False, True, True, False, True, False]
    assert [str(one) for one in found if not isinstance(one, DataError)] == [
        str(pronouncer(word, beam_width=4, n_best=2)) for word in ("ab", "s", "a")
    ]
    assert "nothing to read" in str(found[1]) and "'ß'" in str(found[2])
    [lenient] = pronouncer.transcribe(["baß"], GREEDY, unknown="null")
    assert lenient.name == "baß" and lenient.symbols


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, 3, 2.5, b"word", {"a"}, object()])
@pytest.mark.parametrize("signature", [LETTERS, SOUND], ids=["text", "sound"])
def test_an_input_of_another_type_is_refused(signature, source):
    model = model_of(signature)
    for given in (source, [source]):
        with pytest.raises(DataError, match=r"the model reads (text, not|sound; give it)"):
            model(given)


@pytest.mark.parametrize("number", [0, -1, True, 1.0, 2.5, "2", None])
@pytest.mark.parametrize("name", ["beam_width", "n_best"])
def test_a_width_or_number_that_is_not_a_whole_number_above_0_is_refused(pronouncer, name, number):
    with pytest.raises(ValueError, match=rf"^{name} must be (at least 1|a whole number), not "):
        pronouncer("ab", **{name: number})


@pytest.mark.parametrize(
    "dtype, middle, scale", [("uint8", 128, 2**7), ("int16", 0, 2**15), ("int32", 0, 2**31)]
)
def test_whole_samples_are_scaled(dtype, middle, scale):
    wave = 0.1 * np.random.default_rng(0).standard_normal(2000)
    whole = (wave * scale + middle).round().astype(dtype)
    expected = SOUND.example((whole.astype(np.float64) - middle) / scale).frames
    for samples in (whole, torch.from_numpy(whole)):
        assert torch.equal(SOUND.example(samples).frames, expected)


@pytest.mark.parametrize("dtype", ["int64", "int8", "bool", "complex64", "str"])
def test_samples_of_an_unknown_scale_are_refused(dtype):
    with pytest.raises(DataError, match=r"have no known scale|is neither samples nor frames"):
        SOUND.example(np.ones(2000).astype(dtype))


# --- Threads and backends -----------------------------------------------------------------------


def waves(count):
    generator = torch.Generator().manual_seed(0)
    return [0.1 * torch.randn(1600 + 400 * (n % 5), generator=generator) for n in range(count)]


@pytest.mark.parametrize("kind", ["text", "sound"])
@pytest.mark.parametrize("backend", slow_except({1}, ["eager", "cpu"]))
@pytest.mark.parametrize("options", [{}, {"beam_width": 4, "n_best": 3}], ids=["greedy", "beam"])
def test_a_model_called_from_many_threads_gives_its_output_alone(
    pronouncer, monkeypatch, kind, backend, options
):
    model = pronouncer if kind == "text" else model_of(SOUND)
    if backend == "cpu":
        monkeypatch.setattr(module, "SMALL_GREEDY", 0)
        monkeypatch.setattr(module, "SMALL_BEAM", 0)
    several = words(48) if kind == "text" else waves(16)
    inputs = [several[n::8] for n in range(8)]
    expected = [model(some, **options) for some in inputs]
    used = backends_of(monkeypatch)
    barrier = Barrier(8)

    def call(some):
        barrier.wait()
        return [model(some, **options) for _ in range(3)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(call, inputs))
    found += [[model(some, **options)] for some in inputs]  # nothing of the threads stays
    for alone, repeated in zip(expected * 2, found, strict=True):
        for one in repeated:
            assert [t.hypotheses for t in one] == [t.hypotheses for t in alone]
            assert [t.name for t in one] == [t.name for t in alone]
    assert set(used) == {"eager" if backend == "eager" else "auto"}


def backends_of(monkeypatch):
    """Record the backend of every search of a transducer."""
    original, backends = Transducer.search, []

    def recorded(network, batch, options, *, backend="auto"):
        backends.append(backend)
        return original(network, batch, options, backend=backend)

    monkeypatch.setattr(Transducer, "search", recorded)
    return backends


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_small_inputs_are_searched_by_the_eager_backend_with_the_output_of_cpu(
    pronouncer, monkeypatch, options
):
    backends = backends_of(monkeypatch)
    examples = [pronouncer.signature.example(word) for word in words(20)]
    eager = module.search_examples(pronouncer, examples, options)
    assert set(backends) == {"eager"}
    compiled = pronouncer.network.search(Batch.of(examples), options, backend="cpu")
    for ours, theirs in zip(eager, compiled, strict=True):
        assert [h.labels for h in ours] == [h.labels for h in theirs]
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], abs=1e-4)


@pytest.mark.parametrize(
    "options, small", [(GREEDY, "SMALL_GREEDY"), (BEAM, "SMALL_BEAM")], ids=["greedy", "beam"]
)
def test_larger_inputs_and_timings_are_left_to_the_fastest_backend(
    pronouncer, monkeypatch, options, small
):
    backends = backends_of(monkeypatch)
    examples = [pronouncer.signature.example(word) for word in words(20)]
    monkeypatch.setattr(module, small, sum(example.num_frames for example in examples) - 1)
    module.search_examples(pronouncer, examples, options)
    module.search_examples(pronouncer, examples[1:], options)
    module.search_examples(pronouncer, examples[1:], replace(options, with_timings=True))
    monkeypatch.setattr(module, "SHORT", max(example.num_frames for example in examples[1:]) - 1)
    module.search_examples(pronouncer, examples[1:], options)
    assert backends == ["auto", "eager", "auto", "auto"]


# --- Commands -----------------------------------------------------------------------------------


@pytest.fixture
def sounds(tmp_path, shipped):
    """Write two sound files; one of the models that ship takes sound."""
    for name in "ab":
        wave = np.random.default_rng(ord(name)).normal(0, 0.1, 8000)
        soundfile.write(tmp_path / f"{name}.wav", wave, 16_000)
    return tmp_path


RECOGNISER = ("--model", "tiny-recogniser")


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
def test_a_missing_sound_does_not_stop_the_others(sounds):
    options = ("--beam-width", 2, "--format", "json", "--output", "out", *RECOGNISER)
    done = command("recognize", "a.wav", "nothing.wav", "b.wav", *options, folder=sounds)
    sentence, last = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert done.returncode == 1 and "no file nothing.wav" in sentence
    assert last == "transduce: wrote 2 files into out"
    assert sorted(path.name for path in (sounds / "out").iterdir()) == ["a.json", "b.json"]


def test_a_model_that_ships_ignores_a_config_in_the_working_folder(shipped, tmp_path):
    (tmp_path / "config.toml").write_text("[data]\ntraining = 'of another run.jsonl'\n")
    done = command("evaluate", "tiny-pronouncer", folder=tmp_path)
    assert done.returncode == 1
    assert "tiny-pronouncer has no data of its own; give a file to evaluate on" in done.stderr


@pytest.mark.parametrize("option, number", [("--beam-width", -1), ("--n-best", 0)])
def test_search_widths_below_one_are_refused(shipped, tmp_path, option, number):
    done = command("phonemize", "a", option, number, "--model", "tiny-pronouncer", folder=tmp_path)
    assert done.returncode == 2
    assert f"{option} must be at least 1, not {number}" in done.stderr


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")  # the model is not trained
def test_phones_are_printed_with_their_times(sounds):
    done = command("recognize", "a.wav", "--beam-width", 2, *RECOGNISER, folder=sounds)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows and {row[0] for row in rows} <= {"aa", "b"}
    for _, start, peak, end, confidence in rows:
        assert 0 <= float(start) <= float(end) <= 0.5 and 0 <= float(confidence) <= 1
        assert 0 <= float(peak) <= 0.5
    both = command("recognize", "a.wav", "b.wav", "--beam-width", 2, *RECOGNISER, folder=sounds)
    assert both.stdout.startswith("a\n" + done.stdout + "b\n")


@pytest.mark.filterwarnings("ignore:max_labels_per_frame")
def test_phones_become_json_and_textgrids(sounds):
    options = ("a.wav", "b.wav", "--beam-width", 2, *RECOGNISER)
    done = command("recognize", *options, "--format", "json", folder=sounds)
    assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == ["a", "b"]
    done = command("recognize", *options, "--format", "textgrid", "--output", "out", folder=sounds)
    assert done.returncode == 0 and done.stdout == ""
    assert {path.name for path in (sounds / "out").iterdir()} == {"a.TextGrid", "b.TextGrid"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("recognize", *RECOGNISER), "give sound files"),
        (("recognize", "nothing.wav", *RECOGNISER), "no file nothing.wav"),
        (("recognize", "a.wav", "--model", "tiny-pronouncer"), "does not take sound"),
        (("phonemize", "ab", *RECOGNISER), "does not read text"),
        (("phonemize", "ab"), "'english-pronouncer'; the models that ship are tiny-pronouncer"),
    ],
)
def test_the_commands_name_inputs_that_they_cannot_use(sounds, arguments, said):
    done = command(*arguments, folder=sounds)
    assert done.returncode == 1 and said in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_every_model_that_ships_has_a_card_and_loads_and_is_small():
    names = module.model_names()
    if not names:
        pytest.skip(f"there are no models in {module.FOLDER}")
    for name in names:
        path = module.FOLDER / f"{name}.safetensors"
        assert path.with_suffix(".md").read_text().strip(), f"{name} has no card"
        with safe_open(path, "pt") as file:
            types = {file.get_tensor(key).dtype for key in file.keys() if "network." in key}  # noqa: SIM118
        assert torch.int8 in types
        assert load(name).network is not None
    files = [(module.FOLDER / f"{name}.safetensors").read_bytes() for name in names]
    assert sum(len(zlib.compress(content)) for content in files) < 20e6  # in the wheel


def test_the_pronouncer_pronounces_a_word():
    if "english-pronouncer" not in module.model_names():
        pytest.skip("there is no english-pronouncer")
    assert str(load("english-pronouncer")("transducer")) == "T R AE N S D UW S ER"


@pytest.mark.slow
def test_a_word_is_pronounced_without_numba():
    """Numba takes up to minutes to compile its kernels; a word must not wait for them."""
    code = """
import sys, tempfile, warnings
sys.path.insert(0, "tests")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
from test_model import LETTERS, model_of
import transduce
with tempfile.TemporaryDirectory() as folder:
    model_of(LETTERS).save_pretrained(folder)
    model = transduce.load(folder)
    assert len(model("abba", n_best=3, beam_width=5).hypotheses) == 3
    with warnings.catch_warnings(action="ignore"):  # the model is not trained
        model("abba")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.parametrize(
    "samples, said",
    [
        (np.zeros(0, np.float32), "there are no samples"),
        (np.full(16_000, np.nan, np.float32), "the samples have NaN"),
        (np.full(16_000, 20_000.0, np.float32), r"the samples reach 20000, .* in \[-1, 1\]"),
        (np.zeros((16_000, 2), np.float32), "has 2 channels of samples, not frames; give one"),
    ],
    ids=["none", "NaN", "another scale", "stereo"],
)
def test_samples_that_are_no_sound_are_refused(samples, said):
    with pytest.raises(DataError, match=said):
        model_of(SOUND)(samples)


def test_an_option_that_a_model_does_not_have_is_named(pronouncer):
    with pytest.raises(TypeError, match="a model has no option beam; the options are beam_width"):
        pronouncer("ab", beam=3)


def test_a_precision_for_gpus_is_refused_on_the_cpu(pronouncer):
    with pytest.raises(ValueError, match="precision bf16-mixed needs a GPU, not cpu; leave it out"):
        pronouncer.to("cpu", "bf16-mixed")
    with pytest.raises(ValueError, match="precision must be one of 32-true, 16-mixed, bf16-mixed"):
        pronouncer.to("cpu", "bf16")
    assert pronouncer.to("cpu") is pronouncer


def test_a_precision_is_that_of_every_transcription_network(pronouncer, monkeypatch):
    ensemble = Ensemble([Transducer(4, 3, 5), Transducer(4, 3, 6)])
    model = replace(pronouncer, network=ensemble)
    monkeypatch.setattr(ensemble, "to", lambda device: ensemble)  # there may be no GPU
    networks = [member.transcription_network for member in ensemble.members]
    model.to("cuda", "bf16-mixed")
    assert [network.product_type for network in networks] == [torch.bfloat16] * 2
    model.to("cuda")
    assert [network.product_type for network in networks] == [None] * 2


def test_an_evaluation_in_which_all_pairs_are_skipped_gives_the_first_error(tmp_path):
    origin = Origin(tmp_path / "test.jsonl", 1)
    pairs = [Pair(name, Audio(tmp_path / name), ("aa",), origin) for name in ("a.wav", "b.wav")]
    with pytest.raises(DataError, match=r"no pair can be read; the first error is: .*a\.wav"):
        evaluate(model_of(SOUND), pairs, skipped=[])
