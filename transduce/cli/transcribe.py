"""The commands that transcribe: sound, frames or text to labels."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transduce.cli.runs import Device, load_runs, runs_and_files
from transduce.cli.search import SearchFlags
from transduce.cli.terminal import progress_bar, user_errors
from transduce.data.pairs import DataError, Pair
from transduce.files import write_by_rename
from transduce.model.inputs import read_inputs
from transduce.model.model import MOST_INPUTS, Model, load
from transduce.model.signature import EmptyInput
from transduce.model.transcripts import Transcript, json_lines

Form = Annotated[Literal["txt", "json", "textgrid"], Parameter(name="--format")]


def transcribe(
    run: Path,
    /,
    *files: Path,
    beam_width: int = 1,
    n_best: int = 1,
    search: SearchFlags | None = None,
    timestamps: bool = False,
    form: Form = "txt",
    output: Path | None = None,
    device: Device = "auto",
) -> None:
    """Print the output of a network, or of an ensemble, for sound, frames or lines of text.

    Example: echo transducer | transduce transcribe runs/letters-transducer --n-best 3

    Parameters
    ----------
    run
        The folder of a run, its model.safetensors, or the name of a model that ships. More runs
        after it make an ensemble.
    files
        Sound files, .npy files of frames, manifests (.jsonl), or text files; without any, lines of
        text are read from standard input.
    beam_width
        Hypotheses kept after every frame; 1 is the greedy search, unless N-best or timings are
        asked for.
    n_best
        How many outputs to print for each input, with their probabilities.
    search
        Further options of the search.
    timestamps
        Print a line for each label: start, peak and end in seconds, and its confidence.
    form
        Text, a line of JSON for each input, or TextGrids, which Praat opens.
    output
        A folder to write a file into for each input, instead of printing.
    device
        Where to compute.
    """
    with user_errors():
        runs, inputs = runs_and_files(run, files)
        model = load_runs(runs, device)
        if not model.network.reads_input:
            raise ValueError(f"{run} is a prediction network, which has no input to transcribe")
        timed = form == "textgrid" or (form == "json" and model.network.has_timings)
        options = (search or SearchFlags()).options(
            model.signature, beam_width, n_best, with_timings=timestamps or timed
        )
        pairs = list(read_inputs(model.signature, inputs)) if inputs else None
        source = read_inputs(model.signature, inputs) if pairs is None else pairs
        write = _Writer(form, timestamps, output)
        report = _UnknownSymbols(model)
        total = None if pairs is None else len(pairs)
        with progress_bar(f"{total or ''} inputs", total) as done:
            for one in model.transcribe(report(source), options, unknown="null"):
                if isinstance(one, DataError):
                    raise one
                write(one)
                done(1)
        report.say()


def phonemize(
    *words: str,
    model: str = "english-pronouncer",
    beam_width: int = 1,
    n_best: int = 1,
    search: SearchFlags | None = None,
) -> None:
    """Print how words are pronounced.

    Example: echo transducer | transduce phonemize --n-best 3

    The command prints a line for each word, blank for one that has a letter which the model does
    not know; it says so on standard error, and the exit code is then 1.

    Parameters
    ----------
    words
        The words to pronounce; without any, words are read from standard input, one a line.
    model
        The name of a model that ships, or a run that reads text.
    beam_width
        Hypotheses kept after every letter; 1 is the greedy search, unless N-best are asked for.
    n_best
        How many pronunciations of each word, a line each: word, probability, phonemes.
    search
        Further options of the search.
    """
    wrong = False
    with user_errors():
        pronouncer = load(model)
        if pronouncer.signature.sources is None:
            raise ValueError(f"{model} does not read text; give a model that does")
        options = (search or SearchFlags()).options(pronouncer.signature, beam_width, n_best)
        at_once = 1 if not words and sys.stdin.isatty() else MOST_INPUTS
        lines = (line.strip() for line in words or sys.stdin)
        for number, one in enumerate(pronouncer.transcribe(lines, options, at_once=at_once), 1):
            if isinstance(one, DataError) and not isinstance(one, EmptyInput):
                where = "" if words else f"standard input, line {number}: "
                print(f"transduce: {where}{one}", file=sys.stderr)
                wrong = True
            print(_pronunciations(one, n_best), flush=True)
    if wrong:
        raise SystemExit(1)


def recognize(
    *sounds: Path,
    model: str = "english-phone-recogniser",
    beam_width: int = 10,
    search: SearchFlags | None = None,
    form: Form = "txt",
    output: Path | None = None,
) -> None:
    """Print the phones of speech, and when each was spoken.

    Example: transduce recognize speech.wav --format textgrid --output .

    The command prints a line for each phone: the start, peak and end in seconds between which the
    network emits it, and a confidence; a TextGrid's intervals reach from one peak to the next. Of
    several files, each is named before its phones. A file that cannot be read is named on standard
    error, and the exit code is then 1.

    Parameters
    ----------
    sounds
        Sound files, of any usual sample rate.
    model
        The name of a model that ships, or a run that takes sound.
    beam_width
        Hypotheses kept after every frame.
    search
        Further options of the search.
    form
        Text, a line of JSON for each file, or TextGrids, which Praat opens.
    output
        A folder to write a file into for each sound, instead of printing.
    """
    wrong = False
    with user_errors():
        if not sounds:
            raise ValueError("there is nothing to recognize; give sound files")
        recogniser = load(model)
        if recogniser.signature.features is None:
            raise ValueError(f"{model} does not hear sound; give a model that does")
        options = (search or SearchFlags()).options(
            recogniser.signature, beam_width, with_timings=True
        )
        write = _Writer(form, True, output, named=len(sounds) > 1)
        with progress_bar(f"{len(sounds)} files", len(sounds)) as done:
            for one in recogniser.transcribe(sounds, options, at_once=1):
                if isinstance(one, DataError):
                    print(f"transduce: {one}", file=sys.stderr)
                    wrong = True
                else:
                    write(one)
                done(1)
    if wrong:
        raise SystemExit(1)


def _pronunciations(found: Transcript | DataError, n_best: int) -> str:
    if not isinstance(found, Transcript):
        return ""
    if n_best == 1:
        return str(found)
    return "\n".join(
        f"{found.name}\t{math.exp(one.log_prob):.4f}\t{found.output(one)}"
        for one in found.hypotheses
    )


class _UnknownSymbols:
    """Counts the source symbols that a model does not know, and reports the first of them."""

    def __init__(self, model: Model) -> None:
        self.signature, self.count, self.first = model.signature, 0, ""

    def __call__(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Pass pairs on, and count."""
        for pair in pairs:
            for symbol in self.signature.unknown_symbols(pair):
                self.first = self.first or f"{pair.origin}: {symbol!r}"
                self.count += 1
            yield pair

    def say(self) -> None:
        """Print one sentence on standard error if there were any."""
        if self.count:
            more = f", as do {self.count - 1} more in all" if self.count > 1 else ""
            print(
                f"transduce: {self.first} was not in the training data and counts as nothing{more};"
                " output for them means little",
                file=sys.stderr,
            )


class _Writer:
    """Prints transcripts, or writes each into a file of its own, whole or not at all."""

    def __init__(
        self,
        form: str,
        timestamps: bool,
        output: Path | None,
        named: bool = False,  # print a line with the input's name before its text
    ) -> None:
        self.form, self.timestamps, self.output, self.named = form, timestamps, output, named
        self.names: Counter[str] = Counter()

    def __call__(self, one: Transcript) -> None:
        if self.output is None:
            named = self.named and self.form == "txt"
            print(f"{one.name}\n{self._text(one)}" if named else self._text(one))
            return
        name = one.name.replace(os.sep, "-")
        self.names[name] += 1
        if self.names[name] > 1:  # two inputs of one name
            name = f"{name}-{self.names[name]}"
        suffix = {"txt": ".txt", "json": ".json", "textgrid": ".TextGrid"}[self.form]
        write_by_rename(self.output / (name + suffix), (self._text(one) + "\n").encode())

    def _text(self, one: Transcript) -> str:
        if self.form == "json":
            return json_lines([one])
        return one.as_textgrid() if self.form == "textgrid" else one.as_text(self.timestamps)
