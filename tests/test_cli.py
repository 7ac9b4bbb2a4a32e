"""Run the commands: their output, their files and their errors."""

import errno
import json
import math
import os
import pty
import re
import shutil
import signal
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from commands import RECIPE, ROOT, WORDS, in_a_new_process, started, train_small_runs, transduce
from explored import RATE, sound, sound_model

from transduce import cli
from transduce.cli import terminal as terminal_module
from transduce.cli.plot import _node
from transduce.cli.runs import runs_and_files
from transduce.cli.terminal import user_errors
from transduce.model.checkpoint import save_model
from transduce.model.model import model_names


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
    listed.remove("graphones")  # the guide on letters to sounds has it
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


def test_letters_match_in_either_case(folder):
    done = transduce("transcribe", "runs/transducer", folder=folder, text="ab\nAB\n")
    assert done.stdout == "AA BB\nAA BB\n" and done.stderr == ""


TEXT_COMMANDS = [("transcribe", "runs/transducer"), ("phonemize", "--model", "runs/transducer")]
LINES = "ab\n\nac\nb7\n?!\nba\n"  # a blank line, three that fail


@pytest.mark.parametrize("arguments", TEXT_COMMANDS, ids=lambda arguments: arguments[0])
def test_every_line_has_its_line_of_output(folder, arguments):
    done = transduce(*arguments, folder=folder, text=LINES)
    assert (done.returncode, done.stdout) == (1, "AA BB\n\n\n\n\nBB AA\n")
    letter, number, marks = done.stderr.splitlines()
    assert letter.startswith("transduce: standard input, line 3: ") and "'c' is no" in letter
    assert number.startswith("transduce: standard input, line 4: ")
    assert number.endswith("the model does not read numbers; write them as words")
    assert marks.startswith("transduce: standard input, line 5: ")
    blank = transduce(*arguments, folder=folder, text="\nab\n")
    assert blank == (0, "\nAA BB\n", "")


@pytest.mark.parametrize("arguments", TEXT_COMMANDS, ids=lambda arguments: arguments[0])
def test_an_n_best_table_repeats_the_input_and_says_how_it_is_sorted(folder, arguments):
    done = transduce(*arguments, "--n-best", 2, folder=folder, text=LINES)
    rows = [line.split("\t") for line in done.stdout.split("\n")[:-1]]
    inputs = ["ab", "ab", "", "ac", "b7", "?!", "ba", "ba"]
    assert [row[0] for row in rows] == inputs
    assert rows[2] == [""] and rows[3] == ["ac", "", "", ""]
    assert rows[0][3] == "AA BB" and float(rows[0][2]) >= float(rows[1][2])
    # The score is the logarithm of the probability, divided by the number of labels.
    assert float(rows[0][2]) == pytest.approx(math.log(float(rows[0][1])) / 2, abs=1e-3)
    assert done.stderr.startswith(
        "transduce: columns: input, probability, score = log Pr(y) / |y|, output; sorted by the"
    )
    plain = transduce(*arguments, "--n-best", 2, "--no-length-normalised", folder=folder, text="a")
    assert "score = log Pr(y), output" in plain.stderr and plain.returncode == 0


def test_json_has_a_line_for_each_line_too(folder):
    options = ("--format", "json")
    done = transduce("transcribe", "runs/transducer", *options, folder=folder, text=LINES)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["input"] for one in found] == ["ab", "", "ac", "b7", "?!", "ba"]
    assert ["error" in one for one in found] == [False, True, True, True, True, False]
    assert "line 3: 'c' is no symbol" in found[2]["error"] and done.returncode == 1


def test_evaluation_says_which_pairs_have_unknown_letters(folder):
    (folder / "strange.tsv").write_text("ab\tAA BB\nac\tAA\nba\tBB AA\n")
    done = transduce("evaluate", "runs/transducer", "strange.tsv", folder=folder)
    assert done.returncode == 0
    assert "1 of 3 pairs have a source symbol that the model does not know" in done.stderr
    assert "'c' in strange.tsv, line 2" in done.stderr


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


