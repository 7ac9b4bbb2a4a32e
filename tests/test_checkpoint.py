"""Model files: everything is read back, and other files are refused with one sentence."""

import errno
import json
import os
import pickle
import resource
import stat
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from transduce import Ensemble
from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, Transducer, build_network
from transduce.audio.features import SPECTROGRAM, Statistics
from transduce.data.batches import Batch
from transduce.data.pairs import Notation
from transduce.graphones.model import JointNGram
from transduce.model import tensors as module
from transduce.model.checkpoint import (
    CheckpointError,
    TrainedModel,
    TrainingStatus,
    load_ensemble,
    load_model,
    save_model,
)
from transduce.model.joint_ngram import JointNGramModel, save_joint_ngram
from transduce.model.signature import Signature
from transduce.networks import PredictionNetwork, TranscriptionNetwork

TEXT = Signature(
    Alphabet(["AH", "ü"]), Notation("spaces", None), Alphabet("ab"), Notation("characters", "NFKD")
)
SOUND = Signature(
    Alphabet("xyz"),
    Notation("characters", None),
    features=SPECTROGRAM,
    statistics=Statistics(torch.arange(40.0), torch.full((40,), 2.0)),
)
TARGETS = Signature(Alphabet("xyz"), Notation("characters", None))


def model_of(kind="transducer", signature=TEXT, **sizes):
    config = NetworkConfig(kind, **({"hidden_size": 5, "prediction_size": 4} | sizes))
    network = build_network(config, signature.input_size, len(signature.targets))
    return TrainedModel(network, config, signature, TrainingStatus(3, 70, 1.25, 0.5))


@pytest.mark.parametrize("signature", [TEXT, SOUND], ids=["text", "sound"])
@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_a_model_is_the_same_after_saving_and_loading(tmp_path, kind, signature):
    sizes = {"num_layers": 2, "pooling": 2, "prediction_layers": 2, "dropout": 0.25}
    sizes["embedding_size"] = 3
    if signature is SOUND and kind != "prediction":
        sizes |= {"bidirectional": False, "lookahead": 2}
    model = model_of(kind, TARGETS if kind == "prediction" else signature, **sizes)
    save_model(model, tmp_path)
    found = load_model(tmp_path)
    assert (found.config, found.status) == (model.config, model.status)
    for name in ("targets", "sources"):
        ours, theirs = getattr(model.signature, name), getattr(found.signature, name)
        assert getattr(theirs, "symbols", None) == getattr(ours, "symbols", None)
    for name in ("target_notation", "source_notation", "features", "input_size"):
        assert getattr(found.signature, name) == getattr(model.signature, name)
    if signature is SOUND and kind != "prediction":
        assert torch.equal(found.signature.statistics.mean, SOUND.statistics.mean)
        assert torch.equal(found.signature.statistics.deviation, SOUND.statistics.deviation)
    weights, before = found.network.state_dict(), model.network.state_dict()
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert not found.network.training


def test_the_networks_have_the_papers_numbers_of_weights():
    sound = Signature(Alphabet(map(str, range(39))), Notation("spaces", None))
    counts = {}
    for kind, cls in (
        ("transducer", Transducer),
        ("ctc", TranscriptionNetwork),
        ("prediction", PredictionNetwork),
    ):
        network = build_network(NetworkConfig(kind), 26, len(sound.targets))
        assert isinstance(network, cls)
        weights = [tensor.detach() for tensor in network.parameters()]
        assert all(tensor.abs().max() <= 0.1 for tensor in weights)
        counts[kind] = sum(tensor.numel() for tensor in weights)
    assert counts == {"transducer": 261_328, "ctc": 169_768, "prediction": 91_431}


def test_text_becomes_ids_and_unknown_symbols_null():
    assert TEXT.example("abz").frames.tolist() == [1, 2, 0]
    assert TEXT.example("\N{FULLWIDTH LATIN SMALL LETTER A}b").frames.tolist() == [1, 2]  # NFKD
    assert TEXT.text([1, 2, 1]) == "AH ü AH"
    assert TARGETS.text([1, 2, 1]) == "xyx"


