"""The command that transcribes sound while it comes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from cyclopts import Parameter
from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from transduce.audio.live import LiveSound, microphone, read_ahead
from transduce.audio.pcm import SAMPLE_BYTES, PcmOrWav
from transduce.cli.runs import load_runs
from transduce.cli.search import SearchFlags
from transduce.cli.terminal import user_errors
from transduce.model.stream import Endpoints, Stream
from transduce.model.transcripts import Transcript
from transduce.model.utterances import Message, Utterances

Source = Annotated[str | None, Parameter(allow_leading_hyphen=True)]  # "-" is standard input
Form = Annotated[Literal["txt", "json"], Parameter(name="--format")]
DEFAULTS = Endpoints()
# Seconds of sound that are searched at once, so that utterances end at the same time whatever the
# pieces in which sound comes: a lower latency against more work.
PIECE_SECONDS = 0.1
FIRST_LAG = 2.0  # seconds of sound that wait when the lag is told first


def listen(
    source: Source = None,
    /,
    *,
    model: str = "english-phone-streamer",
    beam_width: int = 4,
    search: SearchFlags | None = None,
    form: Form = "txt",
    sample_rate: int | None = None,
    silence_after_speech: float | None = DEFAULTS.silence_after_speech,
    silence_alone: float | None = DEFAULTS.silence_alone,
    length: float | None = DEFAULTS.length,
) -> None:
    """Print the phones of live sound while it comes, from a pipe or the microphone.

    Example: arecord -f S16_LE -r 16000 | transduce listen -

    On a terminal, phones are printed as soon as they cannot change any more; dimmed ones after them
    may still change. In a pipe, there is a line for each utterance when it ends. At the end of the
    input, and after Ctrl-C, the command prints what is left. The microphone needs a package:
    pip install "transduce[microphone]".

    Parameters
    ----------
    source
        Standard input if it is -: samples of 16 bits, one channel, at the model's rate, raw or as
        WAV. Without it, the command listens to the microphone.
    model
        The name of a model that ships, or a run of a model of sound that can stream: a transducer
        with network.bidirectional = false.
    beam_width
        The number of hypotheses to keep after every frame.
    search
        Further options of the search.
    form
        The format: plain text, or a JSON object on a line for each partial and final result.
    sample_rate
        The samples a second of raw input, to be checked; a WAV says its own.
    silence_after_speech
        The seconds without a phone that end an utterance; "none" turns a rule off.
    silence_alone
        The seconds without a first phone after which an utterance begins anew.
    length
        The seconds after which an utterance ends, whatever it has.
    """
    with user_errors():
        if source not in (None, "-"):
            raise ValueError(
                f"listen takes - for standard input, or nothing for the microphone, not {source}; "
                "`transduce recognize` takes files"
            )
        # Sound that comes while the model is loaded waits.
        piped = None if source is None else read_ahead(_standard_input(), "standard input")
        recogniser = load_runs([Path(model)], "cpu")
        features = recogniser.signature.features
        if features is None:
            raise ValueError(f"{model} does not take sound; give a model that does")
        options = (search or SearchFlags()).options(
            recogniser.signature, beam_width, with_timings=True
        )
        endpoints = Endpoints(silence_after_speech, silence_alone, length)
        stream = recogniser.stream(endpoints=endpoints, sample_rate=sample_rate, **vars(options))
        _warm_up(stream, features.sample_rate)
        listener = _Listener(
            stream, features.sample_rate, _printer(form, recogniser.signature.separator)
        )
        with microphone(features.sample_rate) if piped is None else nullcontext(piped) as sound:
            if source is None and sys.stderr.isatty():
                print("transduce: listening; press Ctrl-C to stop", file=sys.stderr)
            with _stopped_by_ctrl_c(sound):
                listener.listen(sound)
        if sound.is_stopped:
            raise KeyboardInterrupt


def _standard_input() -> partial[bytes]:
    """Return a function that reads bytes of standard input as soon as there are some."""
    try:
        file = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise ValueError("standard input is closed; pipe sound into it") from None
    if os.isatty(file):
        raise ValueError(
            "standard input is a terminal; pipe sound into it, as "
            "`arecord -f S16_LE -r 16000 | transduce listen -` does"
        )
    return partial(os.read, file)


def _warm_up(stream: Stream, sample_rate: int) -> None:
    """Load or compile what a stream needs, before sound must wait for it."""
    stream.advance(np.zeros(sample_rate, np.int16))
    stream.finish()
    stream.reset()


@contextmanager
def _stopped_by_ctrl_c(sound: LiveSound) -> Iterator[None]:
    """Let the first Ctrl-C end the sound; the second raises KeyboardInterrupt, as always.

    An exception in the middle of a search would lose its results.
    """
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        sound.stop()

    if before is not signal.default_int_handler:  # a process in the background may ignore it
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Printer(Protocol):
    """Prints the results of one utterance after the other."""

    def partial(self, message: Message) -> None:
        """Print what is new in a partial result."""

    def final(self, transcript: Transcript, begun: float) -> None:
        """Print the result of an utterance that began so many seconds after the first sample."""


class _Listener:
    """The utterances of live sound, each printed as it comes."""

    def __init__(self, stream: Stream, sample_rate: int, printer: _Printer) -> None:
        self.utterances, self.printer = Utterances(stream), printer
        self.sample_rate = sample_rate
        self.pcm = PcmOrWav(sample_rate)
        self.samples = np.empty(0, np.int16)  # fewer than a piece
        self.has_phones = False  # whether any were told of this utterance
        self.next_lag, self.num_lost, self.any_sound = FIRST_LAG, 0, False
        self.any_phones = False  # in all utterances

    def listen(self, sound: LiveSound) -> None:
        """Transcribe sound to its end, and print what is left."""
        size = round(PIECE_SECONDS * self.sample_rate)
        # Sound that came while the model was loaded does not mean that the search is slow.
        self.next_lag += sound.lag(self.sample_rate)
        try:
            while (content := sound.take()) is not None:
                if sound.is_stopped and sound.is_file(self.sample_rate):
                    break
                samples = np.concatenate([self.samples, self.pcm.accept(content)])
                whole = len(samples) // size * size
                for start in range(0, whole, size):
                    self._accept(samples[start : start + size])
                    self._tell_lag(sound)
                self.samples = samples[whole:]
        finally:
            if len(self.samples):
                self._accept(self.samples)
            self._finish()
        if sound.is_stopped:
            return
        self.pcm.finish()
        if not self.any_sound:
            raise ValueError("the input has no sound; pipe some into `transduce listen -`")
        if not self.any_phones:
            print(
                "transduce: no phones were recognised; check the sound, which must be 16-bit "
                f"samples of one channel, {self.sample_rate} a second",
                file=sys.stderr,
            )

    def _accept(self, samples: np.ndarray) -> None:
        """Search the next samples; end the utterance if a rule says so."""
        self.any_sound = True
        partial = self.utterances.stream.accept(samples)
        message = self.utterances.partial(partial)
        if message is not None:
            has_phones = bool(message["stable"] or message["unstable"])
            if has_phones or self.has_phones:
                self.printer.partial(message)
            self.has_phones = self.has_phones or has_phones
        if partial.is_endpoint:
            self._finish()

    def _finish(self) -> None:
        """End the utterance; print it if it has phones."""
        begun = self.utterances.begun
        transcript = self.utterances.finish()
        assert transcript.seconds is not None
        self.utterances.begun += transcript.seconds
        self.any_phones = self.any_phones or bool(transcript.symbols)
        if transcript.symbols or self.has_phones:
            self.printer.final(transcript.shifted(begun), begun)
        self.has_phones = False

    def _tell_lag(self, sound: LiveSound) -> None:
        """Say when results come late, each time the lag has doubled, and when sound is lost."""
        lag = sound.lag(self.sample_rate)
        if lag >= self.next_lag:
            self.next_lag = 2 * lag
            print(
                f"transduce: {lag:.0f} seconds of sound wait, because this machine is too slow; "
                "a smaller --beam-width is faster",
                file=sys.stderr,
            )
        if sound.num_lost > self.num_lost:
            first = self.num_lost == 0
            self.num_lost = sound.num_lost
            if first:
                seconds = self.num_lost / SAMPLE_BYTES / self.sample_rate
                print(
                    f"transduce: {seconds:.2g} seconds of sound or more were lost; "
                    "end other programs, or give a smaller --beam-width",
                    file=sys.stderr,
                )


def _printer(form: str, separator: str) -> _Printer:
    """Return the printer of a format, for a terminal or a pipe."""
    if form == "json":
        return _Json()
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return _Lines()
    return _Terminal(console, separator)


class _Lines:
    """A line for each utterance that has phones."""

    def partial(self, message: Message) -> None:
        """Wait for the end of the utterance."""

    def final(self, transcript: Transcript, begun: float) -> None:
        """Print the phones of an utterance."""
        if transcript.symbols:
            print(transcript.as_text(), flush=True)


class _Json:
    """A JSON object for each partial and final result."""

    def partial(self, message: Message) -> None:
        """Print a partial result."""
        self._print(message)

    def final(self, transcript: Transcript, begun: float) -> None:
        """Print a final result: the times of the utterance, its text, and its phones' times."""
        times = {"start": round(begun, 3), "end": round(transcript.seconds or 0.0, 3)}
        text = transcript.as_text()
        self._print({"type": "final", **times, "text": text, "phones": transcript.phones()})

    def _print(self, message: dict[str, Any]) -> None:
        print(json.dumps(message, ensure_ascii=False), flush=True)


