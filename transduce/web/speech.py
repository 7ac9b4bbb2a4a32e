"""Answer the requests of the page of a continuous transducer: inputs, speech, nodes, sound.

Errors that the user can fix are ValueErrors of one sentence, as in `explorer`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

from torch import Tensor

from transduce.alignment.pronunciations import said_symbols
from transduce.analysis.colours import DECADES, heat_colours
from transduce.analysis.lattice import alignment_path
from transduce.analysis.speech import (
    SpeechView,
    node_mixture,
    null_sensitivity,
    speaker_of,
    view_speech,
)
from transduce.audio.inversion import log_mel_to_samples
from transduce.audio.outputs import FrameOutputs
from transduce.audio.sound import LongSound, encode_wav, read_sound
from transduce.data.batches import Example
from transduce.data.pairs import Audio, Origin, Pair
from transduce.decoding.generation import GenerationOptions
from transduce.model.speech import conditions, speak
from transduce.web.explorer import MAX_CELLS, MAX_SECONDS, Examples, Latest, relative_to_largest
from transduce.web.wire import pack

# In an input. More symbols say longer texts, but a network that never takes null has 100 outputs at
# each: 30 then take 3.5 s to generate, and 7.4 s to become sound.
MAX_SYMBOLS = 30
MAX_LETTERS = 300  # in a typed text
MAX_TEMPERATURE = 2.0  # beyond it the outputs are noise
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Said:
    """Speech that the page shows."""

    view: SpeechView
    recording: Tensor | None  # [N], the samples; None if the speech was generated

    @cached_property
    def samples(self) -> Tensor:
        """The samples [N] of the recording, or those that Griffin and Lim's algorithm finds."""
        if self.recording is not None:
            return self.recording
        settings = self.view.format.features
        return log_mel_to_samples(self.view.format.to_frames(self.view.outputs), settings)


