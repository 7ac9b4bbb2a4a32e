"""Streams: transcripts of sound or text that comes in pieces, equal to those of the whole.

On the CPU, however the input is cut into pieces, `finish` returns what the model returns for the
whole input with the same options, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from transduce.architectures import Transducer
from transduce.audio.cache import loudest
from transduce.audio.stream import FrameStream
from transduce.audio.windows import LONGEST
from transduce.data.pairs import DataError, Recording
from transduce.decoding.hypothesis import Hypothesis, Timing
from transduce.decoding.options import SearchOptions
from transduce.decoding.search import eval_mode, warn_of_bounds
from transduce.decoding.stream import MOST_VECTORS, BeamStream, GreedyStream, Progress
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import check_samples, float_numbers, frame_reader
from transduce.model.transcripts import Transcript
from transduce.transcription import PackedTranscription


@dataclass(frozen=True)
class Endpoints:
    """The rules by which an utterance has ended, in seconds; None turns a rule off.

    Silence is the time in which the best hypothesis has no label.
    """

    silence_after_speech: float | None = 1.0  # after the last label
    silence_alone: float | None = 5.0  # where there is no label yet
    length: float | None = 30.0  # of the utterance, whatever it has

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is not None and not (isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a positive number of seconds, not {seconds}")

    def met(self, seconds: float, last_label: float | None) -> bool:
        """Return whether a rule is met so many seconds after the start.

        `last_label` is the end of the last label's vector; None if there is no label.
        """
        silence = seconds if last_label is None else seconds - last_label
        rule = self.silence_alone if last_label is None else self.silence_after_speech
        is_silent = rule is not None and silence >= rule
        return is_silent or (self.length is not None and seconds >= self.length)


class Partial:
    """The transcript so far.

    `stable` are the labels with which all hypotheses of the beam begin: they never change, and nor
    do their peaks in later partial transcripts. `finish` gives the times of the whole lattice.
    `unstable` are the labels that the best hypothesis has after them.
    """

    def __init__(self, progress: Progress, form: _Form, seconds: float, is_endpoint: bool) -> None:
        self.is_endpoint = is_endpoint  # whether a rule of `Endpoints` is met
        self._progress, self._form, self._seconds = progress, form, seconds

    @property
    def stable(self) -> Transcript:
        """The labels that never change any more."""
        track, number = self._progress.track, self._progress.num_stable
        return self._transcript(tuple(track.labels[:number]), tuple(track.timings[:number]))

    @property
    def unstable(self) -> Transcript:
        """The further labels of the best hypothesis."""
        return self._transcript(self._progress.unstable, self._progress.unstable_timings)

    @property
    def num_stable(self) -> int:
        """The number of stable labels."""
        return self._progress.num_stable

    def _transcript(self, labels: tuple[int, ...], timings: tuple[Timing, ...]) -> Transcript:
        frames = tuple(timing.frame for timing in timings)
        # The probability of a part of an output is not known before its end.
        hypothesis = Hypothesis(labels, float("nan"), float("nan"), frames, timings)
        return self._form.transcript([hypothesis], self._seconds, None)

    def __str__(self) -> str:
        stable, unstable = self.stable, self.unstable
        return stable.separator.join(filter(None, [str(stable), str(unstable)]))

    def __repr__(self) -> str:
        end = ", an endpoint" if self.is_endpoint else ""
        return f"Partial({str(self.stable)!r}, {str(self.unstable)!r}{end})"


@dataclass(frozen=True, eq=False)
class _Form:
    """The form of a model's transcripts."""

    model: TrainedModel

    def transcript(
        self, hypotheses: Sequence[Hypothesis], seconds: float, recording: Recording | None
    ) -> Transcript:
        """Make a transcript of a stream's hypotheses."""
        signature = self.model.signature
        written = (tuple(hypotheses), signature.targets, signature.separator)
        if signature.features is None:
            return Transcript("frames" if signature.sources is None else "text", *written)
        times = vector_times(self.model)
        assert times is not None
        return Transcript("samples", *written, times[0], seconds, times[1], recording=recording)


def vector_times(model: TrainedModel) -> tuple[float, float] | None:
    """Return the seconds of a transcription vector and of vector 0's start; None without sound.

    A frame stands for the time around the middle of its window.
    """
    features = model.signature.features
    if features is None:
        return None
    return features.shift * model.config.pooling, features.margin


def most_vectors(model: TrainedModel) -> int:
    """Return the vectors of the longest lattice: two minutes of sound."""
    times = vector_times(model)
    return MOST_VECTORS if times is None else ceil(LONGEST / times[0]) + 1


