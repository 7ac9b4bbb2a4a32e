"""Speech that a model generates: frames, samples, and when each symbol is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from transduce.architectures import ContinuousTransducer
from transduce.audio.inversion import log_mel_to_samples
from transduce.audio.outputs import FrameOutputs
from transduce.audio.sound import encode_wav
from transduce.data.batches import Batch
from transduce.data.pairs import DataError, Symbols
from transduce.decoding.generation import Generated, GenerationOptions, generate
from transduce.files import write_by_rename
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import Signature, Source

AT_ONCE = 64  # inputs whose outputs are generated together


@dataclass(frozen=True, eq=False)
class Speech:
    """What a model says for one input."""

    symbols: Symbols  # the input
    generated: Generated
    format: FrameOutputs

    @property
    def sample_rate(self) -> int:
        """Return the samples in a second."""
        return self.format.features.sample_rate

    @property
    def frames(self) -> Tensor:
        """Return the log mel spectrogram [T, channels]."""
        return self.format.to_frames(self.generated.outputs)

    @cached_property
    def samples(self) -> Tensor:
        """The samples [N] in [-1, 1], by the algorithm of Griffin and Lim."""
        if not len(self.frames):
            raise DataError(
                f"nothing is said for {' '.join(self.symbols)!r}; train the model longer"
            )
        return log_mel_to_samples(self.frames, self.format.features)

    @property
    def intervals(self) -> list[tuple[str, float, float]]:
        """Return each symbol that is said, with its start and end in seconds."""
        found = []
        for t, symbol in enumerate(self.symbols):
            at = [u for u, where in enumerate(self.generated.inputs) if where == t]
            if at:
                found.append((symbol, at[0] * self.format.shift, (at[-1] + 1) * self.format.shift))
        return found

    def wav(self) -> bytes:
        """Return the sound as a WAV file."""
        return encode_wav(self.samples, self.sample_rate)

    def save(self, path: str | Path) -> None:
        """Write the sound to a WAV file."""
        write_by_rename(Path(path), self.wav())


def speak(
    model: TrainedModel, sources: Sequence[Source], options: GenerationOptions | None = None
) -> list[Speech]:
    """Generate the speech of each source, such as "speaker=theo S EH V AH N".

    The same source and seed give the same speech, whatever the other sources are.
    """
    network, outputs = model.network, model.signature.outputs
    if not isinstance(network, ContinuousTransducer) or outputs is None:
        raise ValueError(
            f"a {network.kind} network outputs labels, and does not speak; give a continuous "
            "transducer"
        )
    found = []
    for first in range(0, len(sources), AT_ONCE):
        group = sources[first : first + AT_ONCE]
        examples = [model.signature.example(source, unknown="refuse") for source in group]
        batch = Batch.of(examples).to(model.device)
        generated = generate(network, batch.frames, batch.num_frames, options)
        for example, one in zip(examples, generated, strict=True):
            assert model.signature.sources is not None
            symbols = model.signature.sources.decode(example.frames.tolist())
            found.append(Speech(tuple(symbols), one, outputs))
    return found


def conditions(signature: Signature) -> dict[str, list[str]]:
    """Return the values of each condition among a model's source symbols.

    The symbols speaker=george and speaker=theo are the condition speaker with two values.
    """
    found: dict[str, list[str]] = {}
    for symbol in () if signature.sources is None else signature.sources.symbols:
        name, equals, value = symbol.partition("=")
        if equals and name and value:
            found.setdefault(name, []).append(value)
    return found
