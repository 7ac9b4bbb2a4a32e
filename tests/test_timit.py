"""TIMIT: a made-up corpus of full size in each layout, and the corpus sample if present."""

from io import StringIO

import numpy as np
import pytest
import soundfile
from rich.console import Console

from transduce.audio.sound import read_wave, sphere_header
from transduce.data.pairs import Audio, DataError
from transduce.data.timit import CORE_TEST_SPEAKERS, PHONES, fold, read_timit
from transduce.tables import timit_table


def sphere(samples, *, rate=16_000, byte_format="01", coding=None):
    """Return the bytes of a NIST SPHERE file."""
    fields = ["NIST_1A", "   1024", "database_id -s5 TIMIT", "channel_count -i 1"]
    fields += [f"sample_count -i {len(samples)}", f"sample_rate -i {rate}", "sample_n_bytes -i 2"]
    fields += [f"sample_byte_format -s2 {byte_format}", "sample_sig_bits -i 16"]
    fields += [f"sample_coding -s{len(coding)} {coding}"] if coding else []
    header = "\n".join([*fields, "end_head", ""]).encode().ljust(1024)
    return header + samples.astype("<i2" if byte_format == "01" else ">i2").tobytes()


WAVE = sphere(np.arange(-500, 500))
PHN = "0 100 h#\n100 200 q\n200 300 sh\n300 400 ux\n400 500 dcl\n500 1000 h#\n"


def make_timit(root, *, upper=True, training_speakers=462, riff=False):
    """Make the folders of the LDC's layout, with the same recording for every sentence."""

    def put(*parts, content):
        path = root.joinpath(*(part.upper() if upper else part for part in parts))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    speakers = [("train", f"f{a}{b}{c}0") for a in "abc" for b in "abcdefghijklm" for c in
                "abcdefghijkl"][:training_speakers]  # fmt: skip
    speakers += [("test", name) for name in sorted(CORE_TEST_SPEAKERS)] + [("test", "mzzz0")]
    sentences = ["sa1", "sa2", "si1", "si2", "si3", *(f"sx{n}" for n in range(5))]
    for i, (part, speaker) in enumerate(speakers):
        for sentence in sentences:
            place = (part, f"dr{i % 8 + 1}", speaker)
            put(*place, f"{sentence}.phn", content=PHN.encode())
            path = put(*place, f"{sentence}.wav", content=WAVE)
            if riff:
                path.with_name(path.name + ".wav").touch()
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_timit(tmp_path_factory.mktemp("timit"))


def test_the_whole_corpus_has_the_papers_counts(whole):
    corpus = read_timit(whole, seed=7)
    assert corpus.counts == {"training": 3512, "validation": 184, "test": 192}
    assert corpus.complete
    printed = StringIO()
    Console(width=80, file=printed).print(timit_table(corpus))
    assert "validation set: seed 7" in printed.getvalue()
    assert "part" not in printed.getvalue()
    names = [pair.name for split in (corpus.training, corpus.validation) for pair in split]
    assert len(set(names)) == 3696
    assert not any("-sa" in name for name in names)
    assert {pair.name.split("-")[1] for pair in corpus.test} == CORE_TEST_SPEAKERS
    assert corpus.test[0].target == ("sil", "sh", "uw", "sil", "sil")