def check_streams(model: TrainedModel) -> None:
    """Raise ValueError unless a model can transcribe an input while it comes in."""
    network = model.network
    if not isinstance(network, Transducer):
        kind = getattr(network, "kind", "an ensemble")
        raise ValueError(f"streams are for one transducer, not for {kind}; load one")
    if model.config.backwards:
        raise ValueError("the model reads its input from the end, so that it cannot stream")
    if model.config.bidirectional:
        raise ValueError(
            "the model is bidirectional and needs the whole input; stream with a forward one, such "
            "as english-phone-streamer"
        )
    if model.device.type != "cpu":
        raise ValueError(f"streams run on the CPU, and the model is on {model.device}; move it")


def can_stream(model: TrainedModel) -> bool:
    """Return whether a model can transcribe an input while it comes in."""
    try:
        check_streams(model)
    except ValueError:
        return False
    return True


_packed: WeakKeyDictionary[Transducer, tuple[tuple[tuple[int, int], ...], PackedTranscription]]
_packed = WeakKeyDictionary()


def _packed_transcription(network: Transducer) -> PackedTranscription:
    """Return the packed transcription network; streams share it until its weights change."""
    weights = network.transcription_network.parameters()
    versions = tuple((part.data_ptr(), part._version) for part in weights)
    known = _packed.get(network)
    if known is None or known[0] != versions:
        with eval_mode(network):
            known = versions, PackedTranscription(network.transcription_network)
        _packed[network] = known
    return known[1]


def search_long(
    model: TrainedModel, frames: Tensor, options: SearchOptions
) -> tuple[Hypothesis, ...]:
    """Search frames [T, D], or ids [T], that have too many vectors for one lattice."""
    assert isinstance(model.network, Transducer)
    network, prediction = model.network.transcription_network, model.network.prediction_network
    with eval_mode(model.network):
        [f] = network.forward_one_by_one(frames[None], torch.tensor([len(frames)]))
    search = BeamStream(prediction, options, most_vectors(model), follow=False)
    search.accept(f)
    return tuple(search.finish())


