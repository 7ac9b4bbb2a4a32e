"""The inputs of commands: sound, frames and text, and errors for anything else."""

import os
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from torch.testing import assert_close

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, Transducer
from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.audio.sound import read_wave
from transduce.cli import app
from transduce.data.pairs import Audio, DataError, Notation, Origin, Pair
from transduce.model.checkpoint import TrainedModel, save_model
from transduce.model.inputs import (
    distinct_names,
    line_batches,
    read_input,
    read_inputs,
    read_spectrogram,
    stream_lines,
)
from transduce.model.signature import Signature

TARGETS = Alphabet(["AH", "B", "K"])
PHONES = Notation("spaces", None)
CEPSTRA = FeatureSettings()


@pytest.fixture
def model():
    """Return an untrained transducer of sound."""
    torch.manual_seed(0)
    statistics = Statistics(torch.full((CEPSTRA.size,), 2.0), torch.full((CEPSTRA.size,), 3.0))
    signature = Signature(TARGETS, PHONES, features=CEPSTRA, statistics=statistics)
    network = Transducer(CEPSTRA.size, len(TARGETS), 8, pooling=2)
    config = NetworkConfig(hidden_size=8, prediction_size=8, pooling=2)
    return TrainedModel(network.eval(), config, signature)


@pytest.fixture
def sound(tmp_path):
    path = tmp_path / "tone.wav"
    soundfile.write(path, np.sin(np.arange(8000) / 5) / 4, 16_000)
    return path


def test_a_sound_file_is_read_as_the_network_takes_it(model, sound):
    signature = model.signature
    pair = read_input(signature, str(sound))
    [alone] = read_inputs(signature, [sound])
    example = signature.example(replace(pair, target=("B", "AH")), with_labels=True)
    assert alone == pair
    assert torch.equal(example.frames, signature.example(alone).frames)
    assert example.labels.tolist() == signature.labels_of("B AH").tolist() == [2, 1]
    assert signature.example(alone).labels.tolist() == []
    frames = Features(CEPSTRA)(read_wave(pair.source, 16_000)[None])[0][0]
    assert_close(example.frames, (frames - 2) / 3)


def test_frames_of_a_file_are_normalised(model, tmp_path):
    np.save(tmp_path / "frames.npy", np.ones((5, CEPSTRA.size), np.float32))
    pair = read_input(model.signature, str(tmp_path / "frames.npy"))
    example = model.signature.example(pair)
    assert_close(example.frames, torch.full((5, CEPSTRA.size), -1 / 3))
    assert read_spectrogram(model.signature, pair) is None


def test_a_spectrogram_has_the_frames_of_the_input(model, sound):
    pair = read_input(model.signature, str(sound))
    num_frames = model.signature.example(pair).num_frames
    assert read_spectrogram(model.signature, pair).shape == (num_frames, 64)


def test_text_for_a_network_of_sound_is_refused(model):
    with pytest.raises(DataError, match=r"'hello' is not a sound file or a \.npy file"):
        read_input(model.signature, "hello")


def test_a_missing_file_is_named(model, tmp_path):
    pair = read_input(model.signature, str(tmp_path / "missing.wav"))
    with pytest.raises(DataError, match=r"no file .*missing\.wav"):
        model.signature.example(pair)


@pytest.mark.parametrize("figure", ["variables", "sensitivity"])
def test_figures_of_sound_are_drawn(model, sound, figure, tmp_path, capsys):
    save_model(model, tmp_path)
    output = tmp_path / "figure.pdf"
    arguments = ["plot", figure, tmp_path, sound, "--target", "AH B", "--output", output]
    app([str(argument) for argument in arguments], result_action="return_value")
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_bytes().startswith(b"%PDF")


def test_lines_come_in_batches_as_they_are_written():
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream:
        batches = line_batches(stream)
        os.write(writing, b"\xef\xbb\xbfone\r\ntw")  # with a byte order mark; a line is cut
        assert next(batches) == ["one\r"]
        os.write(writing, b"o\n\ncaf\xc3")  # a letter is cut
        assert next(batches) == ["two", ""]
        os.write(writing, b"\xa9\n\xff\nlast")
        os.close(writing)
        assert list(batches) == [["caf\u00e9", "\ufffd"], ["last"]]


def test_equal_names_are_told_apart_by_their_folders():
    def named(*paths):
        pairs = [Pair(os.path.basename(p).split(".")[0], Audio(p), (), Origin(p)) for p in paths]
        return list(distinct_names(pairs))

    assert named("a/x.wav", "b/x.wav", "a/y.wav") == ["a-x", "b-x", "y"]
    assert named("a/x.wav", "a/x.flac") == ["x.wav", "x.flac"]
    assert named("x.wav", "x.wav", "x.wav") == ["x", "x-2", "x-3"]
    assert named("/one/a/x.wav", "/one/x.wav") == ["a-x", "x"]
    parts = [
        Pair(f"x@{t}", Audio(f"{a}/x.wav", t, 1.0), (), Origin("m")) for a in "ab" for t in (1, 2)
    ]
    assert list(distinct_names(parts)) == ["a-x@1", "a-x@2", "b-x@1", "b-x@2"]


def test_lines_of_a_file_are_read_as_they_are_and_bad_ones_named(tmp_path):
    file = tmp_path / "words.txt"
    file.write_bytes("\ufeffone\r\n\n".encode() + b"\xff\n" + "\ufefffour".encode())
    one, blank, bad, four = stream_lines(file)
    assert (one, blank, four) == ("one", "", "\ufefffour")
    assert str(bad) == f"{file}, line 3: it is not UTF-8; convert the file to UTF-8"