def test_ctrl_c_stops_training_with_nothing_but_a_word(folder, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    options = ("--run", "stopped", "--train.max_epochs", 1)
    with monkeypatch.context() as patched:
        patched.setattr("transduce.training.fit._Run._step", interrupted)
        done = transduce("train", "transducer.toml", *options, folder=folder)
    assert (done.returncode, done.stderr) == (130, "transduce: stopped\n")
    done = transduce("train", "transducer.toml", *options, "--resume", folder=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", TEXT_COMMANDS, ids=lambda arguments: arguments[0])
def test_each_line_is_answered_when_it_comes_and_ctrl_c_stops_the_wait(folder, arguments):
    process = started(*arguments, folder=folder)
    for line in ("ab\n", "ba\nab\n"):
        process.stdin.write(line)
        process.stdin.flush()
        for word in line.split():  # although more lines may come
            assert process.stdout.readline() == {"ab": "AA BB\n", "ba": "BB AA\n"}[word]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert process.communicate() == ("", "transduce: stopped\n")


@pytest.mark.slow
def test_recognition_prints_each_file_at_once_and_stops_on_ctrl_c(tmp_path):
    save_model(sound_model(), tmp_path)
    soundfile.write(tmp_path / "tone.wav", sound(0.3), RATE)
    sounds = ["tone.wav"] * 3000  # more than are recognised before the signal
    process = started("recognize", *sounds, "--model", ".", "--format", "json", folder=tmp_path)
    assert json.loads(process.stdout.readline())["input"] == "tone"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors.endswith("transduce: stopped\n")
    assert len(output.splitlines()) < 2999


@pytest.mark.slow
def test_a_progress_bar_leaves_standard_output_alone(folder):
    """Standard error is a terminal and standard output is not, as in `transduce ... > file`."""
    bar, terminal = pty.openpty()
    with open(terminal, "w") as errors:
        process = started("transcribe", "runs/transducer", folder=folder, stderr=errors)
        output, _ = process.communicate("ab\nba\n", timeout=60)
    os.close(bar)
    assert (process.returncode, output) == (0, "AA BB\nBB AA\n")


def test_warnings_that_differ_in_names_and_numbers_are_printed_once(capsys):
    with user_errors():
        warnings.simplefilter("always")
        for number in range(3):
            warnings.warn(f"it was met in {number} of the frames of 'word {number}'", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert capsys.readouterr().err.splitlines() == [
        "transduce: warning: it was met in 0 of the frames of 'word 0'",
        "transduce: warning: another",
    ]


@pytest.mark.slow
def test_a_warning_is_one_sentence(folder):
    options = ("--null-bias", -30, "--max-labels-per-frame", 2)
    done = in_a_new_process("transcribe", "runs/transducer", *options, folder=folder, text="ab\n")
    assert done.returncode == 0 and len(done.stdout.split()) == 4
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("transduce: warning: max_labels_per_frame = 2 was met")
    assert "frames of 'ab'; hypotheses" in sentence


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
    done = transduce("evaluate", "runs/transducer", "pairs.tsv", "--format", "json", folder=folder)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["network"] == "transducer" and row["error"] < 0.2
    done = transduce("evaluate", "runs/transducer", "--beam-width", 4, folder=folder)
    assert done.returncode == 0 and "substitutions" in done.stdout.lower()
    assert "paper" not in done.stdout


@pytest.mark.slow
def test_only_training_imports_lightning(folder):
    """Lightning takes as long to import as everything else together."""
    code = "import sys; sys.modules['lightning_fabric'] = None  # importing it fails\n"
    code += "from transduce.cli import main; main()"
    done = in_a_new_process("evaluate", "runs/transducer", folder=folder, code=code)
    assert done.returncode == 0, done.stderr
    done = in_a_new_process("train", "ctc.toml", folder=folder, code=code)
    assert "import of lightning_fabric halted" in done.stderr


def test_lines_of_text_are_transcribed(folder):
    done = transduce("transcribe", "runs/transducer", folder=folder, text="ab\nbba\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["AA BB", "BB BB AA", "", ""]


def test_several_outputs_are_printed_with_probabilities_best_first(folder):
    options = ("--n-best", 3, "--beam-width", 8)
    done = transduce("transcribe", "runs/transducer", *options, folder=folder, text="ab\n")
    probabilities = [float(line.split("\t")[1]) for line in done.stdout.splitlines()]
    assert len(probabilities) == 3 and probabilities[0] == max(probabilities)


def test_ctc_prints_several_outputs_too(folder):
    options = ("--n-best", 3, "--beam-width", 8)
    done = transduce("transcribe", "runs/ctc", *options, folder=folder, text="ab\n")
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0][3] == "AA BB" and len({output for *_, output in rows}) == 3
    probabilities = [float(probability) for _, probability, _, _ in rows]
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


def test_the_node_in_the_middle_is_drawn_unless_one_is_named():
    view = SimpleNamespace(num_labels=5, num_vectors=9, emitting_node=lambda u: (7, u))
    assert _node(view, None) == (7, 2) and _node(view, "3,1") == (3, 1)


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


def test_a_name_that_ships_is_a_run_unless_a_file_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, shipped, words = Path("run"), Path(model_names()[0]), Path("words.txt")
    words.write_text("word\n")
    assert runs_and_files(run, [shipped, words]) == ([run, shipped], [words])
    shipped.write_text("word\n")
    assert runs_and_files(run, [shipped, words]) == ([run], [shipped, words])


def test_several_runs_are_one_ensemble(another):
    runs = ("runs/transducer", "runs/small/model.safetensors")
    alone, together, first_again = (
        json.loads(transduce("evaluate", *r, "--format", "json", folder=another).stdout)
        for r in (runs[:1], runs, (runs[0], runs[0]))
    )
    assert together["bits_per_label"] != pytest.approx(alone["bits_per_label"], rel=1e-3)
    assert first_again["bits_per_label"] == pytest.approx(alone["bits_per_label"], rel=1e-5)
    (another / "words.txt").write_text("ab\n")
    done = transduce("transcribe", *runs, "words.txt", "--beam-width", 3, folder=another)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr
    done = transduce("evaluate", *runs, "pairs.tsv", folder=another)
    assert done.returncode == 0 and f"│ {len(runs)} models " in done.stdout, done


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
        (("evaluate", "runs/transducer", "small.toml"), "small.toml is a recipe; give the folder"),
        (("transcribe", "runs/transducer", "nothing.safetensors"), "no file, folder or model"),
        (
            ("transcribe", "runs/transducer", "english-phone-recogniser"),
            "english-phone-recogniser.safetensors reads sound, and runs/transducer reads text; an",
        ),
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


def test_words_of_people_are_read_with_accents_hyphens_and_punctuation(folder):
    words = ("\u00e4b", "ab-b\u00e1", "(a, bb.)", "ab")
    done = transduce("phonemize", *words, *PRONOUNCER, folder=folder)
    plain = transduce("phonemize", "ab", "ba", "a", "bb", *PRONOUNCER, folder=folder)
    ab, ba, a, bb = plain.stdout.splitlines()
    assert (done.returncode, done.stdout) == (0, f"{ab}\n{ab} {ba}\n{a} {bb}\n{ab}\n")
    assert done.stderr == (  # once
        "transduce: \u00e4b has a letter that the model does not know; it is read without its "
        "accent, here and further on\n"
    )
    table = transduce("phonemize", "ab-ba", "--n-best", 3, *PRONOUNCER, folder=folder)
    rows = [line.split("\t") for line in table.stdout.splitlines()]
    assert [row[0] for row in rows] == ["ab-ba"] * 3 and rows[0][3] == f"{ab} {ba}"


def test_an_unknown_letter_in_an_argument_is_named(folder):
    done = transduce("phonemize", "x", "ab", *PRONOUNCER, folder=folder)
    assert (done.returncode, done.stdout) == (1, "\nAA BB\n") and "x: 'x' is no" in done.stderr


def test_a_word_that_is_the_name_of_a_file_leads_to_standard_input(folder):
    for name in ("ab.txt", "ab"):
        (folder / name).write_text("ba\n")
    done = transduce("phonemize", "ab.txt", "bb", *PRONOUNCER, folder=folder)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 2
    assert done.stderr == "transduce: ab.txt is a file; give its lines with < ab.txt\n"
    done = transduce("phonemize", "ab", *PRONOUNCER, folder=folder)
    assert (done.returncode, done.stdout) == (0, "AA BB\n")
    assert done.stderr == (
        "transduce: ab was taken as a word, not as the file of that name; give the lines of the "
        "file with < ab\n"
    )
    for name in ("ab.txt", "ab"):
        (folder / name).unlink()
    done = transduce("phonemize", "ab " * 100 + "x", *PRONOUNCER, folder=folder)  # no path so long
    assert done.returncode == 1 and "'x' is no symbol that the model knows" in done.stderr


@pytest.mark.slow
def test_a_closed_output_ends_the_command(folder):
    process = started("phonemize", *PRONOUNCER, folder=folder)
    process.stdin.write("ab\n" * 64)
    process.stdin.flush()
    assert process.stdout.readline() == "AA BB\n"
    process.stdout.close()  # as `head` does
    _, errors = process.communicate("ba\n" * 500)
    assert errors == "" and process.returncode == 0


REFUSALS = {
    "a model that there is not": (("phonemize", "ab", "--model", "nobody"), "'nobody'"),
    "no such recipe": (("train", "nothing.toml"), "nothing.toml cannot be read"),
    "no such run": (("evaluate", "runs/nothing"), "runs/nothing"),
    "no such file": (("transcribe", "runs/transducer", "nothing.txt"), "nothing.txt cannot be"),
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


MISUSES = {
    "a misspelt setting": (("--train.learning_rat", "1"), "--train.learning_rate?"),
    "another word": (("--epochs", "1"), "no option --epochs; did you mean --train.max_epochs?"),
    "another word with =": (("--batch-size=2",), "did you mean --train.max_sequences?"),
    "a flag": (("--gpu",), "no option --gpu; did you mean --train.device?"),
    "a setting without a value": (("--train.seed",), "--train.seed needs a value"),
    "a word": (("--train.max_epochs", "x"), 'must be a whole number, not "x"'),
    "an infinite number": (("--train.consistency", "inf"), "train.consistency must be a finite"),
}


@pytest.mark.parametrize("command", ["train", "table"])
@pytest.mark.parametrize("options, said", MISUSES.values(), ids=MISUSES)
def test_a_wrong_option_is_one_sentence_and_exits_with_code_2(folder, command, options, said):
    done = transduce(command, "transducer.toml", *options, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("transduce: ") and said in sentence


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["evaluate", "runs/transducer", "--beam-widht", 3], "Did you mean --beam-width?"),
        (["evaluate", "runs/transducer", "--beam-width", "a"], "--beam-width: unable to convert"),
        (["graphones"], "RECIPE requires an argument"),
        (["evalute"], "Unknown command"),
    ],
)
def test_an_error_of_the_options_looks_like_all_others(folder, arguments, said):
    done = transduce(*arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("transduce: ") and said in sentence


@pytest.mark.parametrize(
    "command, option, meant",
    [
        ("train", "--resum", "--resume"),
        ("train", "--output", "--run"),
        ("graphones", "--outptu", "--output"),
        ("table", "--beam_with", "--beam-width"),
    ],
)
def test_a_misspelt_option_of_the_command_itself_is_recognised(folder, command, option, meant):
    done = transduce(command, "transducer.toml", option, "1", folder=folder)
    said = f"transduce: there is no option {option}; did you mean {meant}?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_gpu_that_is_not_there_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("transcribe", "evaluate", "table"):
        done = transduce(command, "runs/transducer", "--device", "cuda", folder=folder)
        assert (done.returncode, done.stdout) == (1, "")
        (sentence,) = done.stderr.splitlines()
        assert "--device is cuda, but PyTorch finds no CUDA GPU here" in sentence


@pytest.mark.parametrize("command", ["transcribe", "evaluate"])
def test_a_precision_that_needs_a_gpu_is_refused_without_one(folder, command):
    options = ("--device", "cpu", "--precision", "bf16-mixed")
    done = transduce(command, "runs/transducer", *options, folder=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "transduce: precision bf16-mixed needs a GPU, not cpu; leave it out there\n"
    )


def test_the_recipes_that_ship_are_listed_and_trained_by_name(tmp_path):
    done = transduce("recipes", folder=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 14
    assert "\npairs-transducer       Text to text, from lines of source TAB target" in done.stdout
    (tmp_path / "pairs.tsv").write_text("a\tA\nb\tB\n")
    small = ("--network.hidden_size", 5, "--network.prediction_size", 5, "--train.max_epochs", 1)
    files = ("training", "validation", "test")
    data = [token for name in files for token in (f"--data.{name}", "pairs.tsv")]
    done = transduce("train", "pairs-transducer", *data, *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = transduce("table", "pairs-transducer", *data, *small, folder=tmp_path)
    assert done.returncode == 0 and "transducer" in done.stdout, done.stderr
    done = transduce("train", "pears-transducer", folder=tmp_path)
    assert done.returncode == 1 and "(did you mean pairs-transducer?); give a" in done.stderr


def test_evaluation_refuses_another_sample_rate_unless_it_may_convert(tmp_path, capsys):
    save_model(sound_model(), tmp_path)
    soundfile.write(tmp_path / "tone.wav", sound(0.3, RATE // 2), RATE // 2)
    line = {"audio_filepath": "tone.wav", "duration": 0.3, "text": "A B"}
    (tmp_path / "test.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit, match=f"{RATE // 2}.*{RATE}"):
        cli.evaluate(tmp_path, tmp_path / "test.jsonl")
    cli.evaluate(tmp_path, tmp_path / "test.jsonl", convert=True)
    assert "error rate" in capsys.readouterr().out


def test_evaluation_of_the_wrong_field_names_the_fields(tmp_path):
    save_model(sound_model(), tmp_path)
    soundfile.write(tmp_path / "tone.wav", sound(0.3), RATE)
    line = {"audio_filepath": "tone.wav", "duration": 0.3, "text": "hello", "phones": "A B"}
    (tmp_path / "test.jsonl").write_text(json.dumps(line) + "\n")
    done = transduce("evaluate", ".", "test.jsonl", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "transduce: test.jsonl, line 1: the model does not know 'hello', nor all symbols of "
        "any other target; choose the field with --target: text, phones\n"
    )
    done = transduce("evaluate", ".", "test.jsonl", "--target", "phones", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    other = ("--target", "words", "--skip-bad")
    done = transduce("evaluate", ".", "test.jsonl", *other, folder=tmp_path)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("transduce: no pair can be read; the first error is: test.jsonl, ")
    assert "no field 'words' for the target; choose one of text, phones with --" in sentence


def test_evaluation_with_targets_that_the_model_does_not_know_names_one(folder):
    (folder / "unknown.tsv").write_text("ab\tXX YY\nba\tYY\n")
    done = transduce("evaluate", "runs/transducer", "unknown.tsv", folder=folder)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert "unknown.tsv, line 1: the model does not know 'XX', nor all symbols of " in sentence


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_sound_for_a_model_of_letters_is_an_error_in_its_place(folder):
    soundfile.write(folder / "tone.wav", np.zeros(1600), 16000)
    (folder / "words.txt").write_text("ab\n")
    done = transduce("transcribe", "runs/transducer", "tone.wav", "words.txt", folder=folder)
    assert (done.returncode, done.stdout) == (1, "\nAA BB\n") and "tone.wav" in done.stderr


def test_the_help_of_the_table_shows_its_arguments(tmp_path):
    shown = transduce("table", "--help", folder=tmp_path).stdout
    assert "RUNS" in shown and "Folders of runs, or recipes" in shown


# --- Recognition ----------------------------------------------------------------------------------


@pytest.fixture
def speech(tmp_path):
    """Write a model of sound, and sounds in folders, two of equal names."""
    save_model(sound_model(), tmp_path / "model")
    for name in ("rec/one/a.wav", "rec/two/a.wav", "rec/b.flac", "rec/two/.hidden.wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / name, sound(0.3), RATE)
    (tmp_path / "rec" / "notes.txt").write_text("no sound")
    return tmp_path


def recognised(*arguments, folder, text=""):
    options = ("--model", "model", "--beam-width", 2)
    return transduce("recognize", *arguments, *options, folder=folder, text=text)


def written(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_a_folder_is_searched_and_its_subfolders_are_kept(speech):
    done = recognised("rec", "--format", "json", "--output", "out", folder=speech)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert written(speech / "out") == ["b.json", "one/a.json", "two/a.json"]
    found = json.loads((speech / "out/two/a.json").read_text())
    assert (found["input"], found["path"]) == ("two/a", "rec/two/a.wav")
    assert found["seconds"] == 0.3
    (speech / "empty").mkdir()
    done = recognised("empty", folder=speech)
    assert done.returncode == 1 and "empty has no sound files; known suffixes are" in done.stderr


def test_files_of_one_name_get_different_outputs(speech):
    shutil.copy(speech / "rec/one/a.wav", speech / "a.wav")
    files = ("rec/one/a.wav", "rec/two/a.wav", "a.wav", "rec/b.flac")
    done = recognised(*files, "--output", "out", folder=speech)
    assert done.returncode == 0, done.stderr
    assert written(speech / "out") == ["a.txt", "b.txt", "rec-one-a.txt", "rec-two-a.txt"]
    lines = recognised(*files, "--format", "json", folder=speech).stdout.splitlines()
    assert [json.loads(line)["path"] for line in lines] == list(files)


def test_a_manifest_names_the_sounds_and_its_bad_lines_fail(speech):
    lines = [
        {"audio_filepath": "rec/b.flac"},
        {"audio_filepath": "rec/gone.flac"},
        {"audio_filepath": "rec/b.flac", "offset": 0.1, "duration": 0.1},
    ]
    (speech / "list.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    done = recognised("list.jsonl", "--output", "out", folder=speech)
    assert done.returncode == 1 and written(speech / "out") == ["b.txt", "b@0.1.txt"]
    sentence = done.stderr.splitlines()[0]
    assert "list.jsonl, line 2: there is no file rec/gone.flac" in sentence


def test_a_sound_file_is_read_from_standard_input(speech):
    content = (speech / "rec/b.flac").read_bytes()
    found = recognised("-", folder=speech, text=content)
    assert found.returncode == 0, found.stderr
    assert found.stdout == recognised("rec/b.flac", folder=speech).stdout
    misspelt = recognised("-", "--reusme", folder=speech)
    assert misspelt.returncode == 2 and "there is no option --reusme" in misspelt.stderr
    failed = recognised("-", folder=speech, text=b"no sound")
    assert failed.returncode == 1
    assert "standard input: it is not sound that can be read" in failed.stderr


def test_outputs_are_neither_overwritten_nor_done_twice_unless_asked_for(speech):
    options = ("rec", "--output", "out")
    done = recognised(*options, folder=speech)
    assert done.returncode == 0 and done.stderr.endswith("transduce: wrote 3 files into out\n")
    (speech / "out/b.txt").write_text("mine")
    (speech / "out/one/a.txt").unlink()
    refused = recognised(*options, folder=speech)
    assert refused.returncode == 1 and (speech / "out/b.txt").read_text() == "mine"
    assert "out/b.txt exists already, as do 1 others; give --overwrite" in refused.stderr
    assert not (speech / "out/one/a.txt").exists()
    done = recognised(*options, "--resume", folder=speech)
    assert done.returncode == 0
    assert done.stderr.endswith("wrote 1 file into out, and kept 2 that existed\n")
    assert (speech / "out/b.txt").read_text() == "mine" and (speech / "out/one/a.txt").exists()
    assert recognised(*options, "--overwrite", folder=speech).returncode == 0
    assert (speech / "out/b.txt").read_text() != "mine"
    for wrong in (("rec", "--resume"), (*options, "--resume", "--overwrite")):
        done = recognised(*wrong, folder=speech)
        assert done.returncode == 1 and "--resume" in done.stderr


@pytest.mark.slow
def test_a_killed_recognition_leaves_whole_files_and_is_resumed(speech):
    content = (speech / "rec/b.flac").read_bytes()
    (speech / "many").mkdir()
    for number in range(100):
        (speech / f"many/{number:03}.flac").write_bytes(content)
    arguments = ("many", "--model", "model", "--format", "json", "--output", "out")
    process = started("recognize", *arguments, folder=speech)
    while not (speech / "out/003.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    finished = {path.name for path in (speech / "out").glob("*.json")}
    assert 4 <= len(finished) < 100
    for name in finished:
        json.loads((speech / "out" / name).read_text())
    times = {name: (speech / "out" / name).stat().st_mtime_ns for name in finished}
    done = transduce("recognize", *arguments, "--resume", folder=speech)
    assert done.returncode == 0, done.stderr
    assert len(list((speech / "out").glob("*.json"))) == 100
    assert {n: (speech / "out" / n).stat().st_mtime_ns for n in finished} == times


def test_a_broken_file_among_good_ones_is_named_and_left_out(speech):
    (speech / "rec/c.wav").write_bytes(b"RIFF no more")
    done = recognised("rec", "--format", "json", folder=speech)
    assert done.returncode == 1
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["error" in one for one in found] == [False, True, False, False]
    [sentence] = [line for line in done.stderr.splitlines() if "c.wav" in line]
    assert "rec/c.wav is not audio that can be read" in sentence


def doubts(done):
    return [line for line in done.stderr.splitlines() if "warning: " in line]


def test_sound_unlike_the_training_data_is_doubted_once(speech, monkeypatch):
    monkeypatch.setattr(sys.modules["transduce.cli.transcribe"], "LOW_CONFIDENCE", 0.0)
    assert doubts(recognised("rec", folder=speech)) == []
    for name in ("x", "y"):
        soundfile.write(speech / f"{name}.wav", 0.001 * sound(0.3), RATE)
    for name in ("v", "w"):
        soundfile.write(speech / f"{name}.wav", sound(0.3, rate=8000), 8000)
    files = ("x.wav", "y.wav", "v.wav", "w.wav")
    quiet, slow = doubts(recognised(*files, folder=speech))
    assert quiet.startswith("transduce: warning: x.wav is almost silent")
    assert "v.wav has 8000 samples a second where the model was trained on 16000" in slow
    soundfile.write(speech / "u.wav", sound(0.3, rate=44_100), 44_100)  # which loses nothing
    for options in ((), ("--format", "json")):
        done = transduce("transcribe", "model", "u.wav", *files, *options, folder=speech)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 5
        assert doubts(done) == [slow]
    monkeypatch.setattr(sys.modules["transduce.cli.transcribe"], "LOW_CONFIDENCE", 1.0)
    [unsure] = doubts(recognised("rec", folder=speech))
    assert re.search(r"rec/b\.flac is recognised with a mean confidence of 0\.\d\d", unsure)


def test_a_full_disk_is_told_of_the_output_or_of_a_file(monkeypatch):
    monkeypatch.setattr(terminal_module, "_discard_output", lambda: None)
    full = (errno.ENOSPC, "No space left on device")
    with pytest.raises(SystemExit, match="standard output cannot be written"), user_errors():
        raise OSError(*full)
    with pytest.raises(SystemExit, match=r"a\.txt cannot be read or written"), user_errors():
        raise OSError(*full, "a.txt")
    with pytest.raises(ConnectionResetError), user_errors():
        raise ConnectionResetError(errno.ECONNRESET, "of no file")