def test_sound_becomes_normalised_frames():
    wave = torch.randn(1600)
    frames = SOUND.example(wave).frames
    assert frames.shape == (8, 40)
    raw = frames * 2 + torch.arange(40.0)
    torch.testing.assert_close(SOUND.example(raw).frames, frames, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="39 numbers a frame where the model was trained on 40"):
        SOUND.example(raw[:, :39])
    with pytest.raises(ValueError, match="the model reads text"):
        TEXT.example(wave)


def broken(tmp_path, kind):
    """Write a file that is not a model, of the given kind."""
    path = tmp_path / "model.safetensors"
    save_model(model_of(), path)
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-10])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"weights": [1, 2, 3]}))
    elif kind == "text":
        path.write_text("[train]\nmax_epochs = 3\n")
    elif kind == "a line of JSON":
        path.write_text('{"text":{"a": 1}}\n')  # whose ninth byte is that of safetensors
    elif kind == "foreign":
        save_file({"a": torch.ones(2)}, path)
    elif kind == "another kind":
        module.write_tensors(path, {"a": torch.ones(2)}, {}, "the state of a run")
    elif kind == "incomplete":
        module.write_tensors(path, {"a": torch.ones(2)}, {}, "a model")
    elif kind == "of other weights":
        tensors, header = module.read_tensors(path, "a model")
        tensors.popitem()
        del header["kind"], header["version"]
        module.write_tensors(path, tensors, header, "a model")
    elif kind == "missing":
        path.unlink()
    return path


@pytest.mark.parametrize(
    "kind, said",
    [
        ("truncated", "cannot be read"),
        ("empty", "is not a model, because it is not a safetensors file; give the folder of a run"),
        ("pickle", "is not a safetensors file"),
        ("text", "is not a safetensors file"),
        ("a line of JSON", "is not a safetensors file"),
        ("foreign", "was not written by transduce"),
        ("another kind", "is the state of a run, not a model"),
        ("incomplete", "is damaged"),
        ("of other weights", "is damaged"),
        ("missing", "there is no file"),
    ],
)
def test_the_error_of_a_file_that_is_no_model_is_one_sentence(tmp_path, kind, said):
    path = broken(tmp_path, kind)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    assert said in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_without_weights_is_to_be_continued(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match=r"was stopped before the first validation; continue"):
        load_model(tmp_path)