class Stream:
    """The transcription of one input that comes in pieces; `Model.stream` makes it.

    `accept` takes the next piece, `finish` returns the transcript, `reset` begins with another
    input. A stream keeps the weights that the model has when it is made. One thread at a time may
    use a stream; different streams may run in different threads.
    """

    def __init__(
        self,
        model: TrainedModel,
        options: SearchOptions,
        endpoints: Endpoints | None = None,
        *,
        follow: bool = True,  # find the times of stable labels while they come
    ) -> None:
        check_streams(model)
        if endpoints is not None and model.signature.features is None:
            raise ValueError("endpoints are for models of sound, whose times are seconds")
        assert isinstance(model.network, Transducer)
        self.model, self.options, self.endpoints = model, options, endpoints
        self._follow, self._form = follow, _Form(model)
        self._prediction_network = model.network.prediction_network
        self._network = _packed_transcription(model.network)
        self.reset()

    def reset(self) -> None:
        """Forget the input so far, and begin with another one."""
        signature = self.model.signature
        self._state = self._network.start(of_ids=signature.sources is not None)
        self._search: GreedyStream | BeamStream
        if self.options.greedy:
            self._search = GreedyStream(self._prediction_network, self.options)
        else:
            self._search = BeamStream(
                self._prediction_network,
                self.options,
                most_vectors(self.model),
                follow=self._follow,
            )
        self._frames: FrameStream | None = None
        if signature.features is not None and signature.statistics is not None:
            features = frame_reader(signature.features).features
            self._frames = FrameStream(features, signature.statistics)
        self._loudest, self._is_finished = 0.0, False

    @property
    def seconds(self) -> float:
        """The duration of the sound so far; 0 for text and frames."""
        features = self.model.signature.features
        if self._frames is None or features is None:
            return 0.0
        return self._frames.num_samples / features.sample_rate

    def accept(self, piece: np.ndarray | Tensor | Sequence[float] | str) -> Partial:
        """Take the next piece of the input; return the transcript so far.

        A piece is any number of samples [N] at the model's rate, of a type that the model itself
        takes; for a model of text, whole symbols; for a model of frames, frames [T, D]. Raise a
        DataError for a piece that cannot be read, and leave it out.
        """
        return Stream.accept_many([self], [piece])[0]

    @staticmethod
    def accept_many(
        streams: Sequence[Stream], pieces: Sequence[np.ndarray | Tensor | Sequence[float] | str]
    ) -> list[Partial]:
        """Take the next piece of each of several streams of one model at once.

        The network computes all of them together, which is faster; the results are the same. A
        piece that cannot be read raises a DataError before any stream has taken its own.
        """
        if len(streams) != len(pieces):
            raise ValueError(f"there are {len(pieces)} pieces for {len(streams)} streams")
        if len({id(stream) for stream in streams}) < len(streams):
            raise ValueError("a stream is given twice; give each its pieces one after the other")
        if len({id(stream._network) for stream in streams}) > 1:
            raise ValueError("the streams are of several models; group them by model")
        read = [
            stream._read(piece, f" of stream {i}" if len(streams) > 1 else "")
            for i, (stream, piece) in enumerate(zip(streams, pieces, strict=True))
        ]
        Stream._advance(streams, read, is_last=False)
        return [stream._partial() for stream in streams]

    @staticmethod
    def _advance(streams: Sequence[Stream], pieces: Sequence[Tensor], *, is_last: bool) -> None:
        """Run the network on all pieces together, and the search of each stream."""
        if not streams:
            return
        frames = [
            stream._next_frames(piece, is_last)
            for stream, piece in zip(streams, pieces, strict=True)
        ]
        states = [stream._state for stream in streams]
        vectors = streams[0]._network.advance(states, frames, [is_last] * len(streams))
        for stream, f in zip(streams, vectors, strict=True):
            stream._search.accept(f)

    def advance(self, piece: np.ndarray | Tensor | Sequence[float] | str) -> None:
        """Take the next piece as `accept` does, without a result."""
        Stream._advance([self], [self._read(piece)], is_last=False)

    def _next_frames(self, piece: Tensor, is_last: bool) -> Tensor:
        """Return the frames that a piece completes, normalised, or its ids."""
        signature = self.model.signature
        if self._frames is not None:
            self._loudest = max(self._loudest, loudest(piece))
            return self._frames.accept(piece, is_last=is_last)
        if signature.statistics is not None:
            return signature.statistics.normalise(piece)
        return piece

    def _read(self, piece: np.ndarray | Tensor | Sequence[float] | str, where: str = "") -> Tensor:
        """Return a piece as float32 samples or frames, or ids; raise an error if it is neither."""
        signature = self.model.signature
        if self._is_finished:
            raise ValueError(f"the input{where} has finished; call reset before the next one")
        try:
            if signature.sources is not None:
                return self._ids(piece)
            if isinstance(piece, str):
                raise DataError("the model reads sound, not text; give it samples [N]")
            numbers = float_numbers(piece if isinstance(piece, Tensor) else np.asarray(piece))
            if signature.features is None:
                return self._checked_frames(numbers)
            if numbers.ndim != 1:
                raise DataError(f"a piece of sound must be samples [N], not {list(numbers.shape)}")
            if len(numbers):
                check_samples(numbers)
            return numbers
        except DataError as error:
            raise DataError(
                f"the piece{where} was left out: {error}" if where else f"{error}"
            ) from None

    def _checked_frames(self, frames: Tensor) -> Tensor:
        size = self.model.signature.input_size
        if frames.ndim != 2 or frames.shape[1] != size:
            raise DataError(f"a piece must be frames [T, {size}], not {list(frames.shape)}")
        if not frames.isfinite().all():
            raise DataError("the frames have NaN or an infinite number; compute them again")
        return frames

    def _ids(self, text: object) -> Tensor:
        """Return the ids of the symbols of a piece of text."""
        signature = self.model.signature
        if not isinstance(text, str) or signature.source_notation is None:
            raise DataError(f"the model reads text, not {type(text).__name__}; give it text")
        if not (symbols := signature.source_notation.symbols(text)):
            return torch.empty(0, dtype=torch.int64)
        return signature.example(symbols, unknown="refuse").frames

    def _partial(self) -> Partial:
        progress = self._search.progress()
        is_endpoint = False
        times = vector_times(self.model)
        if self.endpoints is not None and times is not None:
            track = progress.track.timings[: progress.num_stable][-1:]
            last = (*track, *progress.unstable_timings)[-1:]
            ended = (last[0].frame + 1) * times[0] if last else None
            is_endpoint = self.endpoints.met(progress.num_vectors * times[0], ended)
        return Partial(progress, self._form, self.seconds, is_endpoint)

    def finish(self) -> Transcript:
        """Return the transcript of the whole input; nothing of its end is lost."""
        if self._is_finished:
            raise ValueError("the input has finished; call reset before the next one")
        features = self.model.signature.features
        Stream._advance([self], [self._nothing()], is_last=True)
        self._is_finished = True
        hypotheses = self._search.finish()
        number = self._search.num_bounded
        bound = self.options.max_labels_per_frame
        num_vectors = self._search.progress().num_vectors if number else 0
        warn_of_bounds([number], [num_vectors], bound, ["the stream"])
        recording = None
        if features is not None:
            recording = Recording(self.seconds, features.sample_rate, self._loudest)
        return self._form.transcript(hypotheses, self.seconds, recording)

    def _nothing(self) -> Tensor:
        """Return an empty piece."""
        signature = self.model.signature
        if signature.sources is not None:
            return torch.empty(0, dtype=torch.int64)
        return torch.empty(0) if self._frames is not None else torch.empty(0, signature.input_size)
