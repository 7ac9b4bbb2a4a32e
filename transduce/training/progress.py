"""The progress of a run: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 30.0  # without a terminal: news against length of the log
SECONDS_BEFORE_NOTE = 3.0  # a first step or validation that takes longer compiles its kernels


class Progress:
    """The display of a run on a console; `Progress(Console(quiet=True))` shows nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.bar: Bar | None = None
        self.task = TaskID(0)
        self.last_line = self.start = time.monotonic()
        self.first_end: float | None = None  # when the first step of this epoch ended
        self.epoch = self.num_steps = self.steps = self.first_step = self.sequences = 0
        self.error_rate: float | None = None
        self.noted: set[str] = set()
        self.note: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal and not self.console.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=self.console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task("")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._cancel_note()
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start_epoch(self, epoch: int, num_steps: int, done: int) -> None:
        """Begin an epoch, or resume it after `done` of its steps."""
        self.epoch, self.num_steps, self.steps, self.sequences = epoch, num_steps, done, 0
        self.last_line = self.start = time.monotonic()
        self.first_end, self.first_step = None, done + 1
        if self.bar is not None:
            self.bar.reset(self.task, total=num_steps, completed=done)
        self._note_if_slow("step")

    def step(self, num_sequences: int, bits_per_label: float) -> None:
        """Count a step; `bits_per_label` is the mean of the epoch so far."""
        self._cancel_note()
        self.steps += 1
        self.sequences += num_sequences
        now = time.monotonic()
        if self.first_end is None:
            self.first_end = now
        rate = self.sequences / max(now - self.start, 1e-9)
        if self.bar is not None:
            text = self._line(bits_per_label, rate)
            self.bar.update(self.task, advance=1, description=text)
        elif now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            text = self._line(bits_per_label, rate)
            left = self._time_left(now - self.first_end)
            self.say(f"{text}, step {self.steps} of {self.num_steps}{left}")
        if self.steps == self.num_steps:
            self._note_if_slow("validation")

    def end_epoch(
        self,
        training_bits: float,
        seconds: float,
        bits: float | None = None,
        error_rate: float | None = None,
        best: bool = False,
    ) -> None:
        """Print the results of an epoch, with those of its validation if there are `bits`."""
        self._cancel_note()
        if bits is not None:
            self.error_rate = error_rate
        valid = "" if bits is None else f", {bits:.3f} in validation"
        error = "" if error_rate is None else f", error rate {100 * error_rate:.2f} %"
        self.say(
            f"epoch {self.epoch}: {training_bits:.3f} bits per label in training{valid}{error}, "
            f"{self.sequences / max(seconds, 1e-9):.0f} sequences per second"
            f"{', the best so far' if best else ''}"
        )

    def _time_left(self, seconds: float) -> str:
        """Return the time left in the epoch if the steps after the first took so many seconds.

        The first step may compile kernels, so it does not count, as in the bar.
        """
        counted = self.steps - self.first_step
        if counted == 0:
            return ""
        return f", {seconds * (self.num_steps - self.steps) / counted:.0f} s left"

    def _note_if_slow(self, what: str) -> None:
        """Say that the first step, or validation, compiles kernels, unless it ends at once."""
        if what not in self.noted:
            self.noted.add(what)
            self.note = threading.Timer(SECONDS_BEFORE_NOTE, self._show_note, [what])
            self.note.daemon = True
            self.note.start()

    def _show_note(self, what: str) -> None:
        text = f"the first {what} may compile kernels for this machine: about a minute, once"
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        else:
            self.say(text)

    def _cancel_note(self) -> None:
        if self.note is not None:
            self.note.cancel()

    def _line(self, bits: float, rate: float) -> str:
        """Return the text of the bar, or of a line within an epoch."""
        error = "" if self.error_rate is None else f", error rate {100 * self.error_rate:.2f} %"
        return f"epoch {self.epoch}: {bits:.3f} bits per label{error}, {rate:.0f} sequences/s"