def test_a_file_of_another_version_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "VERSION", 2)
    save_model(model_of(), tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has version 2 where 1 is wanted"):
        load_model(tmp_path)


OTHER = {
    "target symbols": replace(TEXT, targets=Alphabet(["ü", "AH"])),
    "source symbols": replace(TEXT, sources=Alphabet("ac")),
    "notations": replace(TEXT, source_notation=Notation("characters", None)),
    "features": replace(SOUND, features=replace(SPECTROGRAM, shift=0.02)),
    "statistics of frames": replace(
        SOUND, statistics=Statistics(torch.arange(40.0), torch.full((40,), 3.0))
    ),
}


@pytest.mark.parametrize("differs", OTHER)
def test_models_with_different_inputs_or_outputs_make_no_ensemble(tmp_path, differs):
    other = OTHER[differs]
    save_model(model_of(signature=SOUND if other.features else TEXT), tmp_path / "a.safetensors")
    save_model(model_of(signature=other), tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"b.safetensors has other {differs} than .*a.safe"):
        load_ensemble([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_models_that_read_text_and_sound_make_no_ensemble(tmp_path):
    save_model(model_of(), tmp_path / "text.safetensors")
    save_model(model_of(signature=SOUND), tmp_path / "sound.safetensors")
    with pytest.raises(CheckpointError, match=r"sound.safetensors reads sound, and .*text\.safe\S+ "
                       "reads text; an ensemble is of models that read the same"):  # fmt: skip
        load_ensemble([tmp_path / "text.safetensors", tmp_path / "sound.safetensors"])


def test_an_ensemble_of_files_has_the_networks_of_the_files(tmp_path):
    models = [model_of(hidden_size=size) for size in (4, 6)]
    for i, model in enumerate(models):
        save_model(model, tmp_path / f"{i}.safetensors")
    found = load_ensemble([tmp_path / f"{i}.safetensors" for i in range(2)])
    frames, labels = torch.tensor([[1, 2, 1]]), torch.tensor([[1]])
    batch = Batch((), frames, torch.tensor([3]), labels, torch.tensor([1]))
    expected = Ensemble([model.network for model in models]).losses(batch)
    torch.testing.assert_close(found.network.losses(batch), expected)
    save_model(model_of("ctc"), tmp_path / "ctc.safetensors")
    with pytest.raises(CheckpointError, match=r"ctc.safetensors is of the kind ctc; an ensemble"):
        load_ensemble([tmp_path / "0.safetensors", tmp_path / "ctc.safetensors"])


def joint_of(signature=TEXT):
    pair = np.array([1, 2]), np.array([1, 2])
    ngram = JointNGram.learn([pair], len(signature.sources), len(signature.targets))
    return JointNGramModel(ngram, signature)


def test_a_joint_model_among_the_files_ranks_the_outputs_of_the_others(tmp_path):
    save_model(model_of(), tmp_path / "model.safetensors")
    save_joint_ngram(joint_of(), tmp_path / "n.safetensors")
    paths = [tmp_path / "n.safetensors", tmp_path]  # in any order, and a folder as well
    found = load_ensemble(paths)
    assert isinstance(found.network, Ensemble) and len(found.network.members) == 1
    [scorer] = found.network.scorers
    source, labels = np.array([2, 1]), np.array([1])
    assert scorer.log_joint(source, labels) == joint_of().ngram.log_joint(source, labels)
    assert load_ensemble([tmp_path]).network.kind == "transducer"
    assert not isinstance(load_ensemble([tmp_path]).network, Ensemble)


def test_joint_models_alone_make_no_ensemble(tmp_path):
    path = tmp_path / "n.safetensors"
    save_joint_ngram(joint_of(), path)
    for paths in ([path], [path, path]):
        with pytest.raises(CheckpointError) as error:
            load_ensemble(paths)
        assert str(error.value) == (
            f"{path} is a joint n-gram model, which ranks the outputs of transducers; give the run "
            "of a transducer"
        )


def test_a_joint_model_that_does_not_fit_the_others_is_refused(tmp_path):
    save_joint_ngram(
        joint_of(replace(TEXT, targets=Alphabet(["ü", "AH"]))), tmp_path / "n.safetensors"
    )
    save_model(model_of(), tmp_path / "text.safetensors")
    save_model(model_of(signature=SOUND), tmp_path / "sound.safetensors")
    save_model(model_of("ctc"), tmp_path / "ctc.safetensors")
    for name, said in (
        ("text", r"n.safetensors has other target symbols than .*text.safetensors; give runs"),
        ("sound", r"n.safetensors reads text, and .*sound.safetensors reads sound; an ensemble"),
        ("ctc", r"ctc.safetensors is of the kind ctc; an ensemble is of transducers"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_ensemble([tmp_path / f"{name}.safetensors", tmp_path / "n.safetensors"])


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    save_model(model_of(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full") as failure:
        save_model(model_of(hidden_size=6), tmp_path)
    assert failure.value.filename == str(tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_model_file_has_the_permissions_of_the_umask(tmp_path):
    save_model(model_of(), tmp_path)
    Path(tmp_path / "plain").write_bytes(b"")
    modes = [stat.S_IMODE((tmp_path / f).stat().st_mode) for f in ("model.safetensors", "plain")]
    assert modes[0] == modes[1]


def rewritten(path, tensors=None, **changes):
    """Write a model's file again with other values in its header, or other tensors."""
    before, header = module.read_tensors(path, "a model")
    for name, value in changes.items():
        if name in header:
            header[name] = value
        else:
            header["network"][name] = value
    del header["kind"], header["version"]
    module.write_tensors(path, before if tensors is None else tensors, header, "a model")


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"hidden_size": 20_000},
            r"network.transcription_network.lstm.layers.0.input_weights has the shape \[2, 20, 2\] "
            r"where its header means \[2, 80000, 2\]",
        ),
        (
            {"prediction_size": 30_000},
            r"network.prediction_network.lstm.layers.0.input_weights has the shape \[1, 16, 2\] "
            r"where its header means \[1, 120000, 2\]",
        ),
        ({"num_layers": 10**6}, "num_layers must be at most 1,000, not 1000000"),
        ({"num_layers": 2}, "there is no tensor network.transcription_network.lstm.layers.1"),
        ({"prediction_layers": 900}, "there is no tensor network.prediction_network.lstm.layers"),
        ({"hidden_size": 10**30}, r"hidden_size must be below 2\^63"),
        ({"hidden_size": 2**40}, "hidden_size must be at most 1,000,000, not 1099511627776"),
        ({"pooling": 10**12}, "pooling must be at most 1,000, not 1000000000000"),
        ({"targets": ["a", "b", "c"]}, "has the shape .* where its header means"),
        ({"targets": [1, 2]}, "symbols must be text"),
        ({"targets": 3}, "is damaged"),
        ({"network": [1]}, "is damaged"),
        ({"target_notation": {"split": [1]}}, "is damaged"),
        ({"sources": None, "features": {"window": 1e300}}, "input_size must be at least 1"),
    ],
    ids=[*map(str, range(14))],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused_before_the_network_is_built(
    tmp_path, changes, said
):
    path = tmp_path / "model.safetensors"
    save_model(model_of(), path)
    rewritten(path, **changes)
    started, before = time.perf_counter(), peak_memory()
    with pytest.raises(CheckpointError, match=said) as error:
        load_model(tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert peak_memory() - before < 100e6
    assert time.perf_counter() - started < 5


def peak_memory():
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_metadata_nested_thousands_deep_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path, {"transduce": "[" * 100_000 + "]" * 100_000})
    with pytest.raises(CheckpointError, match="was not written by transduce"):
        load_model(tmp_path)


def test_a_file_that_claims_terabytes_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "model.safetensors"
    name = "network.prediction_network.output.weight"
    save_model(model_of(), path)
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_size])
    # A sparse file has the bytes that its header claims, and takes none of the disk.
    first = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    header["network.more"] = {
        "dtype": "F32", "shape": [10**12 // 4], "data_offsets": [first, first + 10**12]
    }  # fmt: skip
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + header_size :]
    claims = {
        "a sparse file": (whole, len(whole) + 10**12, "network.more|cannot be read"),
        "tensors beyond the end": (whole, None, "cannot be read"),
        "a long header": ((10**12).to_bytes(8, "little") + whole[8:], None, "not a safetensors"),
        "another shape": (
            whole.replace(b'"shape": [3, 4]', b'"shape": [9, 9]'), None, "cannot be read"
        ),
    }  # fmt: skip
    assert name in header
    for claim, (content, size, said) in claims.items():
        path.write_bytes(content)
        if size is not None:
            os.truncate(path, size)
        before = peak_memory()
        with pytest.raises(CheckpointError, match=said) as error:
            load_model(tmp_path)
        assert "\n" not in str(error.value), claim
        assert peak_memory() - before < 100e6, claim


def test_statistics_that_do_not_fit_the_features_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(model_of(signature=SOUND), path)
    tensors, _ = module.read_tensors(path, "a model")
    for changed, said in (
        ({"statistics.mean": torch.ones(39)}, r"\[39\] and statistics.deviation \[40\]"),
        ({"statistics.mean": torch.ones(1, 40)}, r"statistics.mean has the shape \[1, 40\]"),
        (
            {"statistics.mean": torch.ones(39), "statistics.deviation": torch.ones(39)},
            "its header has features of 40 numbers, but statistics.mean has 39",
        ),
    ):
        rewritten(path, tensors | changed)
        with pytest.raises(CheckpointError, match=said):
            load_model(tmp_path)
    rewritten(path, tensors, features={"window": 1e9})
    with pytest.raises(CheckpointError, match="window must be at most 10"):
        load_model(tmp_path)


def test_scales_of_another_shape_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(model_of(), path, torch.int8)
    tensors, _ = module.read_tensors(path, "a model")
    scales = "scales.network.prediction_network.output.weight"
    tensors[scales] = torch.ones(1, 3, 1)
    rewritten(path, tensors)
    with pytest.raises(
        CheckpointError, match=rf"{scales} has the shape \[1, 3, 1\] where .* \[3, 1\]"
    ):
        load_model(tmp_path)
    tensors.pop(scales)
    rewritten(path, tensors)
    with pytest.raises(CheckpointError, match=f"there is no tensor {scales}"):
        load_model(tmp_path)
