"""Answer the requests of the page: examples, inputs, outputs, lattices, searches, alignments.

Errors that the user can fix are ValueErrors of one sentence. The explorer keeps the latest few
inputs and lattices under random names. The networks compute one request at a time.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from transduce.alignment.align import Aligner, Task
from transduce.analysis.colours import DECADES, heat_colours
from transduce.analysis.lattice import LatticeView, transducer_of, view_lattice
from transduce.analysis.sensitivity import sensitivity
from transduce.audio.features import Features, FeatureSettings
from transduce.audio.sound import encode_wav, read_wave
from transduce.data.batches import Example
from transduce.data.pairs import Audio, DataError, Origin, Pair, Symbols
from transduce.decoding import Survivor, beam_search_steps
from transduce.decoding.options import SearchOptions
from transduce.http.sounds import decode_sound
from transduce.model.checkpoint import TrainedModel
from transduce.model.model import Model, load
from transduce.model.stream import can_stream
from transduce.web.recording import Recording
from transduce.web.wire import pack

MAX_BYTES = 20_000_000  # in a sound file
MAX_SECONDS = 60  # of sound
MAX_RECORDINGS = 4  # at once
MAX_SYMBOLS = 300  # in a typed text
MAX_LETTERS = 3000  # in a text to align: a minute of fast speech has half as many
MAX_FRAMES = 10_000  # in an input
MAX_CELLS = 3_000_000  # in a lattice, T x (U+1)
# In a target. More labels show longer targets, but the time and memory of a lattice grow with the
# square of their number: 1,000 take 0.1 s and 30 MB, 8,000 take 7 s and 2 GB.
MAX_LABELS = 1000
MAX_BEAM_WIDTH = 20  # of a search frame by frame
MAX_STEPS = 600  # frames of a search frame by frame
# In which one answer computes steps of a search. More seconds need fewer requests; fewer let the
# page show progress and stop sooner.
STEPS_SECONDS = 0.3
MAX_LISTED = 200  # examples in one response
MAX_NAMED = 60  # symbols listed in an error message
FIRST_LABELS = 5  # in the first example that is shown, so that there is something to see
FIRST_WORD = "toolworks"  # shown first by a model of letters that has no examples
SEARCH = SearchOptions(beam_width=20, n_best=8, with_timings=False)

Kept = TypeVar("Kept")


class Gone(ValueError):
    """A request for an input or a lattice that is no longer kept."""


class Latest(Generic[Kept]):
    """A store of the latest few things under random names."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.things: OrderedDict[str, Kept] = OrderedDict()

    def keep(self, thing: Kept) -> str:
        """Store a thing, drop the oldest if there are too many, and return its name."""
        name = secrets.token_urlsafe(12)
        self.things[name] = thing
        while len(self.things) > self.number:
            self.things.popitem(last=False)
        return name

    def drop(self, name: str) -> None:
        """Drop a thing, if it is still kept."""
        self.things.pop(name, None)

    def __getitem__(self, name: str) -> Kept:
        """Return the thing of a name; raise Gone if it was dropped."""
        try:
            self.things.move_to_end(name)
            return self.things[name]
        except KeyError:
            raise Gone("the server has forgotten this input; open it again") from None


@dataclass(frozen=True, eq=False)
class Input:
    """An input that the page shows."""

    example: Example  # without labels
    target: Symbols = ()  # the reference, if there is one
    wave: Tensor | None = None  # [N], the samples of sound
    notes: tuple[str, ...] = ()  # sentences to show with it


@dataclass(frozen=True, eq=False)
class Examples:
    """A model, and the examples to choose from."""

    model: TrainedModel
    pairs: Sequence[Pair]
    name: str

    def examples(self, search: str, first: int) -> dict[str, Any]:
        """List the examples that contain all words of `search`, from number `first` on."""
        words = search.lower().split()
        found = [
            (i, pair)
            for i, pair in enumerate(self.pairs)
            if all(word in f"{pair.name} {' '.join(pair.target)}".lower() for word in words)
        ]
        return {
            "count": len(found),
            "examples": [
                {"index": i, "name": pair.name, "target": pair.target}
                for i, pair in found[max(0, first) :][:MAX_LISTED]
            ],
        }

    def example(self, index: int) -> Pair:
        """Return an example; raise ValueError if there is none of this index."""
        if not 0 <= index < len(self.pairs):
            raise ValueError(f"there is no example {index}; there are {len(self.pairs)} examples")
        return self.pairs[index]

    def first_example(self) -> dict[str, Any] | None:
        """Return the example that the page shows when it opens; None if there are none."""
        if not self.pairs:
            return None
        long = (i for i, pair in enumerate(self.pairs) if len(pair.target) >= FIRST_LABELS)
        return {"kind": "example", "index": next(long, 0)}


