"""`transduce listen`: live sound from a pipe or the microphone."""

import json
import os
import pty
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from commands import started
from commands import transduce as run_command
from explored import RATE, sound, sound_model, text_model, wav_bytes
from rich.console import Console

from transduce.audio import live
from transduce.audio.live import LiveSound, microphone, read_ahead
from transduce.cli.listen import _Lines, _Listener, _Terminal
from transduce.model.checkpoint import save_model
from transduce.model.model import load

SOUND = np.concatenate([sound(0.7, frequency=f)[:, 0] for f in (300, 900, 500, 1500, 700)])
SAMPLES = (32767 * SOUND).astype("<i2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(sound_model(bidirectional=False), folder / "live")
    save_model(sound_model(), folder / "whole")
    save_model(text_model(), folder / "letters")
    return folder


@contextmanager
def piped(content, piece=1000):
    """Make standard input a pipe into which a thread writes."""
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for start in range(0, len(content), piece):
                pipe.write(content[start : start + piece])

    thread = threading.Thread(target=write)
    thread.start()
    yield SimpleNamespace(fileno=lambda: reading)
    thread.join()
    os.close(reading)


def listened(content, *options, folder, piece=1000, monkeypatch):
    """Pipe bytes through the command."""
    with piped(content, piece) as pipe, monkeypatch.context() as patched:
        patched.setattr("commands.replaced_input", lambda _: contextmanager(in_place)(pipe))
        model = () if "--model" in options else ("--model", "live")
        done = run_command("listen", "-", *model, *options, folder=folder)
        # The command leaves its reader to the end of the process; here it would read the next pipe,
        # which may have the same file descriptor.
        for thread in threading.enumerate():
            if thread.name == "sound":
                thread.join(10)
        return done


def in_place(pipe):
    before, sys.stdin = sys.stdin, pipe
    try:
        yield
    finally:
        sys.stdin = before


def library(folder, samples, **options):
    options = {"beam_width": 4, "with_timings": True} | options
    return load(folder / "live")(samples, **options)


# --- A pipe -------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [7, 1000, 100_000])
@pytest.mark.parametrize("form", ["raw", "wav"])
def test_one_utterance_is_what_the_library_gives(folder, monkeypatch, form, piece):
    content = SAMPLES.tobytes() if form == "raw" else wav_bytes(SAMPLES, subtype="PCM_16")
    off = ("--silence-after-speech", "none")
    done = listened(content, *off, folder=folder, piece=piece, monkeypatch=monkeypatch)
    expected = library(folder, SAMPLES)
    assert len(expected.symbols) > 5
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def test_utterances_follow_each_other_in_time(folder, monkeypatch):
    options = ("--length", 0.8, "--format", "json", "--beam-width", 6)
    content = SAMPLES.tobytes()
    done = listened(content, *options, folder=folder, monkeypatch=monkeypatch)
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    finals = [message for message in messages if message["type"] == "final"]
    assert len(finals) >= 4
    stable, begun = {0.0: []}, 0.0  # the phones that were told of each utterance
    for message in messages:
        if message["type"] == "final":
            begun = message["end"]
            stable[begun] = []
        else:
            stable[begun] += [phone["symbol"] for phone in message["stable"]]
    ends = [0.0] + [final["end"] for final in finals]
    assert ends[:-1] == [final["start"] for final in finals]
    assert ends[-1] == pytest.approx(len(SAMPLES) / RATE)
    for final in finals:
        begun = final["start"]
        part = SAMPLES[round(begun * RATE) : round(final["end"] * RATE)]
        expected = library(folder, part, beam_width=6)
        assert final["text"] == str(expected)
        symbols = [phone["symbol"] for phone in final["phones"]]
        assert stable[begun] == symbols[: len(stable[begun])]
        for phone, wanted in zip(final["phones"], expected.phones(), strict=True):
            assert phone["symbol"] == wanted["symbol"]
            assert phone["confidence"] == wanted["confidence"]
            for name in ("start", "peak", "end"):
                # The first phone may start before its utterance, whose sound is cut there.
                assert phone[name] == pytest.approx(begun + wanted[name], abs=0.031)
    again = listened(content, *options, folder=folder, piece=64_000, monkeypatch=monkeypatch)
    assert again.stdout == done.stdout  # however the sound is cut


def test_partial_results_grow_into_the_final_one(folder, monkeypatch):
    options = ("--format", "json", "--silence-after-speech", "none")
    done = listened(SAMPLES.tobytes(), *options, folder=folder, monkeypatch=monkeypatch)
    *partials, final = [json.loads(line) for line in done.stdout.splitlines()]
    symbols = [phone["symbol"] for phone in final["phones"]]
    stable, told = [], {}
    for partial in partials:
        assert partial != told | {"stable": []}  # it says something new
        told = partial
        stable += [phone["symbol"] for phone in partial["stable"]]
        assert stable == symbols[: len(stable)]
        assert set(partial) == {"type", "stable", "unstable", "endpoint"}
        for phone in partial["stable"] + partial["unstable"]:
            assert set(phone) == {"symbol", "peak", "confidence"}
            assert phone["confidence"] == round(phone["confidence"], 4)
            assert phone["peak"] == round(phone["peak"], 3)
    assert len(stable) > 3 and any(partial["unstable"] for partial in partials)
    assert not all(partial["stable"] for partial in partials)


@pytest.mark.slow
def test_each_utterance_is_printed_when_it_ends_and_ctrl_c_prints_the_rest(folder):
    arguments = ("listen", "-", "--model", "live", "--length", 0.8)
    process = started(*arguments, folder=folder, text=False)
    process.stdin.write(SAMPLES.tobytes())
    process.stdin.flush()
    lines = [process.stdout.readline() for _ in range(3)]  # although more sound may come
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.decode()) == (130, "transduce: stopped\n")
    assert all(lines) and len(rest.splitlines()) == 1


