"""What the page asks of a transducer: inputs, what they decode to, lattices, searches.

What a person can mend is a ValueError of one sentence. What was opened is kept under opaque names,
the latest few of each kind. The networks work on one request at a time.
"""

from __future__ import annotations

import secrets
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from transduce.analysis.lattice import LatticeView, transducer_of, view_lattice
from transduce.analysis.sensitivity import sensitivity
from transduce.audio.features import Features, FeatureSettings
from transduce.audio.sound import encode_wav, read_wave
from transduce.data.batches import Example
from transduce.data.pairs import Audio, Origin, Pair, Symbols
from transduce.decoding import beam_search_steps
from transduce.decoding.options import SearchOptions
from transduce.model.checkpoint import TrainedModel
from transduce.model.model import search_examples
from transduce.web.sounds import MAX_BYTES, MAX_SECONDS, decode_sound
from transduce.web.wire import pack

MAX_SYMBOLS = 300  # of a text that is typed
MAX_FRAMES = 10_000  # of an input
MAX_CELLS = 3_000_000  # of a lattice, T x (U+1)
MAX_BEAM_WIDTH = 20  # of a search that is stepped through
MAX_STEPS = 600  # frames of such a search
MAX_LISTED = 200  # examples in one answer
MAX_NAMED = 60  # symbols in a message
SEARCH = SearchOptions(beam_width=20, n_best=8, with_timings=False)

Kept = TypeVar("Kept")


class Gone(ValueError):
    """What was asked for is not kept any more."""