@dataclass(frozen=True, eq=False)
class Explorer(Examples):
    """A trained transducer and the examples to show with it."""

    inputs: Latest[Input | Recording] = field(default_factory=lambda: Latest(16))
    views: Latest[LatticeView] = field(default_factory=lambda: Latest(6))
    searches: Latest[Iterator[list[Survivor]]] = field(default_factory=lambda: Latest(4))
    lock: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        transducer_of(self.model)  # raises ValueError for other networks

    # --- The model and its examples -------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """Describe the model to the page."""
        signature, config = self.model.signature, self.model.config
        features = signature.features
        kind = "text" if signature.sources is not None else "sound" if features else "frames"
        return {
            "name": self.name,
            "kind": kind,  # of inputs
            "symbols": signature.targets.symbols,  # label k is symbols[k - 1]
            "num_examples": len(self.pairs),
            "frames_per_vector": config.pooling,
            "seconds_per_frame": features.shift if features else None,
            "seconds_per_window": features.window if features else None,
            "backwards": config.backwards,
            "first": self._first(),  # to show when the page opens
            "colours": heat_colours().flatten().tolist(),  # of maps: red, green, blue, red, ...
            "decades": DECADES,  # of sensitivities
            "max_beam_width": MAX_BEAM_WIDTH,
            "max_bytes": MAX_BYTES,
            "max_seconds": MAX_SECONDS,
            "sample_rate": features.sample_rate if features else None,
            "streams": features is not None and can_stream(self.model),
            "aligns": self._aligns,
            "speaks": False,
        }

    @cached_property
    def _aligns(self) -> bool:
        """Whether the model can align English text with sound: it writes the phones of English."""
        if self.model.signature.features is None or self.model.config.backwards:
            return False
        phones = load("english-pronouncer").signature.targets.symbols
        return set(phones) <= set(self.model.signature.targets.symbols)

    def _first(self) -> dict[str, Any] | None:
        """Return the source that the page shows when it opens; None if there is none."""
        signature = self.model.signature
        if self.pairs:
            return self.first_example()
        if signature.source_notation is None:
            return None
        symbols = signature.source_notation.symbols(FIRST_WORD)
        pair = Pair(FIRST_WORD, symbols, (), Origin(Path("the text")))
        known = not signature.unknown_symbols(pair)
        return {"kind": "text", "text": FIRST_WORD} if known else None

    # --- Opening an input -----------------------------------------------------------------------

    def open_example(self, index: int) -> dict[str, Any]:
        """Open an example by its index."""
        pair, signature = self.example(index), self.model.signature
        if isinstance(pair.source, Audio) and signature.features is not None:
            rate = signature.features.sample_rate
            wave = read_wave(pair.source, rate, pair.origin, convert=True)
            return self._open_wave(pair, wave, signature.features)
        example = signature.example(pair)
        return self._opened(Input(example, pair.target, notes=self._unseen(pair)))

    def open_text(self, text: str) -> dict[str, Any]:
        """Open a typed text."""
        notation = self.model.signature.source_notation
        if notation is None:
            raise ValueError("the model takes sound, not text; choose a sound file")
        symbols = notation.symbols(text)
        if len(symbols) > MAX_SYMBOLS:
            raise ValueError(
                f"the text has {len(symbols)} symbols; at most {MAX_SYMBOLS} can be shown"
            )
        if not symbols:
            raise ValueError("the text is empty; type a word")
        pair = Pair(text.strip(), symbols, (), Origin(Path("the text")))
        example = self.model.signature.example(pair)
        return self._opened(Input(example, notes=self._unseen(pair)))

    def open_sound(self, content: bytes, name: str) -> dict[str, Any]:
        """Open the bytes of a sound file; its name is only for display."""
        features = self.model.signature.features
        if features is None:
            raise ValueError("the model does not take sound; choose an example, or type a text")
        wave = decode_sound(
            content, name, features.sample_rate, max_bytes=MAX_BYTES, max_seconds=MAX_SECONDS
        )
        pair = Pair(name, Audio(Path(name)), (), Origin(Path(name)))
        return self._open_wave(pair, wave, features)

    def begin_recording(self) -> tuple[str, Recording]:
        """Begin to hear the microphone; return the name of the input that grows, and itself."""
        features = self.model.signature.features
        if features is None:
            raise ValueError("the model does not take sound; choose an example, or type a text")
        with self.lock:
            kept = sum(isinstance(one, Recording) for one in self.inputs.things.values())
            if kept >= MAX_RECORDINGS:
                raise ValueError(f"{kept} pages record already; stop one of them")
            recording = Recording(Model.of(self.model), features.sample_rate, MAX_SECONDS)
            return self.inputs.keep(recording), recording

    def end_recording(self, name: str) -> None:
        """Forget a recording."""
        with self.lock:
            self.inputs.drop(name)

    def _open_wave(self, pair: Pair, wave: Tensor, features: FeatureSettings) -> dict[str, Any]:
        """Open the samples of a sound."""
        return self._opened(self._input_of(pair, wave, features))

    def _input_of(self, pair: Pair, wave: Tensor, features: FeatureSettings) -> Input:
        """Return the input of the samples of a sound."""
        if len(wave) < features.window_samples:
            raise ValueError(
                f"the sound {pair.name} is shorter than one window "
                f"of {round(1000 * features.window)} ms; choose a longer one"
            )
        example = replace(self.model.signature.example(wave), pair=pair)
        return Input(example, pair.target, wave)

    def _input(self, name: str) -> Input:
        """Return an input; of a recording, as much as has come."""
        kept = self.inputs[name]
        if isinstance(kept, Input):
            return kept
        features = self.model.signature.features
        assert features is not None
        path = Path("recording")
        return self._input_of(Pair(path.name, Audio(path), (), Origin(path)), kept.wave(), features)

    def _unseen(self, pair: Pair) -> tuple[str, ...]:
        """Return a note on the source symbols that the model does not know, if there are any."""
        unseen = sorted(set(self.model.signature.unknown_symbols(pair)))
        if not unseen:
            return ()
        if len(unseen) == 1:
            return (f"{unseen[0]} was not in the training data, and counts as nothing.",)
        some = f"{', '.join(unseen[:-1])} and {unseen[-1]}"
        return (f"{some} were not in the training data, and count as nothing.",)

    def _opened(self, opened: Input) -> dict[str, Any]:
        """Keep an input; return its name, its N-best outputs and its notes for the page."""
        if opened.example.num_frames > MAX_FRAMES:
            raise ValueError(
                f"the input {opened.example.pair.name} has {opened.example.num_frames} frames; "
                f"at most {MAX_FRAMES} can be shown"
            )
        notes = list(opened.notes)
        with self.lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            [transcript] = Model.of(self.model).transcripts([opened.example], SEARCH)
            name = self.inputs.keep(opened)
        notes += [str(warning.message) for warning in caught if warning.category is UserWarning]
        decode = self.model.signature.targets.decode
        return {
            "input": name,
            "name": opened.example.pair.name,
            "target": opened.target,
            "has_sound": opened.wave is not None,
            "hypotheses": [
                {"symbols": decode(h.labels), "log_prob": h.log_prob} for h in transcript.hypotheses
            ],
            "notes": notes,
        }

    # --- Lattices, sensitivities, searches, alignments, sound -----------------------------------

    def lattice(self, name: str, symbols: Symbols) -> bytes:
        """Return the output lattice of an input and a target, packed (see `wire`).

        In the header, `view` is the name to request sensitivities with. The arrays are `picture`
        [T', D'], the image of the input; f, g, and the logarithms of the forward variables, the
        backward variables and their product.
        """
        opened, targets = self._input(name), self.model.signature.targets
        if len(symbols) > MAX_LABELS:
            raise ValueError(
                f"the target has {len(symbols)} labels; at most {MAX_LABELS} can be shown"
            )
        unknown = [symbol for symbol in symbols if symbol not in targets.symbols]
        if unknown:
            some = " ".join(targets.symbols[:MAX_NAMED])
            rest = " and others" if len(targets) > MAX_NAMED else ""
            raise ValueError(f"{unknown[0]!r} is not a symbol of the model; it has {some}{rest}")
        T = opened.example.num_vectors(self.model.config.pooling)
        if T * (len(symbols) + 1) > MAX_CELLS:
            raise ValueError(
                f"a lattice of {T} by {len(symbols) + 1} is too large to be shown; "
                "shorten the target or the input"
            )
        labels = torch.tensor(targets.encode(symbols), dtype=torch.int64)
        with self.lock:
            view = view_lattice(self.model, opened.example.frames, labels)
            kept = self.views.keep(view)
        source = opened.example.pair.source
        header = {
            "view": kept,
            "target": symbols,
            "source": source if isinstance(source, tuple) else None,
            "log_likelihood": float(view.log_likelihood),
            "best_path": view.best_path,
            "timings": [timing._asdict() for timing in view.timings],
            "first_frame": view.first_frame(0),
            "backwards": view.backwards,
        }
        arrays = {
            "picture": self._picture(opened),
            "transcription": view.transcription,
            "prediction": view.prediction,
            "log_alpha": view.log_alpha,
            "log_beta": view.log_beta,
            "log_product": view.log_product,
        }
        return pack(header, arrays)

    def _picture(self, opened: Input) -> Tensor:
        """Return the image of an input: a spectrogram or frames; an empty one for text."""
        features = self.model.signature.features
        if opened.wave is None or features is None:
            frames = opened.example.frames
            return frames if frames.ndim == 2 else frames.new_zeros(len(frames), 0)
        spectrogram: Tensor = Features(features.as_spectrogram())(opened.wave[None])[0][0]
        return spectrogram

    def sensitivity(self, name: str, t: int, u: int) -> bytes:
        """Return the sensitivity of a node's next label to inputs and previous outputs, packed.

        The arrays are `inputs` [T', D] and `outputs` [U, K]. Each is divided by its largest
        absolute value, which is in the header, because the derivatives of a very improbable output
        are too small for float32.
        """
        with self.lock:
            found = sensitivity(self.model, self.views[name], t, u)._asdict()
        largest, relative = relative_to_largest(found)
        return pack({"t": t, "u": u, "largest": largest}, relative)

    def search(self, name: str, beam_width: int) -> dict[str, Any]:
        """Begin Algorithm 1; return the name to ask for its steps with, and their number less 1."""
        opened = self._input(name)
        if not 1 <= beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(
                f"the beam width must be between 1 and {MAX_BEAM_WIDTH}, not {beam_width}"
            )
        T = opened.example.num_vectors(self.model.config.pooling)
        if T > MAX_STEPS:
            raise ValueError(f"the input has {T} frames; at most {MAX_STEPS} can be shown")
        steps = beam_search_steps(transducer_of(self.model), opened.example.frames, beam_width)
        return {"search": self.searches.keep(steps), "num_vectors": T, "beam_width": beam_width}

    def steps(self, name: str) -> dict[str, Any]:
        """Return the next steps of a search: B before the first frame and after each.

        A hypothesis is [labels, log_prob, flows]; a flow is [source, emitted, log_prob] (see
        `decoding.steps`). Labels are in forward order, also those of a network that reads
        backwards. One answer takes about STEPS_SECONDS; after the last step it is empty.
        """
        order = -1 if self.model.config.backwards else 1
        steps = self.searches[name]
        found: list[list[Survivor]] = []
        with self.lock:
            start = time.monotonic()
            for step in steps:
                found.append([_ordered(survivor, order) for survivor in step])
                if time.monotonic() - start >= STEPS_SECONDS:
                    break
        return {"steps": found}

    @cached_property
    def _aligner(self) -> Aligner:
        return Aligner(Model.of(self.model))

    def align(self, name: str, text: str) -> dict[str, Any]:
        """Return when each word and phone of a text is said in an input (`Alignment.as_json`)."""
        opened = self._input(name)
        if not self._aligns:
            raise ValueError(
                "the model does not write the phones of English, so that it cannot align text; "
                "explore english-phone-recogniser"
            )
        if opened.wave is None:
            raise ValueError("this input has no sound to align; choose a sound")
        if len(text) > MAX_LETTERS:
            raise ValueError(
                f"the text has {len(text)} characters; at most {MAX_LETTERS} can be aligned"
            )
        task = Task(opened.wave, text, name=opened.example.pair.name)
        with self.lock:
            [found] = self._aligner.align_many([task])
        if isinstance(found, DataError):
            raise found
        return found.as_json()

    def wav(self, name: str) -> bytes:
        """Return the sound of an input as a WAV file."""
        opened, features = self._input(name), self.model.signature.features
        if opened.wave is None or features is None:
            raise ValueError("this input has no sound to play")
        return encode_wav(opened.wave, features.sample_rate)


def relative_to_largest(
    arrays: Mapping[str, Tensor],
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the largest absolute value of each array, and the arrays divided by theirs."""
    largest = {what: float(d.abs().max()) if d.numel() else 0.0 for what, d in arrays.items()}
    return largest, {what: d / (largest[what] or 1.0) for what, d in arrays.items()}


def _ordered(survivor: Survivor, order: int) -> Survivor:
    """Return a hypothesis of the search with its labels in forward (1) or reversed order (-1)."""
    flows = tuple(flow._replace(emitted=flow.emitted[::order]) for flow in survivor.flows)
    return survivor._replace(labels=survivor.labels[::order], flows=flows)
