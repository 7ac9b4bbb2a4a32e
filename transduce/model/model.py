"""Trained models as functions of their input: the models that ship, and any other."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch

from transduce.architectures import Hypotheses
from transduce.audio.windows import sound_rate
from transduce.data.batches import Batch, Batches, Example
from transduce.data.pairs import Audio, DataError, Frames
from transduce.decoding.ensemble import Ensemble
from transduce.decoding.generation import GenerationOptions
from transduce.decoding.options import SearchOptions, widened
from transduce.kernels.backends import Backend
from transduce.kernels.openmp import one_thread
from transduce.model.checkpoint import MODEL_FILE, TrainedModel, load_ensemble, save_model
from transduce.model.reading import GroupSizes, Reader, Ready
from transduce.model.signature import Source, Unknown
from transduce.model.speech import Speech, speak
from transduce.model.stream import (
    Endpoints,
    Stream,
    can_stream,
    most_vectors,
    search_long,
    vector_times,
)
from transduce.model.tensors import CheckpointError
from transduce.model.transcripts import Transcript, join_windows
from transduce.networks import TranscriptionNetwork

FOLDER = Path(__file__).parent / "weights"  # NAME.safetensors and its card, NAME.md
# Inputs held at once: fewer give the first results sooner, more give all results sooner.
FIRST_INPUTS, MOST_INPUTS = {"cpu": 64, "cuda": 512}, 2048
# Frames held at once: memory, and time between results, against full batches.
HELD_FRAMES = {"cpu": 24_000, "cuda": 200_000}
# Frames searched at once: few fit the caches of a CPU, many fill a GPU.
SEARCHED_FRAMES = {"cpu": 4096, "cuda": 200_000}
# Inputs that PyTorch's own operations finish before compiled kernels would be loaded, let alone
# compiled: none longer than SHORT frames, and in all so many frames. A greedy search takes all
# inputs together; a beam search takes one after the other.
SHORT, SMALL_GREEDY, SMALL_BEAM = 100, 5_000, 300
# The precisions of `train.precision` that a trained network can have.
Precision = Literal["32-true", "16-mixed", "bf16-mixed"]
PRODUCT_TYPES = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
# Cells of padded lattice whose losses are computed at once; a GPU takes 40 bytes for each.
CELLS = {"cpu": 1_000_000, "cuda": 20_000_000}


def load(*models: str | Path) -> Model:
    """Load a model by name, run folder or .safetensors file; several make an ensemble.

    load("english-pronouncer")("transducer")
    """
    if not models:
        raise ValueError("there is nothing to load; give a name, a run's folder or a file")
    return Model.of(load_ensemble([model_path(model) for model in models]))


def model_names() -> list[str]:
    """Return the names of the models that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def model_path(model: str | Path) -> Path:
    """Return the path if it exists, or else the file of the model that ships under that name."""
    if Path(model).exists():
        return Path(model)
    names = model_names()
    if str(model) in names:
        return FOLDER / f"{model}.safetensors"
    there_are = f"the models that ship are {', '.join(names)}" if names else "no models ship"
    for name in difflib.get_close_matches(str(model), names, n=1, cutoff=0.8):
        there_are = f"did you mean {name}? {there_are}"
    raise CheckpointError(f"there is no file, folder or model {str(model)!r}; {there_are}")


