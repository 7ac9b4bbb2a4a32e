"""Exported models: onnxruntime and sherpa-onnx compute what we compute; bad input."""

import json
import random
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import transduce
from explored import CHARACTERS, SPACES, sharp_network
from explored import text_model as explored_text_model
from melodies import RATE, melody, trained_model
from slow import slow_except
from torch.testing import assert_close

from transduce import cli
from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import Features, Statistics
from transduce.decoding.search import greedy_search
from transduce.export import export_onnx, unlike_sherpa
from transduce.model.checkpoint import TrainedModel, load_model, save_model
from transduce.model.model import load
from transduce.model.signature import Signature

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
sys.path.append(str(Path(__file__).parent.parent / "examples"))
from onnxruntime_greedy import MOST_LABELS, Exported  # noqa: E402

D, K = 5, 6


def sound_model(network="transducer", input_size=D, **options):
    """Return a model of frames with large random weights and strange statistics."""
    config = NetworkConfig(network, hidden_size=7, prediction_size=4, **options)
    torch.manual_seed(2)
    if network == "transducer":
        built = sharp_network(config, input_size, K)
    else:
        built = build_network(config, input_size, K).eval()
    statistics = Statistics(torch.randn(input_size) * 3, torch.rand(input_size) + 0.5)
    targets = Alphabet(string.ascii_uppercase[:K])
    return TrainedModel(built, config, Signature(targets, SPACES, statistics=statistics))


def text_model(**options):
    config = NetworkConfig(hidden_size=7, prediction_size=4, **options)
    signature = Signature(
        Alphabet(string.ascii_uppercase[:K]), SPACES, Alphabet(string.ascii_lowercase), CHARACTERS
    )
    return TrainedModel(sharp_network(config, 26, K), config, signature)


def null_last(vectors):
    """Return vectors [..., K+1] in the order of the exported graphs."""
    return vectors.roll(-1, -1)


