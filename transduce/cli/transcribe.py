"""The commands that transcribe sound, frames or text."""

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
    """Transcribe sound, frames or lines of text with a network or an ensemble.

    Example: echo transducer | transduce transcribe runs/letters-transducer --n-best 3

    Parameters
    ----------
    run
        The folder of a run, its model.safetensors, or the name of a model that ships. More runs
        after it make an ensemble.
    files
        Sound files, .npy files of frames, manifests (.jsonl), or text files. Without files, the
        command reads lines of text from standard input.
    beam_width
        The number of hypotheses to keep after every frame. 1 is the greedy search, unless
        --n-best is more than 1 or timings are needed.
    n_best
        The number of outputs to print for each input, with their probabilities.
    search
        Further options of the search.
    timestamps
        Print a line for each label: its start, peak and end, in seconds if the input is sound, and
        its confidence.
    form
        The format: plain text, a line of JSON for each input, or a Praat TextGrid.
    output
        A folder for the results, one file for each input, instead of printing them.
    device
        The device to compute on.
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
        interactive = not inputs and sys.stdin.isatty()
        pairs: Iterable[Pair] = read_inputs(model.signature, inputs)
        total = None
        if inputs:  # check all of them before the first result
            pairs = list(pairs)
            total = len(pairs)
        write = _Writer(form, timestamps, output)
        report = _UnknownSymbols(model)
        results = model.transcripts(
            report.count_in(pairs),
            options,
            unknown="null",
            at_once=1 if interactive else MOST_INPUTS,
        )
        title = "inputs" if total is None else f"{total} inputs"
        printing = interactive or output is None
        with progress_bar(title, total, while_printing=printing) as advance:
            for result in results:
                write(result)
                advance(1)
        report.print()


def phonemize(
    *words: str,
    model: str = "english-pronouncer",
    beam_width: int = 1,
    n_best: int = 1,
    search: SearchFlags | None = None,
) -> None:
    """Print the pronunciations of words.

    Example: echo transducer | transduce phonemize --n-best 3

    The command prints a line for each word. If the model does not know a letter of the word, that
    line is blank, a message goes to standard error, and the exit code is 1.

    Parameters
    ----------
    words
        The words to pronounce. Without words, the command reads them from standard input, one on
        each line.
    model
        The name of a model that ships, or a run that reads text.
    beam_width
        The number of hypotheses to keep after every letter. 1 is the greedy search, unless
        --n-best is more than 1.
    n_best
        The number of pronunciations to print for each word. If it is more than 1, each is on a line
        of its own: word, probability, phonemes.
    search
        Further options of the search.
    """
    any_failed = False
    with user_errors():
        pronouncer = load(model)
        if pronouncer.signature.sources is None:
            raise ValueError(f"{model} does not read text; give a model that does")
        options = (search or SearchFlags()).options(pronouncer.signature, beam_width, n_best)
        at_once = 1 if not words and sys.stdin.isatty() else MOST_INPUTS
        lines = (line.strip() for line in words or sys.stdin)
        results = pronouncer.transcribe(lines, options, at_once=at_once)
        for number, result in enumerate(results, 1):
            if isinstance(result, DataError) and not isinstance(result, EmptyInput):
                where = "" if words else f"standard input, line {number}: "
                print(f"transduce: {where}{result}", file=sys.stderr)
                any_failed = True
            print(_pronunciations(result, n_best), flush=True)
    if any_failed:
        raise SystemExit(1)


def recognize(
    *sounds: Path,
    model: str = "english-phone-recogniser",
    beam_width: int = 10,
    search: SearchFlags | None = None,
    form: Form = "txt",
    output: Path | None = None,
) -> None:
    """Print the phones in speech and their times.

    Example: transduce recognize speech.wav --format textgrid --output .

    The command prints a line for each phone: its start, peak and end in seconds, and its
    confidence. In a TextGrid, the interval of a phone reaches from its peak to the next one. If
    there are several files, the name of each comes before its phones. If a file cannot be read, a
    message goes to standard error, and the exit code is 1.

    Parameters
    ----------
    sounds
        Sound files with any usual sample rate.
    model
        The name of a model that ships, or a run that takes sound.
    beam_width
        The number of hypotheses to keep after every frame.
    search
        Further options of the search.
    form
        The format: plain text, a line of JSON for each file, or a Praat TextGrid.
    output
        A folder for the results, one file for each sound, instead of printing them.
    """
    any_failed = False
    with user_errors():
        if not sounds:
            raise ValueError("there is nothing to recognize; give sound files")
        recogniser = load(model)
        if recogniser.signature.features is None:
            raise ValueError(f"{model} does not take sound; give a model that does")
        options = (search or SearchFlags()).options(
            recogniser.signature, beam_width, with_timings=True
        )
        write = _Writer(form, True, output, named=len(sounds) > 1)
        title, printing = f"{len(sounds)} files", output is None
        with progress_bar(title, len(sounds), while_printing=printing) as advance:
            for result in recogniser.transcribe(sounds, options, at_once=1):
                if isinstance(result, DataError):
                    print(f"transduce: {result}", file=sys.stderr)
                    any_failed = True
                else:
                    write(result)
                advance(1)
    if any_failed:
        raise SystemExit(1)


def _pronunciations(result: Transcript | DataError, n_best: int) -> str:
    """Return the lines to print for a word; an empty one if it could not be pronounced."""
    if isinstance(result, DataError):
        return ""
    if n_best == 1:
        return str(result)
    return "\n".join(
        f"{result.name}\t{math.exp(hypothesis.log_prob):.4f}\t{result.output(hypothesis)}"
        for hypothesis in result.hypotheses
    )


class _UnknownSymbols:
    """A count of the source symbols that a model does not know, and the first of them."""

    def __init__(self, model: Model) -> None:
        self.signature, self.count, self.first = model.signature, 0, ""

    def count_in(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Count the unknown symbols of each pair, and yield the pair."""
        for pair in pairs:
            for symbol in self.signature.unknown_symbols(pair):
                self.first = self.first or f"{pair.origin}: {symbol!r}"
                self.count += 1
            yield pair

    def print(self) -> None:
        """Print one sentence on standard error if there were unknown symbols."""
        if self.count:
            more = f", as do {self.count - 1} more in all" if self.count > 1 else ""
            print(
                f"transduce: {self.first} was not in the training data and counts as nothing{more};"
                " do not rely on the outputs for such inputs",
                file=sys.stderr,
            )


class _Writer:
    """A writer of transcripts: it prints them, or writes each to a file of its own."""

    def __init__(
        self,
        form: str,
        timestamps: bool,
        output: Path | None,
        named: bool = False,  # print the name of the input before its text
    ) -> None:
        self.form, self.timestamps, self.output, self.named = form, timestamps, output, named
        self.names: Counter[str] = Counter()

    def __call__(self, result: Transcript) -> None:
        """Print a transcript at once, or write its file, whole or not at all."""
        if self.output is None:
            named = self.named and self.form == "txt"
            text = self._text(result)
            print(f"{result.name}\n{text}" if named else text, flush=True)
            return
        name = result.name.replace(os.sep, "-")
        self.names[name] += 1
        if self.names[name] > 1:  # an earlier input has the same name
            name = f"{name}-{self.names[name]}"
        suffix = {"txt": ".txt", "json": ".json", "textgrid": ".TextGrid"}[self.form]
        write_by_rename(self.output / (name + suffix), (self._text(result) + "\n").encode())

    def _text(self, result: Transcript) -> str:
        if self.form == "json":
            return json_lines([result])
        return result.as_textgrid() if self.form == "textgrid" else result.as_text(self.timestamps)