@dataclass(frozen=True, eq=False)
class Model(TrainedModel):
    """A trained model as a function of one input or of a list of inputs.

    A model of text takes a word or line. It tries a letter that it does not know in the other case
    and without its accent, leaves out punctuation at both ends, and raises a DataError if it does
    not know a letter even so. A model of sound takes the path of a sound file, samples [N] at its
    own rate, or frames [T, D]. Samples are floating-point numbers in [-1, 1]; those of types int16,
    int32 and uint8 are scaled to it.

    The result is a transcript: `str(model("word"))` is the output, `symbols` are those of the best
    hypothesis, and `hypotheses` have probabilities and, on request, timings. Many threads may call
    a model at once.
    """

    @classmethod
    def of(cls, trained: TrainedModel) -> Model:
        """Make a callable model of a trained model."""
        if isinstance(trained, Model):
            return trained
        return cls(**{part.name: getattr(trained, part.name) for part in fields(trained)})

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
        **options: Any,
    ) -> Transcript | list[Transcript]:
        """Return the transcript of an input; of a list of inputs, a list of transcripts.

        Width 1 is the greedy search, unless the options ask for several hypotheses or timings.
        Further options are the fields of `SearchOptions`.
        """
        asked = search_options(beam_width, n_best, with_timings, options)
        sources = source if isinstance(source, list) else [source]
        found = list(self.transcripts(sources, asked))
        return found if isinstance(source, list) else found[0]

    def transcribe(
        self,
        sources: Iterable[Source],
        options: SearchOptions,
        *,
        unknown: Unknown = "refuse",
        at_once: int = MOST_INPUTS,
        at_first: int | None = None,
        progress: Callable[[float], object] = lambda share: None,
    ) -> Iterator[Transcript | DataError]:
        """Yield the transcript of each input, in order; inputs may come from a generator.

        For an input that cannot be read, yield the DataError. At most `at_once` inputs are held at
        a time, and fewer, `at_first`, so that the first results come soon; files of sound are also
        read ahead, two for each thread, and for a GPU as many as are searched meanwhile. Sound
        longer than two minutes is read and searched in windows that end in pauses, or, if the model
        can stream, as a stream. `progress` is called with the shares of inputs that are done; those
        of an input add up to 1.
        """
        features = self.signature.features
        step = None if features is None else features.shift * self.config.pooling
        streamed = partial(self._streamed, options=options) if can_stream(self) else None
        reader = Reader(self.signature, self.device, unknown, step, streamed=streamed)
        begun: list[Transcript | DataError] = []  # of an input with more parts to come
        for parts in reader.groups(sources, group_sizes(self.device, at_once, at_first)):
            yield from self._transcripts(parts, options, begun, progress)

    def transcripts(
        self,
        sources: Iterable[Source],
        options: SearchOptions,
        *,
        unknown: Unknown = "refuse",
        at_once: int = MOST_INPUTS,
    ) -> Iterator[Transcript]:
        """Yield the transcript of each input; raise the DataError of one that cannot be read."""
        for one in self.transcribe(sources, options, unknown=unknown, at_once=at_once):
            if isinstance(one, DataError):
                raise one
            yield one

    def _transcripts(
        self,
        parts: Sequence[Ready],
        options: SearchOptions,
        begun: list[Transcript | DataError],
        progress: Callable[[float], object],
    ) -> Iterator[Transcript | DataError]:
        """Search all parts at once; yield transcripts and errors of the inputs that they finish."""
        examples = [part.read for part in parts if isinstance(part.read, Example)]
        found = iter(search_examples(self, examples, options))
        for part in parts:
            read = part.read
            begun.append(self.transcript(read, next(found)) if isinstance(read, Example) else read)
            progress(part.share)
            if part.is_last:
                yield self._joined(begun, options)
                begun.clear()

    def _streamed(self, source: Source, options: SearchOptions) -> Transcript:
        """Return the transcript of long sound, which goes through a stream."""
        stream = Stream(self, options, follow=False)
        blocks, pair = self.signature.blocks(source)
        for block in blocks:
            stream.advance(block)
        found = stream.finish()
        if pair is None or not isinstance(pair.source, Audio) or found.recording is None:
            return found
        recording = replace(found.recording, sample_rate=sound_rate(pair.source))
        return replace(found, name=pair.name, path=pair.source.path, recording=recording)

    def _joined(
        self, parts: Sequence[Transcript | DataError], options: SearchOptions
    ) -> Transcript | DataError:
        """Return the error of an input, if there is one, or else the transcript of its parts."""
        windows = [part for part in parts if isinstance(part, Transcript)]
        if len(windows) < len(parts):
            return next(part for part in parts if isinstance(part, DataError))
        normalised = sorts_by_length(self, options)
        return join_windows(windows, options.n_best, length_normalised=normalised)

    def transcript(self, example: Example, hypotheses: Hypotheses) -> Transcript:
        """Make a transcript of an example's hypotheses, with times in seconds if it is sound."""
        signature, source, recording = self.signature, example.pair.source, example.recording
        written = (example.pair.name, hypotheses, signature.targets, signature.separator)
        path = None if isinstance(source, tuple) else source.path
        if signature.features is None or isinstance(source, Frames):
            return Transcript(*written, path=path)
        # Without the sound, its duration is that of its windows.
        features = signature.features
        seconds = example.num_frames * features.shift + 2 * features.margin
        seconds = seconds if recording is None else recording.seconds
        times = vector_times(self)
        assert times is not None
        return Transcript(*written, times[0], seconds, times[1], path, recording)

    def speak(
        self,
        source: Source | list[Source],
        **options: Any,
    ) -> Speech | list[Speech]:
        """Return the speech of an input, or of each of a list: that of a continuous transducer.

        model.speak("speaker=theo S EH V AH N").save("seven.wav")

        The options are the fields of `GenerationOptions`.
        """
        known = [field.name for field in fields(GenerationOptions)]
        for name in options:
            if name not in known:
                raise TypeError(f"speech has no option {name}; the options are {', '.join(known)}")
        sources = source if isinstance(source, list) else [source]
        found = speak(self, sources, GenerationOptions(**options))
        return found if isinstance(source, list) else found[0]

    def stream(
        self,
        *,
        beam_width: int = 4,
        n_best: int = 1,
        with_timings: bool = True,
        endpoints: Endpoints | None = None,
        sample_rate: int | None = None,
        **options: Any,
    ) -> Stream:
        """Return a stream, which transcribes an input while it comes in.

        The options are those of a call, with the same meaning; the stream's result is that of a
        call with the same options, to the last bit. Samples have the model's own rate. With
        `endpoints`, partial results say whether the utterance has ended.
        """
        features = self.signature.features
        if sample_rate is not None and features is not None and sample_rate != features.sample_rate:
            raise ValueError(
                f"a stream takes {features.sample_rate} samples a second, not {sample_rate}; "
                "record at that rate, or convert the samples first"
            )
        asked = search_options(beam_width, n_best, with_timings, options)
        return Stream(self, asked, endpoints)

    @property
    def latency(self) -> float | None:
        """The seconds of sound from the start of a transcription vector to all that it depends on.

        This algorithmic latency is that of the window of a vector's last frame, with the frames of
        the lookahead and the deltas after it. None if the model sees the whole input before its
        first output, because it is bidirectional, reads backwards or is an ensemble, and None if
        its input is not sound.
        """
        config, features = self.config, self.signature.features
        whole = config.bidirectional or config.backwards or isinstance(self.network, Ensemble)
        if whole or features is None:
            return None
        ahead = config.pooling - 1 + config.lookahead + features.lookahead
        return ahead * features.shift + features.window

    def to(self, device: torch.device | str, precision: Precision = "32-true") -> Model:
        """Move the network to a device, and set its precision; return the model.

        "bf16-mixed" and "16-mixed" need a GPU: the transcription networks' LSTMs multiply bfloat16
        or float16 numbers on its tensor cores. Everything else, and the search, stays float32.
        """
        if precision not in PRODUCT_TYPES:
            known = ", ".join(PRODUCT_TYPES)
            raise ValueError(f"precision must be one of {known}, not {precision!r}")
        if PRODUCT_TYPES[precision] is not None and torch.device(device).type != "cuda":
            raise ValueError(f"precision {precision} needs a GPU, not {device}; leave it out there")
        self.network.to(device)
        for part in self.network.modules():
            if isinstance(part, TranscriptionNetwork):
                part.product_type = PRODUCT_TYPES[precision]
        return self

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
        """Write the model into a folder, for `load`; return the path of the file.

        The file has the weights, in `dtype`, and the signature: alphabets, notations, feature
        settings and statistics.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self, folder, dtype)
        return folder / MODEL_FILE

    def __repr__(self) -> str:
        signature = self.signature
        count = sum(weights.numel() for weights in self.network.parameters())
        reads = "sound" if signature.features else "frames"
        if signature.sources is not None:
            reads = f"{len(signature.sources)} symbols"
        writes = f"{len(signature.targets)} symbols"
        if signature.outputs is not None:
            writes = f"frames of {signature.outputs.size} numbers"
        return f"Model({self.config.network}: {reads} to {writes}, {count:,} weights)"


def group_sizes(
    device: torch.device, at_once: int = MOST_INPUTS, at_first: int | None = None
) -> GroupSizes:
    """Return the bounds of the groups of inputs that are held at once for a device."""
    first, most = (bound.get(device.type, bound["cuda"]) for bound in (FIRST_INPUTS, HELD_FRAMES))
    return GroupSizes(at_first or first, at_once, most)


def search_options(
    beam_width: int, n_best: int, with_timings: bool, options: dict[str, Any]
) -> SearchOptions:
    """Return the options of a call; raise TypeError for an unknown name."""
    width = widened(beam_width, n_best)
    known = [field.name for field in fields(SearchOptions)]
    for name in options:
        if name not in known:
            raise TypeError(f"a model has no option {name}; the options are {', '.join(known)}")
    return SearchOptions(width, n_best=n_best, with_timings=with_timings, **options)


def sorts_by_length(model: TrainedModel, options: SearchOptions) -> bool:
    """Return whether scores are log Pr(y) / |y|, or log Pr(y), as those of an ensemble always."""
    return options.length_normalised and not isinstance(model.network, Ensemble)


def search_examples(
    model: TrainedModel, examples: Sequence[Example], options: SearchOptions
) -> list[Hypotheses]:
    """Return the hypotheses of each example, in the order of the examples."""
    network, device = model.network, model.device
    found: list[Hypotheses] = [()] * len(examples)
    streams = can_stream(model)
    if streams and not options.greedy:
        long = [i for i, one in enumerate(examples) if _is_long(model, one)]
        for i in long:
            found[i] = search_long(model, examples[i].frames, options)
        if long:
            rest = [i for i in range(len(examples)) if i not in long]
            others = search_examples(model, [examples[i] for i in rest], options)
            for i, best in zip(rest, others, strict=True):
                found[i] = best
            return found
    unlabelled = [
        replace(example, labels=torch.empty(0)) if example.num_labels else example
        for example in examples
    ]
    most = SEARCHED_FRAMES.get(device.type, SEARCHED_FRAMES["cuda"])
    backend: Backend = "auto"
    if not streams:  # which have one result, whatever the input's length
        backend = _backend([example.num_frames for example in examples], options, device)
    for indices, batch in batches_of(model, unlabelled, most // network.rows_per_input(options)):
        with one_thread() if backend == "eager" else nullcontext():
            hypotheses = network.search(batch, options, backend=backend)
        for i, best in zip(indices, hypotheses, strict=True):
            found[i] = best
    return found


def _is_long(model: TrainedModel, example: Example) -> bool:
    """Return whether an example has more vectors than the lattice of a stream."""
    return example.num_vectors(model.config.pooling) > most_vectors(model)


def _backend(num_frames: list[int], options: SearchOptions, device: torch.device) -> Backend:
    """Return "eager" for little work on the CPU, which is done before kernels would be loaded."""
    small = SMALL_GREEDY if options.greedy else SMALL_BEAM
    little = max(num_frames, default=0) <= SHORT and sum(num_frames) <= small
    eager = device.type == "cpu" and little and not options.with_timings
    return "eager" if eager else "auto"


def batches_of(
    model: TrainedModel, examples: Sequence[Example], max_cells: int | None = None
) -> Iterator[tuple[list[int], Batch]]:
    """Yield batches of similar lengths on the model's device, each with its examples' indices."""
    max_cells = max_cells or CELLS.get(model.device.type, CELLS["cuda"])
    largest = max((max(1, e.num_frames) * (e.num_labels + 1) for e in examples), default=1)
    batches = Batches(examples, max(max_cells, largest), 0)
    for indices in batches.by_length():
        [batch] = batches.load([indices])
        yield indices, batch.to(model.device)
