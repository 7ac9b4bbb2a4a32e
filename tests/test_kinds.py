"""Sounds with targets in every format: recognised, read, trained on, evaluated, transcribed."""

import json
import re
import shlex
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import ROOT, transduce
from datasets import NAMES, TEXTS, WRITERS, encoded, samples, write_manifest, write_shards
from safetensors.torch import load_file
from slow import slow_except

from transduce.audio.cache import FrameReader
from transduce.audio.windows import sound_seconds
from transduce.data.kinds import Kind, read_pairs, read_spoken, recognise, target_fields
from transduce.data.pairs import DataError, Notation

pytest.importorskip("pyarrow")
# The networks are hardly trained, so that they emit labels endlessly.
pytestmark = pytest.mark.filterwarnings("ignore:max_labels_per_frame")
CHARACTERS = Notation("characters", None)
KINDS = {
    "manifest": Kind.MANIFEST,
    "kaldi": Kind.KALDI,
    "segments": Kind.KALDI,
    "lhotse": Kind.LHOTSE,
    "common-voice": Kind.COMMON_VOICE,
    "parquet": Kind.PARQUET,
    "shards": Kind.SHARDS,
}
every_kind = pytest.mark.parametrize("name", KINDS)
RECIPE = """
[data]
target_notation.split = "characters"

[network]
hidden_size = 8
prediction_size = 8
pooling = 4

[train]
optimiser = "adamw"
max_sequences = 2
max_epochs = 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The path of the data in each format."""
    folder = tmp_path_factory.mktemp("data")
    return {
        name: write(folder / name) for name, write in WRITERS.items() if not mkdir(folder, name)
    }


def mkdir(folder, name):
    (folder / name).mkdir()


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run that was trained on the manifest."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, data["manifest"], "--run", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def expected(data, run, tmp_path_factory):
    """What commands print of the manifest."""
    folder = tmp_path_factory.mktemp("expected")
    return {
        command: transduce(command, run, data["manifest"], folder=folder).stdout
        for command in ("evaluate", "transcribe")
    }