def test_the_seed_chooses_the_validation_set(whole):
    first, again, other = (read_timit(whole, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.validation != other.validation
    assert first.test == other.test


def test_kaggles_copies_are_read_rather_than_the_originals(tmp_path):
    make_timit(tmp_path / "data", training_speakers=3, riff=True)
    corpus = read_timit(tmp_path, partial=True)
    assert corpus.counts["training"] + corpus.counts["validation"] == 24
    assert len(corpus.test) == 192
    assert all(pair.source.path.name.endswith(".WAV.wav") for pair in corpus.test)


def test_lower_case_is_read_too_and_a_part_is_not_called_timit(tmp_path):
    make_timit(tmp_path, upper=False, training_speakers=2)
    with pytest.raises(DataError, match=r"not the whole of TIMIT: it has 15 training, 1 val"):
        read_timit(tmp_path)
    corpus = read_timit(tmp_path, partial=True)
    assert not corpus.complete
    assert "a part of TIMIT" in str(timit_table(corpus).title)
    assert corpus.test[0].source.path.name == "si1.wav"


def test_a_corpus_in_a_folder_called_test_still_has_a_training_set(tmp_path):
    make_timit(tmp_path / "test", upper=False, training_speakers=2)
    corpus = read_timit(str(tmp_path / "test"), partial=True)
    assert corpus.counts == {"training": 15, "validation": 1, "test": 192}


def test_one_lost_file_makes_it_a_part(whole):
    lost = next(whole.glob("TEST/*/MDAB0/SI1.WAV"))
    hidden = lost.rename(lost.with_name("hidden"))
    try:
        with pytest.raises(DataError, match=r"SI1\.PHN: there is no \.wav file beside it; restore"):
            read_timit(whole)
        skipped = []
        with pytest.raises(DataError, match="191 test sentences where TIMIT has"):
            read_timit(whole, skipped=skipped)
        assert len(skipped) == 1
    finally:
        hidden.rename(lost)


def test_bad_phones_name_the_line(tmp_path):
    make_timit(tmp_path, training_speakers=1)
    path = next(tmp_path.glob("TRAIN/*/*/SI1.PHN"))
    path.write_text("0 100 h#\n100 200 xx\n")
    with pytest.raises(DataError, match=r"SI1\.PHN, line 2: '100 200 xx' is not .*; restore"):
        read_timit(tmp_path, partial=True)
    path.write_text("0 100 q\n")
    with pytest.raises(DataError, match="the file has no phones; restore"):
        read_timit(tmp_path, partial=True)


def test_two_copies_strange_folders_and_none_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        read_timit(tmp_path / "none")
    with pytest.raises(DataError, match=r"the folder has no \.phn files; give"):
        read_timit(tmp_path)
    for copy in ("a", "b"):
        make_timit(tmp_path / copy, training_speakers=0)
    with pytest.raises(DataError, match="the sentence is also in"):
        read_timit(tmp_path, partial=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "si1.phn").write_text(PHN)
    with pytest.raises(DataError, match="its folder is not a dialect and a speaker, as DR1/FCJF0"):
        read_timit(tmp_path / "c", partial=True)


def test_61_phones_become_48_become_39():
    assert len(set(PHONES)) == 61
    assert len(set(fold(PHONES, 48))) == 48
    assert len(set(fold(PHONES, 39))) == 39
    assert fold(["q", "zh", "ao", "epi", "bcl", "axr"], 39) == ("sh", "aa", "sil", "sil", "er")
    assert fold(["q", "zh", "ao", "epi", "bcl", "axr"], 48) == ("zh", "ao", "epi", "vcl", "er")
    assert fold(["q", "zh"], 61) == ("q", "zh")
    with pytest.raises(ValueError, match="61, 48 or 39"):
        fold([], 40)
    assert fold(PHONES) == fold(PHONES, 39), "the paper's set is the default"


@pytest.mark.parametrize("byte_format", ["01", "10"])
def test_sphere_audio_is_read_whatever_its_byte_order(tmp_path, byte_format):
    samples = np.arange(-500, 500)
    (tmp_path / "a.wav").write_bytes(sphere(samples, byte_format=byte_format))
    assert sphere_header(Audio(tmp_path / "a.wav"))["sample_count"] == "1000"
    wave = read_wave(Audio(tmp_path / "a.wav"), 16_000)
    assert np.array_equal(wave.numpy() * 32768, samples)


def test_riff_is_no_sphere(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(10), 16_000)
    assert sphere_header(Audio(tmp_path / "a.wav")) is None


def test_shortened_and_truncated_sphere_files_are_refused(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(sphere(np.arange(1000), coding="pcm,embedded-shorten-v2.00"))
    with pytest.raises(DataError, match=r"a\.wav is compressed by shorten; decompress it with"):
        read_wave(Audio(path), 16_000)
    path.write_bytes(sphere(np.zeros(16_000))[:9000])
    with pytest.raises(DataError, match=r"ends after 0\.25 of its 1\.00 seconds; copy it again"):
        read_wave(Audio(path), 16_000)


def test_the_corpus_sample_is_a_part_of_timit(corpora):
    folder = corpora / "timit-sample"
    with pytest.raises(DataError, match="not the whole of TIMIT"):
        read_timit(folder)
    corpus = read_timit(folder, partial=True)
    assert sum(corpus.counts.values()) == 16 * 8
    speakers = [{pair.name.split("-")[1] for pair in s} for s in (corpus.training, corpus.test)]
    assert len(speakers[1]) == 4
    assert not speakers[0] & speakers[1]
    phones = {phone for pair in corpus.training + corpus.test for phone in pair.target}
    assert len(phones) == 39
    wave = read_wave(corpus.test[0].source, 16_000)
    assert 0.01 < wave.abs().max() < 1