@dataclass(frozen=True, eq=False)
class SpeechExplorer(Examples):
    """A continuous transducer and the examples to show with it."""

    inputs: Latest[Example] = field(default_factory=lambda: Latest(16))
    said: Latest[Said] = field(default_factory=lambda: Latest(6))
    lock: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        speaker_of(self.model)  # raises ValueError for other networks

    @property
    def format(self) -> FrameOutputs:
        """Return what an output of the network is."""
        assert self.model.signature.outputs is not None
        return self.model.signature.outputs

    def description(self) -> dict[str, Any]:
        """Describe the model to the page."""
        sources, options = self.model.signature.sources, GenerationOptions()
        assert sources is not None
        return {
            "name": self.name,
            "kind": "text",  # of inputs
            "symbols": sources.symbols,  # of inputs
            "conditions": conditions(self.model.signature),
            "num_examples": len(self.pairs),
            "frames_per_vector": self.format.stacking,  # frames of an output
            "seconds_per_frame": self.format.features.shift,
            "backwards": False,
            "first": self.first_example(),  # to show when the page opens
            "colours": heat_colours().flatten().tolist(),  # of maps: red, green, blue, red, ...
            "decades": DECADES,  # of sensitivities
            "streams": False,
            "aligns": False,
            "speaks": True,
            "generation": {
                "temperature": options.temperature,
                "durations": options.durations,
                "seed": options.seed,
            },
        }

    # --- Opening an input -----------------------------------------------------------------------

    def open_example(self, index: int) -> dict[str, Any]:
        """Open an example by its index."""
        return self._opened(self.example(index))

    def open_text(self, text: str) -> dict[str, Any]:
        """Open a typed text: words, or symbols of the model, after the names of conditions."""
        if len(text) > MAX_LETTERS:
            raise ValueError(
                f"the text has {len(text)} characters; at most {MAX_LETTERS} can be shown"
            )
        with self.lock:
            symbols = said_symbols(self.model.signature, text)
        for name, values in conditions(self.model.signature).items():
            if not any(symbol.startswith(f"{name}=") for symbol in symbols):
                some = ", ".join(f"{name}={value}" for value in values)
                raise ValueError(f"the text names no {name}; write one of {some} before it")
        return self._opened(Pair(text.strip(), symbols, (), Origin(Path("the text"))))

    def _opened(self, pair: Pair) -> dict[str, Any]:
        """Keep an input; return its name and its symbols for the page."""
        signature = self.model.signature
        assert signature.sources is not None
        example = signature.example(pair, unknown="refuse")
        if example.num_frames > MAX_SYMBOLS:
            raise ValueError(
                f"the input has {example.num_frames} symbols; at most {MAX_SYMBOLS} can be shown"
            )
        return {
            "input": self.inputs.keep(example),
            "name": pair.name,
            "symbols": signature.sources.decode(example.frames.tolist()),
            "has_recording": not isinstance(pair.source, tuple),
            "notes": [],
        }

    # --- Speech, nodes, sound -------------------------------------------------------------------

    def speech(self, name: str, options: GenerationOptions | None) -> bytes:
        """Return the lattice of an input and its recording, or of generated speech, packed.

        In the header, `view` is the name to request nodes and sound with. The arrays are `picture`
        [frames, channels], the spectrogram; the logarithms of Pr(null) [T, U+1], of the density of
        the next output [T, U], and of the probability that the alignment passes a node [T, U+1].
        """
        example = self.inputs[name]
        with self.lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if options is None:
                outputs, recording = self._recorded(example)
            else:
                outputs, recording = self._generated(example, options), None
            T = example.num_vectors(self.model.config.pooling)
            if T * (len(outputs) + 1) > MAX_CELLS:
                raise ValueError(
                    f"a lattice of {T} by {len(outputs) + 1} is too large to be shown; choose a "
                    "shorter recording"
                )
            view = view_speech(self.model, example.frames, outputs)
            kept = self.said.keep(Said(view, recording))
        header = {
            "view": kept,
            "names": view.names,  # of the transcription vectors
            "symbols": view.symbols,
            "pooling": view.pooling,  # symbols of a vector
            "num_outputs": len(outputs),
            "log_density": view.log_density,
            "bits_per_output": view.bits_per_output,
            "best_path": alignment_path(view.best, len(view.log_null)),
            "notes": [str(w.message) for w in caught if w.category is UserWarning],
        }
        arrays = {
            "picture": view.format.to_frames(view.outputs),
            "log_null": view.log_null,
            "log_next_output": view.log_next_output,
            "log_product": view.log_product,
        }
        return pack(header, arrays)

    def _recorded(self, example: Example) -> tuple[Tensor, Tensor | None]:
        """Return the outputs [U, D] of an example's recording, and its samples if it has them."""
        pair, settings = example.pair, self.format.features
        if isinstance(pair.source, tuple):
            raise ValueError("a text has no recording; generate its sound")
        wave = None
        if isinstance(pair.source, Audio):
            rate = settings.sample_rate
            try:
                wave, _ = read_sound(
                    pair.source, rate, pair.origin, convert=True, longest=MAX_SECONDS
                )
            except LongSound as error:
                raise ValueError(
                    f"the sound {pair.name} is longer than {MAX_SECONDS} seconds; choose another"
                ) from error
        return self.model.signature.example(pair, with_labels=True).labels, wave

    def _generated(self, example: Example, options: GenerationOptions) -> Tensor:
        """Return the outputs [U, D] that the model generates for an input."""
        if options.temperature > MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be at most {MAX_TEMPERATURE:g}, not {options.temperature:g}"
            )
        if not 0 <= options.seed <= MAX_SEED:
            raise ValueError(f"seed must be between 0 and {MAX_SEED}, not {options.seed}")
        [speech] = speak(self.model, [example], options)
        if not len(speech.generated.outputs):
            raise ValueError(
                f"nothing is said for {' '.join(speech.symbols)!r} with these options; choose "
                "others, or train the model longer"
            )
        return speech.generated.outputs

    def node(self, name: str, t: int, u: int) -> bytes:
        """Return the mixture at a node, and the sensitivity of null there, packed.

        The arrays `means` and `deviations` are [M, D], and `output`, the next one, is [D], or
        empty after the last; all have the unit of the spectrogram. The sensitivities are `inputs`
        [T, K] and `outputs` [frames, channels], each divided by its largest absolute value, which
        is in the header.
        """
        with self.lock:
            view = self.said[name].view
            mixture = node_mixture(view, t, u)
            found = null_sensitivity(self.model, view, t, u)
        channels = self.format.features.size
        largest, relative = relative_to_largest(
            {"inputs": found.inputs, "outputs": found.outputs.reshape(-1, channels)}
        )
        header = {
            "t": t,
            "u": u,
            "null": mixture.null,
            "weights": mixture.weights.tolist(),
            "log_densities": mixture.log_densities.tolist(),
            "largest": largest,
        }
        unit = self.format.statistics.deviation.repeat(self.format.stacking).to(mixture.deviations)
        arrays = {
            "means": self.format.to_frames(mixture.means).reshape(mixture.means.shape),
            "deviations": unit * mixture.deviations,
            "output": self.format.to_frames(view.outputs[u : u + 1]).flatten(),
        }
        return pack(header, {**relative, **arrays})

    def wav(self, name: str) -> bytes:
        """Return the sound of what is shown as a WAV file."""
        with self.lock:
            samples = self.said[name].samples
        return encode_wav(samples, self.format.features.sample_rate)
