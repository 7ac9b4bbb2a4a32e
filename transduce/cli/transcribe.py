"""Networks at work: what they make of sound, frames or text."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transduce.cli.runs import Device, load_runs, runs_and_files
from transduce.cli.terminal import sentences, working
from transduce.data.pairs import DataError
from transduce.files import write_by_rename
from transduce.model.inputs import read_inputs
from transduce.model.model import AT_ONCE, load
from transduce.model.recognition import recognise, transcript
from transduce.model.transcripts import Transcript, json_lines

Form = Annotated[Literal["txt", "json", "textgrid"], Parameter(name="--format")]


def transcribe(
    run: Path,
    /,
    *files: Path,
    beam_width: int = 1,
    n_best: int = 1,
    timestamps: bool = False,
    form: Form = "txt",
    output: Path | None = None,
    device: Device = "auto",
) -> None:
    """Print what a network, or an ensemble, makes of sound, frames or lines of text.

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
        1 is the greedy search, unless there is more to find than one output.
    n_best
        How many outputs of each, with their probabilities.
    timestamps
        A line for each label: start, peak and end in seconds, and its confidence.
    form
        Text, a line of JSON for each input, or TextGrids, which Praat opens.
    output
        A folder to write a file into for each input, instead of printing.
    device
        Where to compute.
    """
    with sentences():
        runs, inputs = runs_and_files(run, files)
        model = load_runs(runs, device)
        if model.config.network == "prediction":
            raise ValueError(f"{run} is a prediction network, which has no input to transcribe")
        examples = read_inputs(model, inputs)
        width = _width(beam_width, n_best)
        timed = form == "textgrid" or (form == "json" and model.config.network == "transducer")
        with working(f"{len(examples)} inputs", len(examples)) as done:
            found = recognise(
                model, examples, beam_width=width, n_best=n_best,
                with_timings=timestamps or timed, done=done,
            )  # fmt: skip
        transcripts = [
            transcript(model, example, best) for example, best in zip(examples, found, strict=True)
        ]
        write = _Writer(form, timestamps, output)
        for one in transcripts:
            write(one)


def phonemize(
    *words: str, model: str = "english-pronouncer", beam_width: int = 1, n_best: int = 1
) -> None:
    """Print how words are pronounced.

    Example: echo transducer | transduce phonemize --n-best 3

    A line is printed for each word, blank for one that has a letter which the model does not know;
    that is said on standard error, and the exit code is then 1.

    Parameters
    ----------
    words
        What to pronounce; without any, words are read from standard input, one a line.
    model
        The name of a model that ships, or a run that reads text.
    beam_width
        1 is the greedy search, unless there is more to find than one output.
    n_best
        How many pronunciations of each, a line each: word, probability, phonemes.
    """
    with sentences():
        width = _width(beam_width, n_best)
        pronouncer = load(model)
        if pronouncer.trained.signature.sources is None:
            raise ValueError(f"{model} does not read text; give a model that does")
        at_once = 1 if not words and sys.stdin.isatty() else AT_ONCE
        found = pronouncer.each(
            words or sys.stdin, beam_width=width, n_best=n_best, at_once=at_once
        )
        wrong = False
        for number, one in enumerate(found, 1):
            if isinstance(one, DataError):
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
    form: Form = "txt",
    output: Path | None = None,
) -> None:
    """Print the phones of speech, and when each was spoken.

    Example: transduce recognize speech.wav --format textgrid --output .

    A line for each phone: start, peak and end in seconds, between which the network emits it, and
    how sure it is; a TextGrid's intervals reach from one peak to the next. Of several files, each
    is named before its phones. One that cannot be read is named on standard error, and the exit
    code is then 1.

    Parameters
    ----------
    sounds
        Sound files, of any usual sample rate.
    model
        The name of a model that ships, or a run that hears sound.
    beam_width
        How many outputs the search keeps.
    form
        Text, a line of JSON for each file, or TextGrids, which Praat opens.
    output
        A folder to write a file into for each sound, instead of printing.
    """
    with sentences():
        if not sounds:
            raise ValueError("there is nothing to recognize; give sound files")
        recogniser = load(model)
        if recogniser.trained.signature.features is None:
            raise ValueError(f"{model} does not hear sound; give a model that does")
        width, write = _width(beam_width), _Writer(form, True, output, named=len(sounds) > 1)
        wrong = False
        with working(f"{len(sounds)} files", len(sounds)) as done:
            for sound in sounds:
                try:
                    write(recogniser(sound, beam_width=width, with_timings=True))
                except DataError as error:
                    print(f"transduce: {error}", file=sys.stderr)
                    wrong = True
                done(1)
    if wrong:
        raise SystemExit(1)


def _width(beam_width: int, n_best: int = 1) -> int:
    """Of the search: wide enough for as many outputs as are wanted."""
    for name, number in (("--beam-width", beam_width), ("--n-best", n_best)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    return max(beam_width, n_best)


def _pronunciations(found: Transcript | DataError | None, n_best: int) -> str:
    if not isinstance(found, Transcript):
        return ""
    if n_best == 1:
        return str(found)
    return "\n".join(
        f"{found.name}\t{math.exp(one.log_prob):.4f}\t{found.output(one)}"
        for one in found.hypotheses
    )


class _Writer:
    """Prints transcripts, or writes each into a file of its own, whole or not at all."""

    def __init__(
        self,
        form: str,
        timestamps: bool,
        output: Path | None,
        named: bool = False,  # a line with its name before each text that is printed
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