def train(folder, path, *options):
    (folder / "small.toml").write_text(RECIPE)
    paths = ("--data.training", path, "--data.validation", path, "--data.test", path)
    done = transduce("train", "small.toml", *paths, *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return done


@every_kind
def test_every_format_has_the_same_pairs(data, name):
    path = data[name]
    assert recognise(path) is KINDS[name]
    pairs = list(read_pairs(path, CHARACTERS))
    assert ["".join(pair.target) for pair in pairs] == TEXTS
    assert [pair.name for pair in pairs] == NAMES
    assert [sound_seconds(pair.source) for pair in pairs] == [
        pytest.approx(len(samples(place)) / 16_000) for place in range(4)
    ]
    expected = [FrameReader()(pair) for pair in read_pairs(data["manifest"], CHARACTERS)]
    for pair, frames in zip(pairs, expected, strict=True):
        torch.testing.assert_close(FrameReader()(pair), frames, rtol=0, atol=0)
    assert [pair.target for pair in read_pairs(path, None)] == [()] * 4
    assert target_fields(path)[0] in ("text", "sentence_id")


@every_kind
def test_the_same_sounds_share_a_cache_whatever_the_format(data, name, tmp_path):
    for path in (data["manifest"], data[name]):
        for pair in read_pairs(path, None):
            FrameReader(cache=tmp_path)(replace(pair, source=replace(pair.source, duration=None)))
    parts = 4 if name == "segments" else 0  # whose sounds are other bytes
    assert len(list(tmp_path.iterdir())) == 4 + parts


@pytest.mark.parametrize("name", slow_except({0, 6}, KINDS))
def test_a_network_is_trained_evaluated_and_asked_for_transcripts(
    data, name, run, expected, tmp_path
):
    path = data[name]
    done = train(tmp_path, path)
    said = f"transduce: reading {path} as {KINDS[name].value}\n"
    assert done.stderr.count(said) == (0 if name == "manifest" else 1)
    weights = [load_file(one / "model.safetensors") for one in (run, tmp_path / "runs" / "small")]
    assert all(torch.equal(weights[1][key], weights[0][key]) for key in weights[0])
    for command in ("evaluate", "transcribe"):
        done = transduce(command, run, path, folder=tmp_path)
        assert done.returncode == 0 and (name == "manifest" or said in done.stderr), done.stderr
        assert done.stdout == expected[command]
    done = transduce("recognize", path, "--model", run, "--output", "out", folder=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        f"{one}.txt" for one in NAMES
    ]


def test_the_lines_of_the_documentation_run(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text()
    lines = re.findall(r"^transduce (train .*)$", page, re.M)
    assert len(lines) == 6
    for name, place in (
        *(("manifest", "."), ("kaldi", "kaldi"), ("lhotse", "."), ("common-voice", "cv-corpus/en")),
        *(("parquet", "."), ("shards", ".")),
    ):
        WRITERS[name](tmp_path / place)
    (tmp_path / "all.jsonl").rename(tmp_path / "train.jsonl")
    (tmp_path / "kaldi" / "kaldi").rename(tmp_path / "kaldi" / "train")
    small = ["network.hidden_size=4", "network.num_layers=1", "train.max_epochs=1"]
    small += ["train.validate_every=1", "data.num_validation=1"]
    for number, line in enumerate(lines):
        options = [f"--{setting}" for setting in small] + ["--run", f"runs/{number}"]
        done = transduce(*shlex.split(line), *options, folder=tmp_path)
        assert done.returncode == 0, (line, done.stderr)


@every_kind
def test_texts_are_found_for_alignment(data, name):
    spoken = list(read_spoken(data[name]))
    assert [(one.pair.name, one.text, one.phones) for one in spoken] == [
        (one, text, None) for one, text in zip(NAMES, TEXTS, strict=True)
    ]


def test_align_reads_every_format(data, tmp_path):
    for name in ("kaldi", "shards"):
        done = transduce("align", data[name], "--format", "json", folder=tmp_path)
        assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == NAMES
        assert f"reading {data[name]} as" in done.stderr


@every_kind
def test_a_missing_target_names_what_there_is(data, name, tmp_path):
    fields = {"common-voice": "sentence_id, sentence, up_votes", "lhotse": "text, phones"}
    kind = {"kaldi": "file", "segments": "file", "common-voice": "column", "parquet": "column"}
    found = re.escape(fields.get(name, "text"))
    sentence = (
        f"there is no {kind.get(name, 'field')} 'words' for the target; choose one of {found} "
        r"with --data\.target \(train\) or --target"
    )
    if name == "shards":
        sentence = r"member a.flac: there is no text beside it; add a\.txt or a\.json, or leave"
    with pytest.raises(DataError, match=sentence):
        list(read_pairs(data[name], CHARACTERS, "words"))


@pytest.mark.parametrize("name", ["parquet", "shards"])
def test_files_are_named_by_a_pattern_a_folder_or_one_by_one(data, name):
    folder = data[name]
    suffix = "parquet" if name == "parquet" else "tar"
    pattern = folder / f"*.{suffix}"
    assert recognise(pattern) is KINDS[name]
    assert list(read_pairs(pattern, CHARACTERS)) == list(read_pairs(folder, CHARACTERS))
    first = sorted(folder.iterdir())[0]
    assert [pair.name for pair in read_pairs(first, CHARACTERS)] == NAMES[: 3 - (name == "shards")]
    with pytest.raises(DataError, match=r"no file matches .*z\*\.tar; check the pattern"):
        recognise(folder / "z*.tar")
    with pytest.raises(DataError, match=r"matches .*\.\w+, which is not .*; narrow the pattern"):
        (folder.parent / "mixed").mkdir()
        for file in ("a.tar", "b.parquet"):
            (folder.parent / "mixed" / file).touch()
        list(read_pairs(folder.parent / "mixed" / "*", CHARACTERS))


def test_what_is_no_data_set_is_not_recognised(tmp_path):
    (tmp_path / "text.txt").write_text("a\nb\n")
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name in ("text.txt", "pairs.tsv", "empty", "folder", "missing"):
        assert recognise(tmp_path / name) is None
    assert recognise(tmp_path / "missing.jsonl") is Kind.MANIFEST
    with pytest.raises(DataError, match="compressed, so that its members cannot be read one by"):
        recognise(tmp_path / "a.tar.gz")


def test_a_damaged_gzip_file_says_so(data, tmp_path):
    (tmp_path / "cuts.jsonl.gz").write_bytes(data["lhotse"].read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cuts\.jsonl\.gz: gzip cannot read it .*; copy the file"):
        list(read_pairs(tmp_path / "cuts.jsonl.gz", CHARACTERS))


def test_sounds_of_another_rate_are_refused_or_converted(data, run, tmp_path):
    (tmp_path / "a.wav").write_bytes(encoded(0, "WAV", 44_100))
    (tmp_path / "all.jsonl").write_text('{"audio_filepath": "a.wav", "text": "ab"}\n')
    (tmp_path / "small.toml").write_text(RECIPE)
    paths = [f"--data.{name}=all.jsonl" for name in ("training", "validation", "test")]
    done = transduce("train", "small.toml", *paths, folder=tmp_path)
    assert done.returncode == 1
    assert "resample it with --data.convert true (train) or --convert" in done.stderr
    done = transduce("train", "small.toml", *paths, "--data.convert=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert transduce("evaluate", "runs/small", folder=tmp_path).returncode == 0
    assert "--convert" in transduce("evaluate", run, "all.jsonl", folder=tmp_path).stderr
    done = transduce("evaluate", run, "all.jsonl", "--convert", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_many_threads_read_the_same_files(data):
    pairs = [*read_pairs(data["parquet"], None), *read_pairs(data["shards"], None)] * 8
    expected = [frames for _, frames in FrameReader().read_all(pairs, num_threads=1)]
    found = [frames for _, frames in FrameReader().read_all(pairs, num_threads=8)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert threading.active_count() < 100


def test_equal_names_in_two_archives_stay_apart(tmp_path, run):
    first, second = (write_shards(tmp_path / name) for name in ("x", "y"))
    done = transduce("transcribe", run, first, second, "--output", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == sorted(
        f"{f}-shards-{s}-{n}.txt" for f in "xy" for s, n in zip("0011", NAMES, strict=True)
    )


def test_a_long_sound_inside_an_archive_is_cut_into_the_same_windows(tmp_path):
    import soundfile
    from datasets import write_tar

    from transduce.audio.windows import sound_windows
    from transduce.data.pairs import Audio

    draw = np.random.default_rng(0)
    soundfile.write(tmp_path / "a.wav", 0.1 * draw.standard_normal(130 * 8000), 8000)
    members = [("a.wav", (tmp_path / "a.wav").read_bytes()), ("a.txt", b"x")]
    write_tar(tmp_path / "a.tar", members)
    (pair,) = read_pairs(tmp_path / "a.tar", None)
    found = list(sound_windows(pair.source, 0.02))
    expected = list(sound_windows(Audio(tmp_path / "a.wav"), 0.02))
    assert len(found) == 2
    assert [(w.sound.start, w.sound.duration, w.share) for w in found] == [
        (w.sound.start, w.sound.duration, w.share) for w in expected
    ]
    assert all(window.sound.inside == pair.source.inside for window in found)


def test_a_gzip_manifest_is_read(tmp_path):
    import gzip

    path = write_manifest(tmp_path)
    with gzip.open(tmp_path / "all.jsonl.gz", "wb") as file:
        file.write(path.read_bytes())
    found = [pair.target for pair in read_pairs(tmp_path / "all.jsonl.gz", CHARACTERS)]
    assert found == [pair.target for pair in read_pairs(path, CHARACTERS)]