class _Terminal:
    """Stable phones are printed and stay; unstable ones follow them, dimmed, on the same line."""

    def __init__(self, console: Console, separator: str) -> None:
        self.console, self.separator = console, separator
        self.column = self.num_printed = 0

    def partial(self, message: Message) -> None:
        """Print new stable phones, and replace the unstable ones."""
        self._erase()
        for phone in message["stable"]:
            self._print(phone["symbol"])
        unstable = [phone["symbol"] for phone in message["unstable"]]
        text = Text(self._latest(unstable), style="dim")
        self.console.print(text, end="", soft_wrap=True)
        self.console.control(Control.move_to_column(self.column))

    def final(self, transcript: Transcript, begun: float) -> None:
        """Print the rest of the phones, and end the line."""
        self._erase()
        for symbol in transcript.symbols[self.num_printed :]:
            self._print(symbol)
        if self.num_printed:
            self.console.print()
        self.column = self.num_printed = 0

    def _latest(self, symbols: list[str]) -> str:
        """Return the last phones that fit into the rest of the line, with dots for those before."""
        room = self.console.width - self.column - 1
        if cell_len(self.separator.join(symbols)) <= room:
            return self.separator.join(symbols)
        shown = ""
        for symbol in reversed(symbols):
            if cell_len(longer := self.separator + symbol + shown) > room - 1:
                break
            shown = longer
        return ("…" + shown)[: max(0, room)]

    def _erase(self) -> None:
        """Erase the unstable phones, which are behind the cursor."""
        self.console.control(Control((ControlType.ERASE_IN_LINE, 0)))

    def _print(self, symbol: str) -> None:
        """Print a phone that stays; begin a new line where it does not fit."""
        text = symbol + self.separator
        size = cell_len(text)
        if self.column and self.column + size > self.console.width:
            self.console.print()
            self.column = 0
        self.console.print(Text(text), end="", soft_wrap=True)
        self.column += size
        self.num_printed += 1