class Latest(Generic[Kept]):
    """The latest few things, under names that nobody can guess."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.things: OrderedDict[str, Kept] = OrderedDict()

    def keep(self, thing: Kept) -> str:
        name = secrets.token_urlsafe(12)
        self.things[name] = thing
        while len(self.things) > self.number:
            self.things.popitem(last=False)
        return name

    def __getitem__(self, name: str) -> Kept:
        try:
            self.things.move_to_end(name)
            return self.things[name]
        except KeyError:
            raise Gone("the server has forgotten this input; open it again") from None


@dataclass(frozen=True, eq=False)
class Input:
    """An input sequence that somebody looks at."""

    example: Example  # without labels
    target: Symbols = ()  # what it should become, where that is known
    wave: Tensor | None = None  # [N], of sound
    notes: tuple[str, ...] = ()  # what is worth saying of it


@dataclass(frozen=True, eq=False)
class Explorer:
    """A trained transducer, and pairs to look at."""

    model: TrainedModel
    pairs: Sequence[Pair]
    name: str
    inputs: Latest[Input] = field(default_factory=lambda: Latest(16))
    views: Latest[LatticeView] = field(default_factory=lambda: Latest(6))
    lock: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        transducer_of(self.model)  # or else there is nothing to explore

    # --- What there is --------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """What the page has to know of the model."""
        signature, config = self.model.signature, self.model.config
        features = signature.features
        kind = "text" if signature.sources is not None else "sound" if features else "frames"
        return {
            "name": self.name,
            "kind": kind,  # of the inputs
            "symbols": signature.targets.symbols,  # label k is symbols[k - 1]
            "num_examples": len(self.pairs),
            "frames_per_vector": config.pooling,
            "seconds_per_frame": features.shift if features else None,
            "max_beam_width": MAX_BEAM_WIDTH,
            "max_bytes": MAX_BYTES,
            "max_seconds": MAX_SECONDS,
        }

    def examples(self, search: str, first: int) -> dict[str, Any]:
        """Those whose name or target has the words of `search`, in pages."""
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

    # --- Opening an input -----------------------------------------------------------------------

    def open_example(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self.pairs):
            raise ValueError(f"there is no example {index}; there are {len(self.pairs)}")
        pair, signature = self.pairs[index], self.model.signature
        if isinstance(pair.source, Audio) and signature.features is not None:
            wave = read_wave(pair.source, signature.features.sample_rate, pair.origin)
            return self._open_wave(pair, wave, signature.features)
        example = signature.example(pair)
        return self._opened(Input(example, pair.target, notes=self._unseen(pair)))

    def open_text(self, text: str) -> dict[str, Any]:
        """What somebody has typed."""
        notation = self.model.signature.source_notation
        if notation is None:
            raise ValueError("the model takes sound, not text; choose a sound file")
        symbols = notation.symbols(text)
        if len(symbols) > MAX_SYMBOLS:
            raise ValueError(f"the text has {len(symbols)} symbols; {MAX_SYMBOLS} can be shown")
        if not symbols:
            raise ValueError("there is nothing written; type a word")
        pair = Pair(text.strip(), symbols, (), Origin(Path("the text")))
        example = self.model.signature.example(pair)
        return self._opened(Input(example, notes=self._unseen(pair)))

    def open_sound(self, content: bytes, name: str) -> dict[str, Any]:
        """A sound file's bytes; its name is only shown."""
        features = self.model.signature.features
        if features is None:
            raise ValueError("the model does not take sound; choose an example, or type a text")
        wave = decode_sound(content, name, features.sample_rate)
        pair = Pair(name, Audio(Path(name)), (), Origin(Path(name)))
        return self._open_wave(pair, wave, features)

    def _open_wave(self, pair: Pair, wave: Tensor, features: FeatureSettings) -> dict[str, Any]:
        example = replace(self.model.signature.example(wave), pair=pair)
        if not example.num_frames:
            raise ValueError(
                f"the sound {pair.name} is shorter than one window "
                f"of {round(1000 * features.window)} ms"
            )
        return self._opened(Input(example, pair.target, wave))

    def _unseen(self, pair: Pair) -> tuple[str, ...]:
        unseen = sorted(set(self.model.signature.unknown_symbols(pair)))
        if not unseen:
            return ()
        if len(unseen) == 1:
            return (f"{unseen[0]} was not in the training data, and counts as nothing.",)
        some = f"{', '.join(unseen[:-1])} and {unseen[-1]}"
        return (f"{some} were not in the training data, and count as nothing.",)

    def _opened(self, opened: Input) -> dict[str, Any]:
        """What the page is told of an input: its N-best, and the name to ask for more by."""
        if opened.example.num_frames > MAX_FRAMES:
            raise ValueError(
                f"the input {opened.example.pair.name} has {opened.example.num_frames} frames; "
                f"{MAX_FRAMES} can be shown"
            )
        notes = list(opened.notes)
        with self.lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            [hypotheses] = search_examples(self.model, [opened.example], SEARCH)
            name = self.inputs.keep(opened)
        notes += [str(warning.message) for warning in caught if warning.category is UserWarning]
        decode = self.model.signature.targets.decode
        return {
            "input": name,
            "name": opened.example.pair.name,
            "target": opened.target,
            "has_sound": opened.wave is not None,
            "hypotheses": [
                {"symbols": decode(h.labels), "log_prob": h.log_prob} for h in hypotheses
            ],
            "notes": notes,
        }

    # --- Looking at it --------------------------------------------------------------------------

    def lattice(self, name: str, symbols: Symbols) -> bytes:
        """The output lattice of an input and a target, packed (see `wire`).

        The header has `view`, to ask for sensitivities by. The arrays are `picture` [T', D'], what
        is shown of the input; f, g, and the logarithms of the forward variables, the backward
        variables and their product.
        """
        opened, targets = self.inputs[name], self.model.signature.targets
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
        """What is shown of an input: sound's spectrogram, or its frames; of text, nothing."""
        features = self.model.signature.features
        if opened.wave is None or features is None:
            frames = opened.example.frames
            return frames if frames.ndim == 2 else frames.new_zeros(len(frames), 0)
        spectrogram: Tensor = Features(features.as_spectrogram())(opened.wave[None])[0][0]
        return spectrogram

    def sensitivity(self, name: str, t: int, u: int) -> bytes:
        """How the probability of a node's next label depends on the inputs and on the previous
        outputs, packed (see `wire`).

        The arrays are `inputs` [T', D] and `outputs` [U, K], each over its largest size, which is
        in the header: derivatives of what is nearly impossible are too small for float32.
        """
        with self.lock:
            found = sensitivity(self.model, self.views[name], t, u)._asdict()
        largest = {what: float(d.abs().max()) if d.numel() else 0.0 for what, d in found.items()}
        relative = {what: d / (largest[what] or 1.0) for what, d in found.items()}
        return pack({"t": t, "u": u, "largest": largest}, relative)

    def search(self, name: str, beam_width: int) -> dict[str, Any]:
        """Algorithm 1 on an input: B before the first frame and after each (see `decoding.steps`).

        A hypothesis is [labels, log_prob, flows], a flow [source, emitted, log_prob].
        """
        opened = self.inputs[name]
        if not 1 <= beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(
                f"the beam width must be between 1 and {MAX_BEAM_WIDTH}, not {beam_width}"
            )
        T = opened.example.num_vectors(self.model.config.pooling)
        if T > MAX_STEPS:
            raise ValueError(f"the input has {T} frames; {MAX_STEPS} can be stepped through")
        with self.lock:
            steps = beam_search_steps(transducer_of(self.model), opened.example.frames, beam_width)
        return {"beam_width": beam_width, "steps": steps}

    def wav(self, name: str) -> bytes:
        """The sound of an input, to be played."""
        opened, features = self.inputs[name], self.model.signature.features
        if opened.wave is None or features is None:
            raise ValueError("this input has no sound")
        return encode_wav(opened.wave, features.sample_rate)
