"""Commands over whole corpora, in shards: what is written, and what a kill leaves."""

import json
import signal
import sys

import numpy as np
import pytest
import soundfile
from commands import in_a_new_process, train_small_runs, transduce
from explored import RATE, sound, sound_model

from transduce.cli.shard_files import Shard, ShardFile, chunks, parse_shards
from transduce.model.checkpoint import save_model

WORDS = ["ab", "ba", "", "a7b", "bb", "abab", "a", "baa", "abb", "ab-ba", "x", "bab"]
BAD = ["a7b", "x"]
MODEL = ("--model", "runs/transducer")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Train a model of letters, and write a file of words."""
    folder = tmp_path_factory.mktemp("texts")
    train_small_runs(folder, "transducer")
    (folder / "words.txt").write_text("\n".join(WORDS * 3) + "\n")
    return folder


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Write a model of sound, and a manifest of five sounds, a broken one and a bad line."""
    folder = tmp_path_factory.mktemp("sounds")
    save_model(sound_model(), folder / "model")
    lines = list[str]()
    (folder / "rec" / "inner").mkdir(parents=True)
    for number in range(5):
        path = folder / "rec" / ("inner" if number % 2 else ".") / f"{number}.wav"
        soundfile.write(path, sound(0.2 + 0.1 * (number % 3)), RATE)
        lines.append(json.dumps({"audio_filepath": str(path.relative_to(folder))}))
    (folder / "rec" / "broken.wav").write_bytes(b"RIFF no more")
    lines.insert(1, json.dumps({"audio_filepath": "rec/broken.wav"}))
    lines.insert(3, "no JSON")
    (folder / "list.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def small_chunks(monkeypatch):
    """Let chunks have two inputs, so that shards have several."""
    module = sys.modules["transduce.cli.transcribe"]
    monkeypatch.setattr(module, "LINES_AT_ONCE", 2)
    monkeypatch.setattr(module, "SOUNDS_AT_ONCE", 2)


def phonemized(folder, output, shard, *options):
    arguments = ("words.txt", *MODEL, "--output", output, "--shard", shard)
    return transduce("phonemize", *arguments, *options, folder=folder)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- Shards and chunks ----------------------------------------------------------------------------


def test_a_shard_is_named_by_its_number_and_their_count():
    assert parse_shards("3/16") == [Shard(3, 16)] and str(Shard(3, 16)) == "3-of-16"
    assert parse_shards("all/2") == [Shard(1, 2), Shard(2, 2)]
    for wrong in ("0/4", "5/4", "1/0", "all/0", "3", "x/4", "-1/4", "1/4/2"):
        with pytest.raises(ValueError, match=r"such as 3/16, or all/16"):
            parse_shards(wrong)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_each_input_is_in_one_shard_in_order(count, number):
    found = []
    for shard in parse_shards(f"all/{count}"):
        alone = [one for chunk in chunks(range(number), {shard: 0}, 2) for one in chunk.inputs]
        assert alone == sorted(alone)
        found += alone
    assert sorted(found) == list(range(number))
    together = chunks(range(number), dict.fromkeys(parse_shards(f"all/{count}"), 0), 2)
    assert sorted(one for chunk in together for one in chunk.inputs) == list(range(number))


def test_chunks_after_those_that_are_done_are_the_same():
    whole = list(chunks(range(20), {Shard(2, 3): 0}, 2))
    assert list(chunks(range(20), {Shard(2, 3): 4}, 2)) == whole[2:]


def test_no_more_inputs_are_read_than_a_chunk_has():
    read = []
    endless = (read.append(number) or number for number in iter(int, 1))
    first = next(chunks(endless, {Shard(1, 4): 0}, 5))
    assert len(first.inputs) == 5 and len(read) == 17


# --- Files ----------------------------------------------------------------------------------------


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    file = ShardFile(tmp_path, Shard(1, 2), 2, False, False)
    file.append(['{"input": "a"}', '{"input": "b"}'])
    assert [path.name for path in tmp_path.iterdir()] == ["1-of-2.jsonl.part"]
    file.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["1-of-2.jsonl"]
    assert (tmp_path / "1-of-2.jsonl").read_text() == '{"input": "a"}\n{"input": "b"}\n'


@pytest.mark.parametrize(
    "rest", ["", '{"inp', '{"input": "c"}\n', '{"input": "c"}\n{"input": "d"}']
)
def test_whole_chunks_of_a_part_are_kept(tmp_path, rest):
    (tmp_path / "1-of-2.jsonl.part").write_text('{"input": "a"}\n{"input": "b"}\n' + rest)
    file = ShardFile(tmp_path, Shard(1, 2), 2, False, True)
    assert file.num_lines == 2
    file.append(['{"input": "c"}'])
    file.finish()
    assert [one["input"] for one in lines_of(tmp_path / "1-of-2.jsonl")] == ["a", "b", "c"]


def test_two_processes_do_not_write_one_shard(tmp_path):
    file = ShardFile(tmp_path, Shard(1, 2), 2, False, False)
    with pytest.raises(ValueError, match=r"another process writes .*1-of-2.jsonl.part"):
        ShardFile(tmp_path, Shard(1, 2), 2, False, True)
    file.finish()


def test_a_shard_that_is_finished_while_it_is_opened_stays_whole(tmp_path, monkeypatch):
    part, path = tmp_path / "1-of-2.jsonl.part", tmp_path / "1-of-2.jsonl"
    part.write_text('{"input": "a"}\n')

    def finished_by_another(_):
        part.rename(path)

    module = sys.modules["transduce.cli.shard_files"]
    monkeypatch.setattr(module, "lock_descriptor", finished_by_another)
    with pytest.raises(ValueError, match="another process writes"):
        ShardFile(tmp_path, Shard(1, 2), 2, False, True)
    assert path.read_text() == '{"input": "a"}\n'


# --- Commands -------------------------------------------------------------------------------------


def test_every_word_is_a_line_and_bad_ones_have_errors(texts, tmp_path, small_chunks):
    assert phonemized(texts, tmp_path / "one", "1/1").returncode == 1
    found = lines_of(tmp_path / "one" / "1-of-1.jsonl")
    assert [one["input"] for one in found] == WORDS * 3
    assert {one["input"] for one in found if "error" in one} == {"", *BAD}
    printed = transduce("phonemize", *WORDS, *MODEL, folder=texts).stdout
    outputs = [one["hypotheses"][0]["output"] for one in found if "error" not in one]
    assert all(outputs) and outputs == 3 * [line for line in printed.splitlines() if line]
    done = phonemized(texts, tmp_path / "all", "all/5")
    assert done.returncode == 1 and "6 of 36 inputs failed; " in done.stderr
    shards = [lines_of(tmp_path / "all" / f"{number}-of-5.jsonl") for number in range(1, 6)]
    assert [shards[i % 5][i // 5]["input"] for i in range(36)] == WORDS * 3


def test_the_exit_code_is_0_without_failures(texts, tmp_path):
    (texts / "good.txt").write_text("ab\n\nba\n")
    options = (*MODEL, "--output", tmp_path, "--shard", "1/1")
    done = transduce("phonemize", "good.txt", *options, folder=texts)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"transduce: wrote 1 file into {tmp_path}\n"


def test_a_finished_shard_is_refused_left_alone_or_replaced(texts, tmp_path):
    first = phonemized(texts, tmp_path, "2/3")
    path = tmp_path / "2-of-3.jsonl"
    content, time = path.read_bytes(), path.stat().st_mtime_ns
    refused = phonemized(texts, tmp_path, "2/3")
    assert refused.returncode == 1 and "2-of-3.jsonl exists already; give --over" in refused.stderr
    again = phonemized(texts, tmp_path, "2/3", "--resume")
    said, failed = again.stderr.splitlines()
    assert said == f"transduce: wrote 0 files into {tmp_path}, and kept 1 that existed"
    assert (again.returncode, failed) == (first.returncode, first.stderr.splitlines()[1])
    assert path.stat().st_mtime_ns == time
    path.write_text("mine\n")
    assert phonemized(texts, tmp_path, "2/3", "--overwrite").stderr == first.stderr
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


KILLED = """
import os, signal, sys
from transduce.cli import main
module = sys.modules["transduce.cli.transcribe"]
module.LINES_AT_ONCE = 2
original, calls = module._Pronunciation.lines, []
def lines(*arguments):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
module._Pronunciation.lines = lines
main()
"""


def test_a_killed_shard_goes_on_and_ends_with_the_same_bytes(texts, tmp_path, small_chunks):
    phonemized(texts, tmp_path / "whole", "1/2")
    arguments = ("words.txt", *MODEL, "--output", tmp_path / "killed", "--shard", "1/2")
    killed = in_a_new_process("phonemize", *arguments, folder=texts, code=KILLED)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [part] = (tmp_path / "killed").iterdir()
    assert part.name == "1-of-2.jsonl.part" and len(part.read_text().splitlines()) == 6
    asked = []
    module = sys.modules["transduce.cli.transcribe"]
    original = module._Pronunciation.lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module._Pronunciation,
            "lines",
            lambda self, model, inputs, progress: (
                asked.extend(inputs) or original(self, model, inputs, progress)
            ),
        )
        assert phonemized(texts, tmp_path / "killed", "1/2", "--resume").returncode == 1
    assert asked == (WORDS * 3)[::2][6:]
    [path] = (tmp_path / "killed").iterdir()
    assert path.read_bytes() == (tmp_path / "whole" / "1-of-2.jsonl").read_bytes()


def test_sounds_of_a_manifest_and_its_errors_keep_their_places(sounds, tmp_path, small_chunks):
    options = ("--output", tmp_path, "--shard", "1/1", "--null-bias", -4, "--beam-width", 2)
    done = transduce("transcribe", "model", "list.jsonl", *options, folder=sounds)
    found = lines_of(tmp_path / "1-of-1.jsonl")
    assert [one["input"] for one in found] == ["0", "broken", "1", None, "2", "3", "4"]
    assert "rec/broken.wav is not audio" in found[1]["error"]
    assert "list.jsonl, line 4: the line is not JSON" in found[3]["error"]
    assert done.returncode == 1 and "2 of 7 inputs failed" in done.stderr
    (sounds / "good.jsonl").write_text(json.dumps({"audio_filepath": "rec/2.wav"}))
    options = ("--format", "json", "--null-bias", -4, "--beam-width", 2)
    alone = transduce("transcribe", "model", "good.jsonl", *options, folder=sounds)
    expected = json.loads(alone.stdout)["hypotheses"][0]
    best = found[4]["hypotheses"][0]
    assert (
        best["symbols"]
        and best["symbols"] == expected["symbols"]
        and len(best["timings"]) == len(best["symbols"])
    )
    assert best["log_prob"] == pytest.approx(expected["log_prob"], abs=1e-4)


def test_a_folder_of_sounds_is_recognised_in_shards(sounds, tmp_path):
    options = ("--model", "model", "--output", tmp_path, "--shard", "all/2", "--beam-width", 2)
    done = transduce("recognize", "rec", *options, folder=sounds)
    assert done.returncode == 1 and "1 of 6 inputs failed" in done.stderr
    first, second = (lines_of(tmp_path / f"{number}-of-2.jsonl") for number in (1, 2))
    assert [one["input"] for one in first] == ["0", "4", "inner/1"]
    assert [one["input"] for one in second] == ["2", "broken", "inner/3"]


def test_a_manifest_is_aligned_in_shards(tmp_path):
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(0).normal(0, 0.1, 8000), RATE)
    lines = [{"audio_filepath": "noise.wav", "phones": "AH B"}, {"audio_filepath": "noise.wav"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    options = ("--output", "out", "--shard", "all/2")
    done = transduce("align", "list.jsonl", *options, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    [first], [second] = (lines_of(tmp_path / f"out/{number}-of-2.jsonl") for number in (1, 2))
    printed = transduce("align", "list.jsonl", "--format", "json", folder=tmp_path).stdout
    assert first == json.loads(printed.splitlines()[0])
    assert second["input"] is None and "neither text nor phones" in second["error"]


REFUSED = {
    "no folder": (("--shard", "1/2"), "--shard goes with --output"),
    "no shard": (("--output", "out"), "--output goes with --shard"),
    "an engine alone": (("--engine", "ray"), "--engine goes with --shard"),
    "both": (
        ("--shard", "1/2", "--output", "out", "--resume", "--overwrite"),
        "exclude each other",
    ),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_go_together_are_one_sentence(texts, options, message):
    done = transduce("phonemize", "words.txt", *MODEL, *options, folder=texts)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and not (texts / "out").exists()


def test_what_shards_cannot_read_or_write_is_one_sentence(sounds, tmp_path):
    (sounds / "text.txt").write_text("words\n")
    options = ("--output", tmp_path / "out", "--shard", "1/2")
    for arguments, message in (
        (("list.jsonl", "--format", "textgrid"), "writes JSON lines; leave out --format"),
        (("list.jsonl", "--timestamps"), "leave out --timestamps"),
        (("nothing.jsonl",), "nothing.jsonl cannot be read"),
        (("list.jsonl", "text.txt"), "text.txt, line 1: it is text, but the network takes sound"),
    ):
        done = transduce("transcribe", "model", *arguments, *options, folder=sounds)
        assert done.returncode == 1 and message in done.stderr
        assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
    done = transduce("recognize", "-", "--model", "model", *options, folder=sounds)
    assert done.returncode == 1 and "--shard reads files, not standard input" in done.stderr


def test_ray_that_is_not_installed_is_one_sentence(texts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    done = phonemized(texts, tmp_path / "out", "all/2", "--engine", "ray")
    assert done.returncode == 1 and 'run pip install "transduce[ray]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1
