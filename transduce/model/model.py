"""Models that ship with the package, and any other trained model, as functions of their input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast, overload

import numpy as np
import torch
from torch import Tensor

from transduce.data.batches import Example
from transduce.data.pairs import Audio, DataError, Frames, Origin, Pair, Symbols
from transduce.model.checkpoint import (
    MODEL_FILE,
    CheckpointError,
    TrainedModel,
    load_ensemble,
    save_model,
)
from transduce.model.recognition import recognise, transcript
from transduce.model.transcripts import Transcript

FOLDER = Path(__file__).parent / "weights"  # NAME.safetensors and its card, NAME.md
AT_ONCE = 2048  # lines of a stream
Source = str | Path | Symbols | Tensor | np.ndarray


def load(*models: str | Path) -> Model:
    """The model of a name, of a run's folder or of a .safetensors file; several are an ensemble.

    load("english-pronouncer")("transducer")
    """
    if not models:
        raise ValueError("there is nothing to load; give a name, a run's folder or a file")
    return Model(load_ensemble([model_path(model) for model in models]))


def model_names() -> list[str]:
    """The models that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def model_path(model: str | Path) -> Path:
    """What there is under that path, or else the file of the model that ships under that name."""
    if Path(model).exists():
        return Path(model)
    names = model_names()
    if str(model) in names:
        return FOLDER / f"{model}.safetensors"
    there_are = f"the models that ship are {', '.join(names)}" if names else "no models ship"
    raise CheckpointError(f"there is no file, folder or model {str(model)!r}; {there_are}")


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model to call, on one input or on a list of them.

    A model that reads text takes a word or line; letters it does not know are put in the other case
    if it knows them so, and a DataError names one that it does not. A model that hears takes the
    path of a sound file, samples [N] in [-1, 1] at its own rate, or frames [T, D].

    What comes back prints as the output does: `str(model("word"))`. It has the `symbols` of the
    best hypothesis, and `hypotheses` with their probabilities and, where asked for, timings.
    """

    trained: TrainedModel

    @overload
    def __call__(
        self, source: Source, *, beam_width: int = ..., n_best: int = ..., with_timings: bool = ...
    ) -> Transcript: ...

    @overload
    def __call__(
        self,
        source: list[Source],
        *,
        beam_width: int = ...,
        n_best: int = ...,
        with_timings: bool = ...,
    ) -> list[Transcript]: ...

    def __call__(
        self,
        source: Source | list[Source],
        *,
        beam_width: int = 1,
        n_best: int = 1,
        with_timings: bool = False,
    ) -> Transcript | list[Transcript]:
        """The transcript of the input; of a list of inputs, a list of transcripts.

        A width of 1 is the greedy search unless there is more to find than one output.
        """
        sources = source if isinstance(source, list) else [source]
        examples = [self.example(one) for one in sources]
        found = self.transcripts(
            examples, beam_width=beam_width, n_best=n_best, with_timings=with_timings
        )
        return found if isinstance(source, list) else found[0]

    def example(self, source: Source) -> Example:
        """The input as the network takes it."""
        signature = self.trained.signature
        name, inside = "samples", cast(Symbols | Audio | Frames, ())
        if signature.sources is not None and isinstance(source, str | tuple):
            name = source if isinstance(source, str) else " ".join(source)
            inside = self._known(source, name)
        elif isinstance(source, str | Path):
            path = Path(source)
            name, inside = path.stem, Frames(path) if path.suffix == ".npy" else Audio(path)
        elif isinstance(source, np.ndarray):
            source = torch.from_numpy(source).float()
        pair = Pair(name, inside, (), Origin(Path(name)))
        frames = signature.input_of(source if isinstance(source, Tensor) else inside)
        return Example(pair, frames, torch.empty(0, dtype=torch.int64))

    def _known(self, source: str | Symbols, name: str) -> Symbols:
        """The symbols of a text, each one that the model knows."""
        signature = self.trained.signature
        if isinstance(source, str) and signature.source_notation is not None:
            source = signature.source_notation.symbols(source)
        assert signature.sources is not None
        if not source:
            raise DataError(f"{name!r} has nothing to read; give a word")
        for symbol in signature.sources.unknown(source):
            raise DataError(
                f"{name}: {symbol!r} is no symbol that the model knows; it knows "
                f"{' '.join(sorted(signature.sources.symbols))}"
            )
        return tuple(signature.sources.respell(source))

    def each(
        self, lines: Iterable[str], *, beam_width: int = 1, n_best: int = 1, at_once: int = AT_ONCE
    ) -> Iterator[Transcript | DataError | None]:
        """Of each line of text, in their order, the transcript, while lines still come.

        A blank line gives None, and one that has a symbol which the model does not know the error
        that says so. They are taken `at_once`, but fewer at first, so that the first are soon done.
        """
        rest, size = iter(lines), min(64, at_once)
        while chunk := list(islice(rest, size)):
            size = min(2 * size, at_once)
            read = [self._example_or_error(line.strip()) for line in chunk]
            examples = [one for one in read if isinstance(one, Example)]
            found = iter(self.transcripts(examples, beam_width=beam_width, n_best=n_best))
            yield from (next(found) if isinstance(one, Example) else one for one in read)

    def _example_or_error(self, text: str) -> Example | DataError | None:
        try:
            return self.example(text) if text else None
        except DataError as error:
            return error

    def transcripts(
        self,
        examples: Sequence[Example],
        *,
        beam_width: int = 1,
        n_best: int = 1,
        with_timings: bool = False,
    ) -> list[Transcript]:
        """What the model makes of its inputs, in their order."""
        width = max(beam_width, n_best)
        found = recognise(
            self.trained, examples, beam_width=width, n_best=n_best, with_timings=with_timings
        )
        return [
            transcript(self.trained, example, best)
            for example, best in zip(examples, found, strict=True)
        ]

    def to(self, device: torch.device | str) -> Model:
        """This model, moved."""
        self.trained.network.to(device)
        return self

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
        """Write the model into a folder, which `load` reads, and return the file's path.

        The file has the weights, in `dtype`, and all that is needed to use them: the alphabets, how
        text becomes symbols, what the frames are and their statistics.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.trained, folder, dtype)
        return folder / MODEL_FILE

    def __repr__(self) -> str:
        config, signature = self.trained.config, self.trained.signature
        count = sum(weights.numel() for weights in self.trained.network.parameters())
        reads = "sound" if signature.features else "frames"
        if signature.sources is not None:
            reads = f"{len(signature.sources)} symbols"
        return (
            f"Model({config.network}: {reads} to {len(signature.targets)} symbols, "
            f"{count:,} weights)"
        )
