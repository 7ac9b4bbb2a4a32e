"""Networks at work: what they make of sound, frames or text."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transduce.checkpoint import write_by_rename
from transduce.cli.runs import Device, load_runs, runs_and_files
from transduce.cli.terminal import sentences, working
from transduce.data.pairs import DataError
from transduce.inputs import read_inputs
from transduce.pretrained import AT_ONCE, load
from transduce.recognition import recognise, transcript
from transduce.transcripts import Transcript, json_lines

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
        width = max(beam_width, n_best)
        timed = form == "textgrid" or (form == "json" and model.config.network == "transducer")
        with working(f"{len(examples)} inputs", len(examples)) as done:
            found = recognise(
                model, examples, beam_width=width, n_best=n_best,
                with_timings=timestamps or timed, done=done,
            )  # fmt: skip
        transcripts = [
            transcript(model, example, best) for example, best in zip(examples, found, strict=True)
        ]
        _write(transcripts, form, timestamps, output)


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
        pronouncer = load(model)
        if pronouncer.trained.signature.sources is None:
            raise ValueError(f"{model} does not read text; give a model that does")
        at_once = 1 if not words and sys.stdin.isatty() else AT_ONCE
        found = pronouncer.each(
            words or sys.stdin, beam_width=beam_width, n_best=n_best, at_once=at_once
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

    A line for each phone: start, peak and end in seconds, and how sure it is. Of several files,
    each is named before its phones.

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
        with working(f"{len(sounds)} files", len(sounds)) as done:
            found = []
            for sound in sounds:
                found.append(recogniser(sound, beam_width=beam_width, with_timings=True))
                done(1)
        _write(found, form, True, output, named=len(sounds) > 1)


def _pronunciations(found: Transcript | DataError | None, n_best: int) -> str:
    if not isinstance(found, Transcript):
        return ""
    if n_best == 1:
        return str(found)
    return "\n".join(
        f"{found.name}\t{math.exp(one.log_prob):.4f}\t{found.output(one)}"
        for one in found.hypotheses
    )


def _write(
    transcripts: Sequence[Transcript],
    form: str,
    timestamps: bool,
    output: Path | None,
    named: bool = False,  # a line with its name before each text that is printed
) -> None:
    """Print them, or write each into a file of its own, whole or not at all."""

    def text(one: Transcript) -> str:
        if form == "json":
            return json_lines([one])
        return one.as_textgrid() if form == "textgrid" else one.as_text(timestamps)

    if output is None:
        for one in transcripts:
            print(f"{one.name}\n{text(one)}" if named and form == "txt" else text(one))
        return
    suffix = {"txt": ".txt", "json": ".json", "textgrid": ".TextGrid"}[form]
    for one in transcripts:
        path = output / (one.name.replace(os.sep, "-") + suffix)
        write_by_rename(path, (text(one) + "\n").encode())