def test_silence_has_no_line(folder, monkeypatch):
    quiet = bytes(2 * RATE)
    bias = ("--null-bias", 50)
    for form in ("txt", "json"):
        done = listened(quiet, *bias, "--format", form, folder=folder, monkeypatch=monkeypatch)
        assert (done.returncode, done.stdout) == (0, "")
        [warning] = done.stderr.splitlines()
        assert warning.startswith("transduce: no phones were recognised; check the sound")


@pytest.mark.parametrize(
    "content, options, said",
    [
        (b"", (), "the input has no sound"),
        (b"\1", (), "the sound ends within a sample"),
        (wav_bytes(SAMPLES, 8000, "PCM_16"), (), "the WAV has 8000 samples a second"),
        (b"fLaC" + bytes(99), (), "the format FLAC, not raw samples or WAV"),
        (bytes(99), ("--sample-rate", 8000), "a stream takes 16000 samples a second, not 8000"),
        (bytes(99), ("--length", -1), "length must be a positive number of seconds"),
        (bytes(99), ("--beam-width", 0), "--beam-width must be at least 1"),
        (bytes(99), ("--model", "whole"), "the model is bidirectional and needs the whole input"),
        (bytes(99), ("--model", "letters"), "letters does not take sound"),
        (bytes(99), ("--model", "none"), "there is no file, folder or model 'none'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_input_is_one_sentence(folder, monkeypatch, content, options, said):
    done = listened(content, *options, folder=folder, monkeypatch=monkeypatch)
    assert done.returncode == (2 if "--beam-width" in said else 1) and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_came_before_a_cut_is_printed(folder, monkeypatch):
    content = SAMPLES.tobytes() + b"\0"
    off = ("--silence-after-speech", "none")
    done = listened(content, *off, folder=folder, monkeypatch=monkeypatch)
    assert done.returncode == 1 and "ends within a sample" in done.stderr
    assert done.stdout == f"{library(folder, SAMPLES)}\n"


def test_a_terminal_or_a_file_is_no_sound(folder, monkeypatch):
    ours, terminal = pty.openpty()
    monkeypatch.setattr(
        "commands.replaced_input",
        lambda _: contextmanager(in_place)(SimpleNamespace(fileno=lambda: terminal)),
    )
    done = run_command("listen", "-", folder=folder)
    assert done.returncode == 1 and "standard input is a terminal; pipe sound" in done.stderr
    os.close(ours)
    os.close(terminal)
    done = run_command("listen", "speech.wav", folder=folder)
    assert done.returncode == 1 and "`transduce recognize` takes files" in done.stderr


# --- A terminal ---------------------------------------------------------------------------------


def phones(*symbols):
    return [{"symbol": symbol} for symbol in symbols]


def screen(output, width):
    """Return the lines of a terminal that has got some output, without colours."""
    lines, row, column = [[]], 0, 0
    for code, number, letter in re.findall(r"\x1b\[([\d;]*)([A-Za-z])|(.|\n)", output):
        if number == "K":
            del lines[row][column:]
        elif number == "G":
            column = int(code) - 1
        elif letter == "\n":
            lines.append([])
            row, column = row + 1, 0
        elif letter:
            lines[row][column:] = [letter]
            column += 1
            assert column <= width
    return ["".join(line).rstrip() for line in lines]


def test_stable_phones_stay_and_unstable_ones_are_replaced():
    file, width = StringIO(), 12
    console = Console(file=file, force_terminal=True, width=width, highlight=False)
    terminal = _Terminal(console, " ")
    shown = []
    for stable, unstable in ((["AA"], ["B", "CC"]), (["B"], ["D"]), ([], []), (["EE", "F"], "GHI")):
        terminal.partial({"stable": phones(*stable), "unstable": phones(*unstable)})
        shown.append(screen(file.getvalue(), width))
    assert shown[0] == ["AA B CC"]
    assert shown[1] == ["AA B D"]
    assert shown[2] == ["AA B"]
    assert shown[3] == ["AA B EE F …"]  # where there is no room
    assert re.search(r"\x1b\[2mB CC", file.getvalue())  # dimmed
    terminal.final(SimpleNamespace(symbols=["AA", "B", "EE", "F", "G", "K"]), 0.0)
    assert screen(file.getvalue(), width) == ["AA B EE F G", "K", ""]
    terminal.partial({"stable": phones("Z"), "unstable": []})
    assert screen(file.getvalue(), width)[-1] == "Z"
    terminal.partial({"stable": [], "unstable": phones(*"ABCDEFGH")})
    assert screen(file.getvalue(), width)[-1] == "Z … E F G H"  # the latest are seen


@pytest.mark.slow
def test_a_terminal_gets_partial_results(folder):
    ours, terminal = pty.openpty()
    with open(terminal, "w") as output:
        arguments = ("listen", "-", "--model", "live", "--silence-after-speech", "none")
        process = started(*arguments, folder=folder, text=False, stdout=output)
        process.communicate(SAMPLES.tobytes(), timeout=60)
    shown = os.read(ours, 1 << 20).decode().replace("\r\n", "\n")
    os.close(ours)
    assert process.returncode == 0 and "\x1b[2m" in shown
    text = " ".join(screen(shown, 80)).strip()
    assert text == str(library(folder, SAMPLES))


# --- Sound that waits ---------------------------------------------------------------------------


def test_a_full_buffer_holds_back_a_pipe(monkeypatch):
    monkeypatch.setattr(live, "MOST_BYTES", 8)
    parts = [bytes([i]) * 4 for i in range(9)]
    left = list(parts)
    sound = read_ahead(lambda _: left.pop(0) if left else b"", "the pipe")
    time.sleep(0.3)
    assert len(left) >= 6  # two wait, and the thread has a third
    taken = []
    while (content := sound.take()) is not None:
        taken.append(content)
    assert taken == parts  # nothing is lost


def test_sound_that_waits_is_told_unless_it_is_a_file(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock.now)
    heard = LiveSound()
    assert heard.lag(RATE) == 0.0
    for _ in range(5):
        heard.put(bytes(2 * RATE))
        clock.now += 1
    assert heard.lag(RATE) == 5.0 and not heard.is_file(RATE)
    heard.take()
    assert heard.lag(RATE) == 4.0
    for _ in range(9):
        heard.put(bytes(2 * RATE))
    assert heard.lag(RATE) == 0.0 and heard.is_file(RATE)


def test_a_lag_is_told_each_time_that_it_doubles(folder, capsys):
    stream = load(folder / "live").stream()
    listener = _Listener(stream, RATE, _Lines())
    sound = SimpleNamespace(num_lost=0, lag=lambda _: sound.seconds)
    for sound.seconds in (0.5, 1.9, 2.0, 3.0, 4.0, 5.0, 9.0):
        listener._tell_lag(sound)
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["2", "4", "9"]
    assert said[0].endswith("this machine is too slow; a smaller --beam-width is faster")


def test_a_pipe_that_fails_is_one_sentence():
    def failing(_):
        raise OSError(5, "Input/output error")

    sound = read_ahead(failing, "standard input")
    with pytest.raises(ValueError, match=r"standard input cannot be read \(Input/output error\)"):
        sound.take()


def test_what_has_come_before_a_stop_is_kept():
    sound = LiveSound()
    sound.put(b"ab")
    sound.stop()
    sound.put(b"cd")
    assert (sound.take(), sound.take()) == (b"ab", None)


# --- The microphone -----------------------------------------------------------------------------


class FakeDevice:
    """Stands for the package sounddevice: a microphone that gives SAMPLES."""

    class PortAudioError(Exception):
        pass

    def __init__(self, fault=None):
        self.fault, self.is_open = fault, False

    def RawInputStream(self, *, samplerate, channels, dtype, callback, finished_callback):
        assert (samplerate, channels, dtype) == (RATE, 1, "int16")
        if self.fault == "missing":
            raise self.PortAudioError("Error querying device -1")
        self.callback, self.finished = callback, finished_callback
        return self

    def start(self):
        self.is_open = True
        status = SimpleNamespace(input_overflow=self.fault == "overflow")
        for start in range(0, len(SAMPLES), 512):
            piece = SAMPLES[start : start + 512].tobytes()
            self.callback(memoryview(piece), len(piece) // 2, None, status)
        if self.fault == "unplugged":
            self.finished()
        else:
            threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()

    def close(self):
        self.is_open = False


def test_the_microphone_is_heard_until_ctrl_c(folder, monkeypatch):
    device = FakeDevice("overflow")
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    off = ("--silence-after-speech", "none")
    done = run_command("listen", "--model", "live", *off, folder=folder)
    assert done.returncode == 130 and not device.is_open
    assert done.stdout == f"{library(folder, SAMPLES)}\n"
    lost, stopped = done.stderr.splitlines()
    assert "seconds of sound or more were lost" in lost and stopped == "transduce: stopped"


@pytest.mark.parametrize(
    "fault, said",
    [
        ("missing", "no microphone that records 16000 samples a second (Error querying device -1)"),
        ("unplugged", "the microphone has ended; connect it again"),
    ],
)
def test_a_microphone_that_fails_is_one_sentence(folder, monkeypatch, fault, said):
    monkeypatch.setitem(sys.modules, "sounddevice", FakeDevice(fault))
    done = run_command("listen", "--model", "live", folder=folder)
    assert done.returncode == 1 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_package_or_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with (
        pytest.raises(ValueError, match=r'pip install "transduce\[microphone\]"'),
        microphone(RATE),
    ):
        pass

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "sounddevice":
                raise OSError("PortAudio library not found")

    monkeypatch.delitem(sys.modules, "sounddevice")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ValueError, match="needs PortAudio; install it"), microphone(RATE):
        pass
