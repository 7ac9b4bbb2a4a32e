"""Run the commands: their output, their files and their errors."""

import errno
import json
import os
import pty
import re
import signal
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from commands import RECIPE, ROOT, WORDS, in_a_new_process, started, train_small_runs, transduce
from explored import RATE, sound, sound_model

from transduce import cli
from transduce.model.checkpoint import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train three networks on a few pairs."""
    folder = tmp_path_factory.mktemp("runs")
    train_small_runs(folder, "transducer", "ctc", "prediction")
    return folder


def test_help_lists_the_commands_in_the_readmes_order(tmp_path):
    readme = (ROOT / "README.md").read_text()
    shell = "".join(re.findall(r"```sh\n(.*?)```", readme, re.S))
    shown = dict.fromkeys(re.findall(r"^(?:transduce|make) (\w+)", shell, re.M))
    listed = re.findall(r"^\W (\w+)  ", transduce("--help", folder=tmp_path).stdout, re.M)
    assert listed == [name for name in shown if name != "test"]


def test_a_command_is_a_plain_function(tmp_path):
    with pytest.raises(SystemExit, match="there is no file"):
        cli.evaluate(tmp_path / "nothing", beam_width=2)


def test_training_writes_a_run_folder(folder):
    names = {path.name for path in (folder / "runs/transducer").iterdir()}
    assert {"config.toml", "model.safetensors", "metrics.jsonl"} <= names
    assert not any(name.endswith(".partial") for name in names)


def test_a_resumed_run_keeps_its_own_settings(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a\tA\nb\tB\n")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("NETWORK", "transducer"))
    short = ("--network.hidden_size", 5, "--train.max_epochs", 1, "--run", "here")
    done = transduce("train", "recipe.toml", *short, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    again = ("--run", "here", "--resume", "--train.max_epochs", 2)
    done = transduce("train", "recipe.toml", *again, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "hidden_size = 5\n" in (tmp_path / "here" / "config.toml").read_text()
    assert len((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()) == 2


def test_resuming_without_a_run_is_refused(folder):
    done = transduce("train", "transducer.toml", "--run", "nowhere", "--resume", folder=folder)
    assert done.returncode == 1 and "no run in nowhere to resume" in done.stderr
    assert not (folder / "nowhere").exists()


def test_letters_match_in_either_case_and_unknown_ones_are_named(folder):
    done = transduce("transcribe", "runs/transducer", folder=folder, text="ab\nAB\n")
    assert done.stdout == "AA BB\nAA BB\n" and done.stderr == ""
    done = transduce("transcribe", "runs/transducer", folder=folder, text="ab\na7\n")
    assert done.stdout.startswith("AA BB\n")
    assert "standard input, line 2: '7' was not in the training data" in done.stderr
    assert "more" not in done.stderr
    done = transduce("transcribe", "runs/transducer", folder=folder, text="a7b\n89\n")
    assert "counts as nothing, as do 2 more in all" in done.stderr


def test_two_inputs_with_the_same_name_get_two_files(folder):
    options = ("--format", "json", "--output", "twice")
    done = transduce("transcribe", "runs/transducer", *options, folder=folder, text="ab\nab\n")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (folder / "twice").iterdir()) == ["ab-2.json", "ab.json"]


def test_ctrl_c_has_the_exit_code_that_shells_expect(folder, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("transduce.model.model.search_examples", interrupted)
    done = transduce("transcribe", "runs/transducer", folder=folder, text="ab\n")
    assert (done.returncode, done.stderr) == (130, "transduce: stopped\n")


@pytest.mark.parametrize(
    "arguments", [("transcribe", "runs/transducer"), ("phonemize", "--model", "runs/transducer")]
)
def test_ctrl_c_stops_a_command_that_waits_for_more_lines(folder, arguments):
    process = started(*arguments, folder=folder)
    process.stdin.write("ab\n" * 64)
    process.stdin.flush()
    # The command answers although more lines may come.
    assert [process.stdout.readline() for _ in range(64)] == ["AA BB\n"] * 64
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert process.communicate() == ("", "transduce: stopped\n")


def test_recognition_prints_each_file_at_once_and_stops_on_ctrl_c(tmp_path):
    save_model(sound_model(), tmp_path)
    soundfile.write(tmp_path / "tone.wav", sound(0.3), RATE)
    sounds = ["tone.wav"] * 3000  # more than are recognised before the signal
    process = started("recognize", *sounds, "--model", ".", "--format", "json", folder=tmp_path)
    assert json.loads(process.stdout.readline())["input"] == "tone"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "transduce: stopped\n")
    assert len(output.splitlines()) < 2999


def test_a_progress_bar_leaves_standard_output_alone(folder):
    """Standard error is a terminal and standard output is not, as in `transduce ... > file`."""
    bar, terminal = pty.openpty()
    with open(terminal, "w") as errors:
        process = started("transcribe", "runs/transducer", folder=folder, stderr=errors)
        output, _ = process.communicate("ab\nba\n", timeout=60)
    os.close(bar)
    assert (process.returncode, output) == (0, "AA BB\nBB AA\n")


def test_a_warning_is_one_sentence(folder):
    options = ("--null-bias", -30, "--max-labels-per-frame", 2)
    done = in_a_new_process("transcribe", "runs/transducer", *options, folder=folder, text="ab\n")
    assert done.returncode == 0 and len(done.stdout.split()) == 4
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("transduce: warning: max_labels_per_frame = 2 was met")


def test_the_table_has_the_papers_rows_beside_ours(folder):
    runs = [f"runs/{network}" for network in ("prediction", "ctc", "transducer")]
    done = transduce("table", *runs, folder=folder)
    assert done.returncode == 0, done.stderr
    for name in ("prediction", "CTC", "transducer", "23.2 %"):
        assert name in done.stdout


def test_the_table_trains_recipes_first_with_the_settings_given(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a\tA\nb\tB\n")
    (tmp_path / "short.toml").write_text(RECIPE.replace("NETWORK", "transducer"))
    settings = ("--train.max_epochs", 1, "--network.hidden_size=5", "--beam-width", 2)
    done = transduce("table", "short.toml", *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "transducer" in done.stdout and "23.2 %" in done.stdout
    config = (tmp_path / "runs" / "short" / "config.toml").read_text()
    assert "hidden_size = 5\n" in config and "max_epochs = 1\n" in config


def test_evaluation_prints_a_table_or_json(folder):
    done = transduce("evaluate", "runs/transducer", "pairs.tsv", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["network"] == "transducer" and row["error"] < 0.2
    done = transduce("evaluate", "runs/transducer", "--beam-width", 4, folder=folder)
    assert done.returncode == 0 and "substitutions" in done.stdout.lower()


def test_only_training_imports_lightning(folder):
    """Lightning takes as long to import as everything else together."""
    code = "import sys; sys.modules['lightning_fabric'] = None  # importing it fails\n"
    code += "from transduce.cli import main; main()"
    done = in_a_new_process("evaluate", "runs/transducer", folder=folder, code=code)
    assert done.returncode == 0, done.stderr
    done = in_a_new_process("train", "ctc.toml", folder=folder, code=code)
    assert "import of lightning_fabric halted" in done.stderr


def test_lines_of_text_are_transcribed(folder):
    arguments = ("transcribe", "runs/transducer")
    done = in_a_new_process(*arguments, folder=folder, text="ab\nbba\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["AA BB", "BB BB AA"]


def test_several_outputs_are_printed_with_probabilities_best_first(folder):
    options = ("--n-best", 3, "--beam-width", 8)
    done = transduce("transcribe", "runs/transducer", *options, folder=folder, text="ab\n")
    probabilities = [float(line.split("\t")[0]) for line in done.stdout.splitlines()]
    assert len(probabilities) == 3 and probabilities[0] == max(probabilities)


def test_ctc_prints_several_outputs_too(folder):
    options = ("--n-best", 3, "--beam-width", 8)
    done = transduce("transcribe", "runs/ctc", *options, folder=folder, text="ab\n")
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0][1] == "AA BB" and len({output for _, output in rows}) == 3
    probabilities = [float(probability) for probability, _ in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    done = transduce("transcribe", "runs/ctc", "--format", "json", folder=folder, text="ab\n")
    assert json.loads(done.stdout)["hypotheses"][0]["timings"] == []


def test_each_input_gets_a_textgrid_or_a_json_file(folder):
    (folder / "words.txt").write_text("ab\nba\n")
    for form, suffix in (("textgrid", ".TextGrid"), ("json", ".json")):
        options = ("words.txt", "--format", form, "--output", "out")
        done = transduce("transcribe", "runs/transducer", *options, folder=folder)
        assert done.returncode == 0, done.stderr
        assert (folder / f"out/ab{suffix}").read_text()
    assert json.loads((folder / "out/ba.json").read_text())["hypotheses"][0]["output"] == "BB AA"
    assert {path.suffix for path in (folder / "out").iterdir()} == {".TextGrid", ".json"}


def test_the_papers_figures_are_drawn(folder):
    for figure in ("lattice", "variables", "sensitivity"):
        done = transduce("plot", figure, "runs/transducer", "abba", folder=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{figure}.png\n"
        assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    options = ("--target", "BB AA", "--at", "1,0", "--output", "why/not.svg")
    done = transduce("plot", "sensitivity", "runs/transducer", "ab", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (folder / "why/not.svg").read_text()


@pytest.fixture(scope="module")
def another(folder):
    """Train a run of another seed and size, and one on other data."""
    recipe = RECIPE.replace("NETWORK", "transducer").replace("max_epochs = 40", "max_epochs = 2")
    (folder / "small.toml").write_text(recipe)
    sizes = ("--train.seed", 1, "--network.hidden_size", 9, "--network.prediction_size", 5)
    assert transduce("train", "small.toml", *sizes, folder=folder).returncode == 0
    (folder / "swapped.tsv").write_text("ab\tBB AA\nba\tAA BB\n")
    swapped = ("--data.training", "swapped.tsv", "--run", "runs/swapped")
    assert transduce("train", "small.toml", *swapped, folder=folder).returncode == 0
    return folder


def test_several_runs_are_one_ensemble(another):
    runs = ("runs/transducer", "runs/small/model.safetensors")
    alone, together, first_again = (
        json.loads(transduce("evaluate", *r, "--json", folder=another).stdout)
        for r in (runs[:1], runs, (runs[0], runs[0]))
    )
    assert together["bits_per_label"] != pytest.approx(alone["bits_per_label"], rel=1e-3)
    assert first_again["bits_per_label"] == pytest.approx(alone["bits_per_label"], rel=1e-5)
    (another / "words.txt").write_text("ab\n")
    done = transduce("transcribe", *runs, "words.txt", "--beam-width", 3, folder=another)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr
    done = transduce("evaluate", *runs, "pairs.tsv", folder=another)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ("transcribe", "runs/transducer", "runs/ctc"),
            "runs/ctc is of the kind ctc; an ensemble is of transducers",
        ),
        (("transcribe", "runs/transducer", "runs"), "runs is a folder without model.safetensors"),
        (("evaluate", "runs/transducer", "runs/swapped"), "another [data]"),
        (("evaluate", "runs/transducer", "runs/small", "a.tsv", "b.tsv"), "two files of pairs"),
        (("transcribe", "runs/transducer", "nothing.safetensors"), "no file, folder or model"),
    ],
)
def test_runs_that_cannot_form_an_ensemble_are_refused(another, arguments, said):
    done = transduce(*arguments, folder=another)
    assert done.returncode == 1 and said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


PRONOUNCER = ("--model", "runs/transducer")


def test_each_word_gets_a_line_with_its_pronunciation(folder):
    done = transduce("phonemize", "ab", "BA", *PRONOUNCER, folder=folder)
    assert (done.returncode, done.stdout) == (0, "AA BB\nBB AA\n"), done.stderr
    words = "\n".join(WORDS * 100)
    many = transduce("phonemize", *PRONOUNCER, folder=folder, text=words)
    assert many.stdout == transduce("transcribe", PRONOUNCER[1], folder=folder, text=words).stdout


def test_n_best_pronunciations_have_their_word_and_probability(folder):
    options = ("--n-best", 2, "--beam-width", 5, *PRONOUNCER)
    done = transduce("phonemize", *options, folder=folder, text="ab\nb\n")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["ab", "ab", "b", "b"]
    assert rows[0][2] == "AA BB" and 0 < float(rows[1][1]) < float(rows[0][1]) <= 1


def test_a_word_with_an_unknown_letter_is_blank_and_named_in_an_error(folder):
    done = transduce("phonemize", *PRONOUNCER, folder=folder, text="ab\n\na\u00df\nba\n")
    assert (done.returncode, done.stdout) == (1, "AA BB\n\n\nBB AA\n")
    (sentence,) = done.stderr.splitlines()
    assert "standard input, line 3: a\u00df: '\u00df' is no symbol" in sentence
    done = transduce("phonemize", "x", *PRONOUNCER, folder=folder)
    assert (done.returncode, done.stdout) == (1, "\n") and "x: 'x' is no" in done.stderr


def test_pronunciations_are_printed_before_the_input_ends(folder):
    """The command answers the lines it has while more may come."""
    process = started("phonemize", *PRONOUNCER, folder=folder)
    process.stdin.write("ab\n" * 64)
    process.stdin.flush()
    assert process.stdout.readline() == "AA BB\n"
    process.stdout.close()  # as `head` does
    _, errors = process.communicate("ba\n" * 500)
    assert errors == "" and process.returncode == 0


REFUSALS = {
    "a model that there is not": (("phonemize", "ab", "--model", "nobody"), "'nobody'"),
    "a misspelt setting": (
        ("train", "transducer.toml", "--train.learning_rat", "1"),
        "learning_rate",
    ),
    "a misspelt option": (("train", "transducer.toml", "--resum", "1"), "--resume"),
    "a setting without a value": (("train", "transducer.toml", "--train.seed"), "needs a value"),
    "no such recipe": (("train", "nothing.toml"), "nothing.toml cannot be read"),
    "no such run": (("evaluate", "runs/nothing"), "runs/nothing"),
    "no such file": (("transcribe", "runs/transducer", "nothing.txt"), "nothing.txt cannot be"),
    "sound for letters": (("transcribe", "runs/transducer", "tone.wav"), "tone.wav"),
    "a prediction network": (("transcribe", "runs/prediction", "words.txt"), "prediction network"),
    "a node outside of the lattice": (
        ("plot", "sensitivity", "runs/transducer", "ab", "--at", "2,0"),
        "no node 2,0 in the output lattice; t is 0 to 1 and u 0 to 2",
    ),
    "no node": (("plot", "sensitivity", "runs/transducer", "ab", "--at", "1"), "such as 4,3"),
    "a node where there is no crosshair": (
        ("plot", "lattice", "runs/transducer", "ab", "--at", "1,1"),
        "no crosshair",
    ),
    "a letter never seen": (
        ("plot", "lattice", "runs/transducer", "abc"),
        "the input: 'c' is no symbol that the model knows",
    ),
    "a target never seen": (
        ("plot", "lattice", "runs/transducer", "ab", "--target", "AA CC"),
        "'CC', at position 1",
    ),
    "an empty target": (
        ("plot", "lattice", "runs/transducer", "ab", "--target", " "),
        "the target is empty",
    ),
    "an empty input": (("plot", "lattice", "runs/transducer", ""), "not a line of text"),
    "a figure of no known format": (
        ("plot", "lattice", "runs/transducer", "ab", "--output", "figure.jpg"),
        "figure.jpg must end in",
    ),
    "arrows without number": (
        ("plot", "lattice", "runs/transducer", 20 * "ab"),
        "plot its variables instead",
    ),
    "the lattice of CTC": (("plot", "variables", "runs/ctc", "ab"), "give a transducer"),
    "the lattice of a prediction network": (
        ("plot", "variables", "runs/prediction", "ab"),
        "give a transducer",
    ),
    "timings of CTC": (("transcribe", "runs/ctc", "words.txt", "--timestamps"), "CTC has no"),
    "a TextGrid of CTC": (
        ("transcribe", "runs/ctc", "words.txt", "--format", "textgrid"),
        "CTC has no",
    ),
}


@pytest.mark.parametrize(
    "arguments, path",
    [
        (("transcribe", "runs/transducer", "words.txt", "--output", "taken"), "taken"),
        (("transcribe", "runs/transducer", "words.txt", "--output", "taken/in"), "taken/in"),
        (("transcribe", "runs/transducer", "words.txt", "--output", "folders"), "folders/ab.txt"),
        (("train", "transducer.toml", "--run", "taken"), "taken"),
        (("train", "transducer.toml", "--run", "folders"), "folders/config.toml"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(folder, arguments, path):
    (folder / "words.txt").write_text("ab\n")
    (folder / "taken").write_text("a file where a folder is expected\n")
    for name in ("ab.txt", "config.toml"):
        (folder / "folders" / name).mkdir(parents=True, exist_ok=True)
    done = transduce(*arguments, folder=folder)
    assert done.returncode == 1
    assert f"transduce: {path} cannot be read or written (" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert {found.name for found in (folder / "folders").iterdir()} == {"ab.txt", "config.toml"}


def test_a_full_disk_is_one_sentence(folder, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    options = ("words.txt", "--output", "full")
    (folder / "words.txt").write_text("ab\n")
    done = transduce("transcribe", "runs/transducer", *options, folder=folder)
    assert done.returncode == 1 and done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "full/ab.txt cannot be read or written (No space left on device);" in sentence
    assert list((folder / "full").iterdir()) == []


@pytest.mark.parametrize("arguments", [("phonemize", "word"), ("--help",)], ids=["print", "help"])
def test_a_full_standard_output_is_one_sentence(tmp_path, arguments):
    with Path("/dev/full").open("w") as full:
        process = started(*arguments, folder=tmp_path, stdout=full)
        _, err = process.communicate()
    assert process.returncode == 1
    assert err == (
        "transduce: standard output cannot be written (No space left on device); free some space\n"
    )


def test_ctrl_c_while_the_package_is_imported_leaves_no_traceback(monkeypatch):
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "transduce.cli":
                signal.raise_signal(signal.SIGINT)

    class Exited(Exception):
        pass

    def exited(code):
        raise Exited(code)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "_exit", exited)
    monkeypatch.delitem(sys.modules, "transduce.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(Exited, match=r"^130$"):
        import_module("transduce_command").main()
    signal.signal(signal.SIGINT, before)
    [name] = re.findall(r'^transduce = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert name == "transduce_command:main"


def test_a_gpu_that_is_not_there_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("evaluate", "transcribe"):
        done = transduce(command, "runs/transducer", "--device", "cuda", folder=folder)
        assert done.returncode == 1 and done.stderr == (
            "transduce: --device cuda needs a GPU, and PyTorch finds none; leave --device out\n"
        )


def test_a_line_that_is_too_long_is_one_sentence(folder):
    long = "ab" * 5_000_000
    done = transduce("phonemize", "--model", "runs/transducer", folder=folder, text=f"ab\n{long}\n")
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 2
    assert done.stderr == (
        "transduce: standard input, line 2: a text of 10000000 symbols is too long; give at most "
        "10000\n"
    )
    done = transduce("transcribe", "runs/transducer", folder=folder, text=long)
    assert done.returncode == 1 and "line 1: a text of 10000000 symbols is too long" in done.stderr


def test_an_error_exits_with_code_1(folder):
    done = in_a_new_process("evaluate", "runs/nothing", folder=folder)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments, message", REFUSALS.values(), ids=REFUSALS)
def test_an_error_is_one_sentence(folder, arguments, message):
    soundfile.write(folder / "tone.wav", np.zeros(1600), 16000)
    (folder / "words.txt").write_text("ab\n")
    done = transduce(*arguments, folder=folder)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
