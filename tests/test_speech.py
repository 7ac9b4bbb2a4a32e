"""A continuous transducer as a model: trained on toy sounds, saved, loaded, and heard."""

import json
import warnings
from dataclasses import replace

import pytest
import soundfile
import torch
from commands import transduce
from toys import sound_recipe

import transduce as package
from transduce import cli
from transduce.alignment.pronunciations import said_symbols
from transduce.alphabet import Alphabet
from transduce.analysis.speech import (
    node_mixture,
    null_sensitivity,
    speech_figure,
    view_speech,
)
from transduce.architectures import NetworkConfig
from transduce.data.batches import Batch
from transduce.data.pairs import DataError, Notation
from transduce.model.signature import Signature
from transduce.model.speech import Speech, conditions, speak
from transduce.training.checks import TrainingError
from transduce.training.corpus import read_corpus
from transduce.training.fit import fit
from transduce.web import server
from transduce.web.speech import SpeechExplorer


def recipe_of(tmp_path, **train):
    recipe = sound_recipe(tmp_path, "continuous", **({"learning_rate": 5e-3} | train))
    lines = [json.loads(line) for line in (tmp_path / "sounds.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line |= {"speaker": ("ann", "bob")[i % 2], "text": " ".join(line["text"].replace(" ", ""))}
    (tmp_path / "sounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    features = replace(recipe.data.features, window=0.04)
    spaces = Notation("spaces", None)
    data = replace(recipe.data, target="speaker,text", target_notation=spaces, features=features)
    return replace(recipe, data=replace(data, stacking=2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few epochs on 24 words of tones."""
    folder = tmp_path_factory.mktemp("speech")
    fit(recipe_of(folder, max_epochs=6), folder / "run")
    return folder / "run"


@pytest.fixture
def model(run):
    return package.load(run)


LINE = "speaker=ann a b c"
SYMBOLS = tuple(LINE.split())


def said(model, source=SYMBOLS, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_outputs_per_input")
        return model.speak(source, **options)


# --- Training -----------------------------------------------------------------------------------


def test_pairs_of_sound_and_text_are_read_the_other_way_round(tmp_path):
    corpus = read_corpus(recipe_of(tmp_path).data, spoken=True)
    signature, one = corpus.signature, corpus.training[0]
    assert signature.sources.symbols == ("a", "b", "c", "speaker=ann", "speaker=bob")
    assert signature.output_size == 20 and len(signature.targets) == 0
    assert signature.sources.decode(one.frames.tolist()) == list(one.pair.target)
    samples, _ = soundfile.read(one.pair.source.path)
    num_frames = signature.outputs.features.num_frames(len(samples))
    assert one.labels.shape == (-(-num_frames // 2), 20)
    every = torch.cat([example.labels for example in corpus.training])
    assert every.mean().abs() < 0.1 and (every.std() - 1).abs() < 0.1


def test_training_lowers_the_bits_and_another_run_ends_alike(run, tmp_path):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bits = [line["bits_per_label"] for line in metrics]
    assert bits[-1] < bits[0] - 5
    assert metrics[-1]["error_rate"] is None
    fit(recipe_of(tmp_path, max_epochs=6), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 6
    again = package.load(tmp_path / "run").network.state_dict()
    for name, weights in package.load(run).network.state_dict().items():
        assert torch.equal(weights, again[name])


@pytest.mark.parametrize(
    "train, problem",
    [
        ({"stop_at": "error_rate"}, "train.stop_at error_rate is not for a continuous transducer"),
        ({"consistency": 1.0}, "consistency"),
    ],
)
def test_settings_for_labels_are_refused(tmp_path, train, problem):
    with pytest.raises(TrainingError, match=problem):
        fit(recipe_of(tmp_path, **train), tmp_path / "run", validate=lambda *_: 0.0)


def test_backwards_is_refused():
    with pytest.raises(ValueError, match="backwards is for a transducer, not continuous"):
        NetworkConfig("continuous", backwards=True)


def test_text_without_sound_is_refused(tmp_path):
    recipe = recipe_of(tmp_path)
    (tmp_path / "toy.tsv").write_text("".join(f"{'a' * n}\tb\n" for n in range(1, 30)))
    data = replace(recipe.data, corpus="tsv", training=tmp_path / "toy.tsv", target="text")
    with pytest.raises(DataError, match="has no sound; give a manifest with audio_filepath"):
        fit(replace(recipe, data=data), tmp_path / "run")


# --- Speech -------------------------------------------------------------------------------------


def test_speech_has_frames_samples_and_the_times_of_its_symbols(model, tmp_path):
    speech = said(model)
    assert isinstance(speech, Speech) and speech.symbols == SYMBOLS
    assert speech.frames.shape == (2 * len(speech.generated.inputs), 10)
    features = model.signature.outputs.features
    assert features.num_frames(len(speech.samples)) == len(speech.frames)
    ends = [end for _, _, end in speech.intervals]
    assert ends == sorted(ends) and ends[-1] == pytest.approx(len(speech.frames) * 0.01)
    speech.save(tmp_path / "a.wav")
    samples, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == speech.sample_rate == 8000 and len(samples) == len(speech.samples)


def test_many_lines_are_spoken_at_once_as_one_by_one(model):
    lines = [LINE, "speaker=bob c", "speaker=ann b b"]
    together = said(model, lines)
    for line, one in zip(lines, together, strict=True):
        alone = said(model, line)
        assert alone.generated.inputs == one.generated.inputs
        torch.testing.assert_close(alone.frames, one.frames)


def test_a_model_that_was_loaded_is_the_one_that_was_saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    again = package.load(tmp_path / "saved")
    assert torch.equal(said(again).frames, said(model).frames)
    assert again.signature.difference(model.signature) is None
    assert "continuous: 5 symbols to frames of 20 numbers" in repr(again)
    assert conditions(again.signature) == {"speaker": ["ann", "bob"]}


def test_the_posterior_says_at_which_symbol_each_output_was_emitted(model, run):
    pair = read_corpus(recipe_of(run.parent).data, spoken=True).training[0]
    view = view_speech(model, pair.frames, pair.labels)
    T, U = len(pair.frames), len(pair.labels)
    assert view.posterior.shape == (T, U) and len(view.best) == U
    torch.testing.assert_close(view.posterior.sum(0), torch.ones(U).double())
    assert list(view.best) == sorted(view.best)
    with torch.no_grad():
        loss = float(model.network.losses(Batch.of([pair])))
    assert view.log_density == pytest.approx(-loss, rel=1e-5)


def test_the_mixture_of_a_node_is_that_of_the_lattice(model, run):
    pair = read_corpus(recipe_of(run.parent).data, spoken=True).training[0]
    view = view_speech(model, pair.frames, pair.labels)
    T, U = view.posterior.shape
    assert view.log_null.shape == view.log_product.shape == (T, U + 1)
    for t, u in ((0, 0), (T - 1, U - 1), (T // 2, U // 2)):
        node = node_mixture(view, t, u)
        assert node.null == pytest.approx(float(view.log_null[t, u].exp()))
        assert float(node.weights.sum()) == pytest.approx(1)
        gaussians = torch.distributions.Normal(node.means, node.deviations)
        densities = gaussians.log_prob(view.outputs[u]).sum(1)
        torch.testing.assert_close(node.log_densities, densities)
        assert node.log_density == pytest.approx(float(view.log_next_output[t, u]))
    assert node_mixture(view, 0, U).log_densities.shape == (0,)
    for n in (0, U // 2, T + U - 1):  # Eq. 19
        nodes = [view.log_product[t, n - t] for t in range(T) if 0 <= n - t <= U]
        assert float(torch.stack(nodes).exp().sum()) == pytest.approx(1)
    with pytest.raises(ValueError, match=f"no node {T},0 .*; t is 0 to {T - 1} and u 0 to {U}"):
        node_mixture(view, T, 0)


def test_the_sensitivity_of_null_is_its_derivative_by_the_outputs_before(model, run):
    pair = read_corpus(recipe_of(run.parent).data, spoken=True).training[0]
    view, (t, u) = view_speech(model, pair.frames, pair.labels), (2, 4)
    found = null_sensitivity(model, view, t, u)
    assert found.inputs.shape == (len(pair.frames), 5)
    assert found.outputs.shape == view.outputs.shape
    assert (found.outputs[u:] == 0).all() and (found.outputs[:u] != 0).any()
    where, step = divmod(int(found.outputs.abs().argmax()), view.outputs.shape[1]), 0.01
    nulls = []
    for sign in (1, -1):
        outputs = pair.labels.clone()
        outputs[where] += sign * step
        nulls.append(node_mixture(view_speech(model, pair.frames, outputs), t, u).null)
    assert (nulls[0] - nulls[1]) / (2 * step) == pytest.approx(
        float(found.outputs[where]), rel=0.01
    )


def test_a_vector_that_pools_symbols_is_named_after_all_of_them(tmp_path):
    recipe = recipe_of(tmp_path, max_epochs=1)
    recipe = replace(recipe, network=replace(recipe.network, pooling=2))
    fit(recipe, tmp_path / "run")
    model = package.load(tmp_path / "run")
    pair = read_corpus(recipe.data, spoken=True).training[0]
    pair = replace(pair, frames=pair.frames[:3])
    view = view_speech(model, pair.frames, pair.labels)
    one, two, three = view.symbols
    assert view.names == (f"{one} {two}", three) and len(view.posterior) == 2
    speech_figure(view)


@pytest.mark.parametrize(
    "text", ["speaker=ann Seven!", "speaker=ann S EH V AH N", "s eh v ah n speaker=ann"]
)
def test_a_text_is_said_by_its_own_symbols_or_the_phones_of_its_words(text):
    spaces, sources = Notation("spaces", None), Alphabet(["S", "EH", "V", "AH", "N", "speaker=ann"])
    signature = Signature(Alphabet([]), spaces, sources, spaces)
    said = said_symbols(signature, text)
    assert sources.respell(said) == ["speaker=ann", "S", "EH", "V", "AH", "N"]


# --- What it cannot do --------------------------------------------------------------------------


def test_functions_of_labels_say_that_there_are_none(model):
    with pytest.raises(ValueError, match="streams are for one transducer, not for continuous"):
        model.stream()
    with pytest.raises(ValueError, match="outputs vectors, not labels; generate them with `speak`"):
        model(LINE)
    with pytest.raises(ValueError, match="outputs labels, and does not speak"):
        speak(package.load("english-pronouncer"), ["cat"])
    with pytest.raises(DataError, match="'d' is no symbol that the model knows"):
        model.speak("speaker=ann d")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["transcribe", "run", "x.txt"], "outputs vectors, not labels"),
        (["export", "run", "--output", "out"], "a continuous transducer has no ONNX export"),
        (["serve", "run"], "the API has no speech; use transduce speak"),
        (["plot", "variables", "run", LINE], "has no variables; plot its lattice"),
        (["align", "a.wav", "--text", "a", "--model", "run"], "a continuous network cannot align"),
        (["speak", "run", "a b"], "give a --speaker; the model has ann, bob"),
        (["speak", "run", "a b", "--speaker", "eve"], "no speaker 'eve'; the model has ann, bob"),
        (["speak", "run", "a", "--speaker", "ann", "-o", "x.mp3"], "x.mp3 must end in .wav"),
        (["speak", "english-pronouncer", "a"], "does not speak; give a run of a continuous"),
    ],
)
def test_commands_that_cannot_take_it_say_so_in_one_sentence(run, arguments, sentence):
    (run.parent / "x.txt").write_text(LINE + "\n")
    (run.parent / "a.wav").write_bytes((run.parent / "0.wav").read_bytes())
    done = transduce(*arguments, folder=run.parent)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# --- Commands -----------------------------------------------------------------------------------


def test_speak_writes_a_sound_and_prints_when_each_symbol_is_said(run, model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_outputs_per_input")
        done = transduce(
            "speak", "run", "a b c", "--speaker", "ann", "-o", "x.wav", folder=run.parent
        )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "x.wav"
    assert [line.split("\t")[2] for line in lines] == [s for s, *_ in said(model).intervals]
    assert soundfile.info(run.parent / "x.wav").samplerate == 8000


@pytest.mark.parametrize("target", [[], ["--target", "0.wav"]])
def test_plot_draws_when_each_symbol_is_said(run, target):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_outputs_per_input")
        done = transduce(
            "plot", "lattice", "run", LINE, *target, "--output", "x.svg", folder=run.parent
        )
    assert done.returncode == 0, done.stderr
    drawn = (run.parent / "x.svg").read_text()
    assert "speaker=ann" in drawn and "time, seconds" in drawn


def test_explore_shows_it_with_the_examples_of_its_run(run, monkeypatch):
    shown = []
    monkeypatch.setattr(server, "serve", lambda *arguments: shown.append(arguments))
    with pytest.raises(SystemExit, match="0"):
        cli.app(["explore", str(run), "--port", "0"])
    [(explorer, *_)] = shown
    assert isinstance(explorer, SpeechExplorer) and len(explorer.pairs) == 4
    answer = explorer.open_example(0)
    assert answer["has_recording"] and answer["symbols"] == list(explorer.pairs[0].target)


def test_evaluate_prints_the_bits_of_an_output(run):
    done = transduce(
        "evaluate", "run", "sounds.jsonl", "--target", "speaker,text", folder=run.parent
    )
    assert done.returncode == 0, done.stderr
    assert "continuous" in done.stdout