def run(path, outputs=None, **inputs):
    return onnxruntime.InferenceSession(path).run(outputs, inputs)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_layers=3, pooling=2),
        dict(num_layers=1, pooling=4),
        dict(num_layers=2, pooling=3, bidirectional=False),
        dict(num_layers=3, pooling=2, bidirectional=False, lookahead=3),
        dict(num_layers=2, embedding_size=3),
        dict(bidirectional=False, lookahead=1, embedding_size=3),
    ],
    ids=str,
)
def test_the_transcription_graph_gives_f_of_each_utterance_of_a_ragged_batch(tmp_path, options):
    model = sound_model(**options)
    export_onnx(model, tmp_path / "out")
    frames, lengths = torch.randn(4, 23, D), torch.tensor([23, 1, 8, 20])
    network = model.network.transcription_network.double()
    normalised = model.signature.statistics.normalise(frames).double()
    with torch.no_grad():
        expected, num_vectors = network(normalised, lengths)
    for b, length in enumerate(lengths):
        frames[b, length:] = 1e6  # padding is never read
    found, found_lengths = run(
        tmp_path / "out" / "encoder.onnx",
        audio_signal=frames.transpose(1, 2).numpy(),
        length=lengths.numpy(),
    )
    assert found_lengths.tolist() == num_vectors.tolist()
    for b, length in enumerate(num_vectors.tolist()):
        wanted = null_last(expected[b, :length])
        assert_close(torch.from_numpy(found[b, :, :length].T).double(), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("options", [dict(), dict(embedding_size=3, num_layers=2)], ids=str)
def test_text_is_read_as_ids_and_a_strange_letter_as_the_vector_of_zeros(tmp_path, options):
    model = text_model(**options)
    export_onnx(model, tmp_path / "out")
    exported = Exported(tmp_path / "out")
    assert exported.ids("cAbz").tolist() == [2, 0, 1, 25]
    ids = np.array([2, 0, 1, 26, 25])  # 26 stands for any other letter
    with torch.no_grad():
        f, _ = model.network.transcription_network(torch.tensor([[3, 1, 2, 0, 26]]))
    assert_close(torch.from_numpy(exported.transcription(ids)), null_last(f[0]), atol=2e-5, rtol=0)


def test_the_example_refuses_a_strange_letter_in_a_sentence(tmp_path):
    export_onnx(text_model(), tmp_path / "out")
    example = Path(__file__).parent.parent / "examples" / "onnxruntime_greedy.py"
    command = (sys.executable, example, tmp_path / "out", "cab", "r2d")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "r2d: '2' is no symbol that the model knows; leave it out\n"


@pytest.mark.parametrize("options", [dict(), dict(prediction_layers=3, embedding_size=3)], ids=str)
def test_the_prediction_and_joint_graphs_give_the_logits_of_every_node(tmp_path, options):
    model = sound_model(**options)
    export_onnx(model, tmp_path / "out")
    exported = Exported(tmp_path / "out")
    labels = [4, 0, 0, 5, 2]
    with torch.no_grad():
        g = model.network.prediction_network(torch.tensor([labels]) + 1)
    rows, state = [], None
    for label in [K, *labels]:
        row, state = exported.prediction(label, state)
        rows.append(row)
    assert_close(torch.from_numpy(np.stack(rows)), null_last(g[0]), atol=2e-5, rtol=0)
    at_once, _ = run(
        tmp_path / "out" / "decoder.onnx",
        ["outputs", "prednet_lengths"],
        targets=np.array([[K, *labels]], np.int32),
        target_length=np.array([6], np.int32),
        **{name: np.zeros_like(part) for name, part in zip("hc", state, strict=True)},
    )
    assert_close(at_once[0].T, np.stack(rows), atol=1e-6, rtol=0)
    f = torch.randn(1, K + 1, 9).numpy()
    [logits] = run(tmp_path / "out" / "joiner.onnx", encoder_outputs=f, decoder_outputs=at_once)
    assert_close(logits[0], f[0].T[:, None] + at_once[0].T[None])


@pytest.mark.parametrize(
    "options", [dict(), dict(num_layers=3, pooling=3, lookahead=4), dict(embedding_size=3)], ids=str
)
def test_the_streaming_graph_gives_chunk_by_chunk_what_the_whole_graph_gives(tmp_path, options):
    model = sound_model(bidirectional=False, **options)
    export_onnx(model, tmp_path / "out")
    frames = torch.randn(100, D).numpy()
    whole = Exported(tmp_path / "out").transcription(frames)
    chunks = Exported(tmp_path / "out", "encoder-streaming.onnx").streamed_transcription(frames)
    assert len(chunks) >= len(whole) - 7 > 20
    assert_close(chunks, whole[: len(chunks)], atol=2e-5, rtol=0)


def test_ctc_is_exported_as_one_graph_of_log_probabilities(tmp_path):
    model = sound_model("ctc", pooling=2, num_layers=2)
    assert export_onnx(model, tmp_path / "out") == ["model.json", "model.onnx", "tokens.txt"]
    frames = torch.randn(1, 15, D)
    with torch.no_grad():
        f, _ = model.network(model.signature.statistics.normalise(frames))
    [found] = run(
        tmp_path / "out" / "model.onnx",
        ["logprobs"],
        audio_signal=frames.transpose(1, 2).numpy(),
        length=np.array([15]),
    )
    assert_close(torch.from_numpy(found), null_last(f.log_softmax(-1)), atol=2e-5, rtol=0)


def test_int8_graphs_are_small_and_compute_what_our_int8_files_compute(tmp_path):
    model = sound_model(num_layers=2, pooling=2)
    model.network.half().float()  # our files have biases and peepholes in float16
    save_model(model, tmp_path / "int8.safetensors", torch.int8)
    rounded = load_model(tmp_path / "int8.safetensors")
    for of, options in ((model, dict(int8=True)), (rounded, {})):
        export_onnx(of, tmp_path / f"int8-{of is model}", **options)
    frames = torch.randn(30, D).numpy()
    ours, theirs = (
        Exported(tmp_path / f"int8-{which}").transcription(frames) for which in (False, True)
    )
    assert_close(theirs, ours, atol=1e-5, rtol=0)
    export_onnx(model, tmp_path / "whole")
    exact = Exported(tmp_path / "whole").transcription(frames)
    assert np.abs(theirs - exact).max() > 1e-3
    paths = [tmp_path / name / "encoder.onnx" for name in ("int8-True", "whole")]
    assert paths[0].stat().st_size < 0.75 * paths[1].stat().st_size


# --- The models that ship -----------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("count", slow_except({0}, [20, 100]))
def test_words_are_pronounced_as_we_pronounce_them(tmp_path, count, int8):
    model = load("english-pronouncer")
    export_onnx(model, tmp_path / "out", int8=int8)
    exported = Exported(tmp_path / "out")
    letters = random.Random(3)
    words = [
        "".join(letters.choices("etaoinshrdlcumwfgypbvkjxqz", range(26, 0, -1), k=2 + i % 11))
        for i in range(count)
    ]
    ours = model(words, max_labels_per_frame=MOST_LABELS)
    for word, transcript in zip(words, ours, strict=True):
        ids = exported.ids(word)
        f = exported.transcription(ids)
        assert tuple(exported.symbols(exported.greedy(f))) == transcript.symbols, word
        with torch.no_grad():
            exact, _ = model.network.transcription_network(torch.from_numpy(ids + 1)[None])
        assert_close(torch.from_numpy(f), null_last(exact[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("count", slow_except({0}, [5, 15]))
def test_sounds_are_recognised_as_we_recognise_them(tmp_path, count, int8):
    model = load("english-phone-recogniser")
    export_onnx(model, tmp_path / "out", int8=int8)
    exported, extract = Exported(tmp_path / "out"), Features(model.signature.features)
    waves = [melody(seed, 3)[0] for seed in range(count)]
    ours = model(waves, max_labels_per_frame=MOST_LABELS)
    assert sum(len(transcript.symbols) for transcript in ours) > count
    for wave, transcript in zip(waves, ours, strict=True):
        frames = extract(wave[None])[0]
        f = exported.transcription(frames[0].numpy())
        assert tuple(exported.symbols(exported.greedy(f))) == transcript.symbols
        with torch.no_grad():
            normalised = model.signature.statistics.normalise(frames)
            exact, _ = model.network.transcription_network(normalised)
        assert_close(torch.from_numpy(f), null_last(exact[0]), atol=1e-4, rtol=0)


# --- sherpa-onnx --------------------------------------------------------------------------------


def sherpa_recogniser(folder, streaming):
    sherpa_onnx = pytest.importorskip("sherpa_onnx")
    names = ("decoder.onnx", "joiner.onnx", "tokens.txt")
    decoder, joiner, tokens = (str(folder / name) for name in names)
    if streaming:
        encoder = str(folder / "encoder-streaming.onnx")
        return sherpa_onnx.OnlineRecognizer.from_transducer(tokens, encoder, decoder, joiner)
    encoder = str(folder / "encoder.onnx")
    return sherpa_onnx.OfflineRecognizer.from_transducer(
        encoder, decoder, joiner, tokens, model_type="nemo_transducer"
    )


@pytest.mark.slow
def test_sherpa_onnx_recognises_30_sounds_as_we_do(tmp_path):
    model = trained_model(num_layers=2, pooling=2)
    assert unlike_sherpa(model) is None
    export_onnx(model, tmp_path / "out")
    recogniser = sherpa_recogniser(tmp_path / "out", streaming=False)
    waves = [melody(seed)[0] for seed in range(200, 230)]
    ours = model(waves)
    assert sum(len(transcript.symbols) for transcript in ours) > 50
    for wave, transcript in zip(waves, ours, strict=True):
        stream = recogniser.create_stream()
        stream.accept_waveform(RATE, wave.numpy())
        recogniser.decode_stream(stream)
        assert tuple(stream.result.tokens) == transcript.symbols


@pytest.mark.slow
def test_sherpa_onnx_streams_30_sounds_as_we_recognise_them(tmp_path):
    model = trained_model(
        "sherpa_streaming",
        **dict(num_layers=2, pooling=2, bidirectional=False, lookahead=2, prediction_layers=2),
    )
    assert unlike_sherpa(model) is None
    export_onnx(model, tmp_path / "out")
    recogniser = sherpa_recogniser(tmp_path / "out", streaming=True)
    window, shift, num_tokens = 18, 16, 0
    for seed in range(200, 230):
        wave = torch.cat([melody(seed)[0], torch.zeros(RATE // 4)])
        stream = recogniser.create_stream()
        for chunk in wave.split(1000):
            stream.accept_waveform(RATE, chunk.numpy())
            while recogniser.is_ready(stream):
                recogniser.decode_stream(stream)
        stream.input_finished()
        while recogniser.is_ready(stream):
            recogniser.decode_stream(stream)
        tokens = recogniser.get_result_all(stream).tokens
        # sherpa-onnx decodes a chunk only when more frames than its window are there.
        frames = Features(model.signature.features)(wave[None])[0]
        num_chunks = -(-(frames.shape[1] - window) // shift)
        assert frames.shape[1] - num_chunks * shift < 0.25 * 100 + 1  # only silence is left
        read = model.signature.statistics.normalise(frames[:, : num_chunks * shift])
        [found] = greedy_search(model.network, read, torch.tensor([read.shape[1]]))
        assert tokens == model.signature.targets.decode(found.labels)
        num_tokens += len(tokens)
    assert num_tokens > 50


def test_sherpa_onnx_takes_the_best_path_of_ctc_as_we_do(tmp_path):
    sherpa_onnx = pytest.importorskip("sherpa_onnx")
    model = trained_model("sherpa_streaming", steps=0)
    config = NetworkConfig("ctc", hidden_size=24, num_layers=2, pooling=2)
    torch.manual_seed(0)
    network = build_network(config, model.signature.input_size, 5).eval()
    with torch.no_grad():
        for weights in network.parameters():
            weights *= 6
    model = replace(model, network=network, config=config)
    assert unlike_sherpa(model) is None
    export_onnx(model, tmp_path / "out")
    files = [str(tmp_path / "out" / name) for name in ("model.onnx", "tokens.txt")]
    recogniser = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(*files, feature_dim=24)
    waves = [melody(seed)[0] for seed in range(200, 230)]
    # sherpa-onnx rounds the number of pooled vectors down, so give it an even number of frames.
    waves = [wave[: len(wave) // 320 * 320 - 80] for wave in waves]
    ours = model(waves)
    assert sum(len(transcript.symbols) for transcript in ours) > 50
    for wave, transcript in zip(waves, ours, strict=True):
        stream = recogniser.create_stream()
        stream.accept_waveform(RATE, wave.numpy())
        recogniser.decode_stream(stream)
        assert tuple(stream.result.tokens) == transcript.symbols


def test_what_sherpa_onnx_computes_otherwise_is_named():
    model = trained_model(steps=0)
    assert unlike_sherpa(model) is None
    assert unlike_sherpa(explored_text_model()) is None
    assert "computed elsewhere" in unlike_sherpa(sound_model())

    def changed(bidirectional=True, **settings):
        features = replace(model.signature.features, **settings)
        config = NetworkConfig(bidirectional=bidirectional)
        signature = replace(model.signature, features=features)
        return unlike_sherpa(replace(model, config=config, signature=signature))

    assert "log_mel features, not on sherpa-onnx's" in changed(kind="log_mel")
    assert "--data.features.kind sherpa_streaming" in changed(False, kind="log_mel")
    assert changed(pre_emphasis=0.9) == "sherpa-onnx has no setting pre_emphasis 0.9"
    assert changed(num_deltas=1) == "sherpa-onnx has no setting num_deltas 1"
    assert "offline recogniser" in changed(kind="sherpa_streaming")
    assert "streaming recogniser" in changed(False)
    assert changed(False, kind="sherpa_streaming") is None


# --- Files and bad input ------------------------------------------------------------------------


def test_the_command_writes_the_folder_and_says_what_sherpa_onnx_lacks(tmp_path):
    save_model(sound_model(), tmp_path / "model.safetensors")
    done = transduce("export", "model.safetensors", "--output", "new/out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    wrote, note = done.stdout.splitlines()
    assert wrote == (
        "wrote decoder.onnx, encoder.onnx, joiner.onnx, model.json, tokens.txt into new/out"
    )
    assert note.startswith("For sherpa-onnx, note that the model reads frames")
    assert (tmp_path / "new/out/tokens.txt").read_text() == (
        "A 0\nB 1\nC 2\nD 3\nE 4\nF 5\n<blk> 6\n"
    )
    description = json.loads((tmp_path / "new/out/model.json").read_text())
    assert description["targets"] == list("ABCDEF")
    metadata = onnxruntime.InferenceSession(tmp_path / "new/out/encoder.onnx").get_modelmeta()
    assert metadata.custom_metadata_map == {
        "vocab_size": "6",
        "subsampling_factor": "1",
        "normalize_type": "NA",
        "feat_dim": "5",
        "model_type": "EncDecRNNTBPEModel",
        "pred_rnn_layers": "1",
        "pred_hidden": "4",
    }
    export_onnx(load_model(tmp_path / "model.safetensors"), tmp_path / "whole")  # not in int8
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "new/out" / path.name).read_bytes()
    again = transduce("export", "model.safetensors", "--output", "new/out", folder=tmp_path)
    assert again.returncode == 1
    assert again.stderr == (
        "transduce: new/out exists already; give a new folder, or remove this one\n"
    )


def test_models_without_an_export_are_refused_in_one_sentence(tmp_path):
    folder = tmp_path / "out"
    save_model(explored_text_model(), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="ensemble has no ONNX export; export one of its members"):
        export_onnx(load(tmp_path / "a.safetensors", tmp_path / "a.safetensors"), folder)
    with pytest.raises(ValueError, match="reads backwards"):
        export_onnx(explored_text_model(backwards=True), folder)
    with pytest.raises(ValueError, match="a prediction network alone has no ONNX export"):
        export_onnx(sound_model("prediction"), folder)
    strange = sound_model()
    for symbol in ("<blk>", "A B", "\n"):
        targets = Alphabet([symbol, *string.ascii_uppercase[1:K]])
        with pytest.raises(ValueError, match=r"cannot stand in tokens\.txt"):
            export_onnx(
                replace(strange, signature=replace(strange.signature, targets=targets)), folder
            )
    assert not folder.exists()


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("transduce.export.folder.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r'needs onnx; install it with pip install "transduce\[onnx\]"'
    ):
        export_onnx(sound_model(), tmp_path / "out")


@pytest.mark.slow
def test_the_export_imports_onnx_only_when_it_writes():
    code = "import sys, transduce.export, transduce.cli; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_an_interrupted_export_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("transduce.files.os.rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(sound_model(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_int8_only_if_asked(tmp_path, monkeypatch):
    asked, module = [], sys.modules["transduce.cli.export"]
    monkeypatch.setattr(module, "load_runs", lambda *_: None)
    monkeypatch.setattr(module, "unlike_sherpa", lambda _: None)
    monkeypatch.setattr(module, "export_onnx", lambda *_, int8: asked.append(int8) or ["a.onnx"])
    cli.export(Path("run"), output=tmp_path)
    cli.export(Path("run"), output=tmp_path, int8=True)
    assert asked == [False, True]
