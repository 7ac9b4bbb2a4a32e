"""Forced alignment: when each word and phone of a known text is said in a sound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.alignment.boundaries import Heard, boundaries, hmm_of
from transduce.alignment.detours import LabelPath
from transduce.alignment.long import Stretch, find_stretches
from transduce.alignment.pronunciations import Lexicon, Word, english_lexicon
from transduce.alignment.result import AlignedPhone, AlignedWord, Alignment
from transduce.alignment.variants import choose_pronunciations, word_fits
from transduce.architectures import Transducer
from transduce.audio.cache import read_ahead
from transduce.audio.sound import LongSound, read_wave
from transduce.audio.windows import Window
from transduce.data.batches import Example
from transduce.data.pairs import Audio, DataError, Pair
from transduce.decoding.ensemble import Ensemble
from transduce.decoding.hypothesis import Labels
from transduce.decoding.options import SearchOptions
from transduce.decoding.search import eval_mode, run_greedy_search, run_search, transcribe
from transduce.model.model import Model
from transduce.model.signature import Sampled, Source, float_numbers
from transduce.model.stream import vector_times

SHORT = 30.0  # seconds: longer sound is cut into stretches, because a lattice grows with its square
GROUP = 16  # sounds at once: full batches of the network against the time to the first result
WINDOWS = 4  # of a long sound at once: the same, against memory
MOST_PHONES = 30.0  # a second: fast speech has 20
# What the search without a text offers in place of words: more finds more that fit better.
FREE = SearchOptions(10, n_best=10, length_normalised=False, with_timings=False)
GREEDY = SearchOptions(with_timings=False)  # of long sound, to find words in it
# The text is refused if the phones that are heard without it are e^OTHER times as probable for each
# of its phones, and most of its words do not fit. Of 125 right texts of LibriSpeech the worst had
# 1.7, of 120 wrong texts the best 4.0.
OTHER = 2.8
LEAST_FOUND = 0.5  # the share of the words of a long text that must be found in the sound
QUIET = 0.001  # the largest sample of silence
SHOWN = 12  # phones that an error shows
JOINED = 0.1  # seconds: a shorter gap between two stretches is no pause


class Task(NamedTuple):
    """A sound, and its text or its phones."""

    sound: Source
    text: str | None = None
    phones: str | Sequence[str] | None = None
    name: str | None = None  # of the sound, if it is not a file


class _Ready(NamedTuple):
    """A task whose sound is read and whose words have pronunciations."""

    task: Task
    words: tuple[Word, ...]
    sampled: Sampled | None  # None if the sound is long


class _Heard(NamedTuple):
    """A sound as the model hears it."""

    vectors: Tensor  # [T, K+1], f
    free: list[Labels]  # the most probable label sequences without a text


def align(
    model: Model,
    sound: Source,
    *,
    text: str | None = None,
    phones: str | Sequence[str] | None = None,
) -> Alignment:
    """Return when each word and phone of a text, or of phones, is said in a sound.

    align(load("english-phone-recogniser"), "hello.wav", text="hello world")

    Raise a DataError if the sound cannot be read, or the text is not of this sound.
    """
    [found] = Aligner(model).align_many([Task(sound, text, phones)])
    if isinstance(found, DataError):
        raise found
    return found


class Aligner:
    """A transducer of phones that aligns texts with sounds."""

    def __init__(self, model: Model, lexicon: Lexicon | None = None) -> None:
        from transduce.decoding.cpu.prediction import packed_weights  # it needs Numba

        check_aligns(model)
        self.model, self._lexicon = model, lexicon
        assert isinstance(model.network, Transducer)
        self._network = model.network
        self._weights = packed_weights(model.network.prediction_network)
        times = vector_times(model)
        assert times is not None
        self._step = times[0]  # seconds of a vector

    def align_many(self, tasks: Iterable[Task]) -> Iterator[Alignment | DataError]:
        """Yield the alignment of each task, in order, or the DataError of one that fails.

        Sounds are read ahead, and several are computed at once. The network is in eval mode until
        the last one is.
        """
        threads = torch.get_num_threads()
        with (
            eval_mode(self._network),
            ThreadPoolExecutor(threads) as readers,
            ThreadPoolExecutor(threads) as workers,
        ):
            ready = read_ahead(readers, self._read, tasks, 2 * GROUP)
            while group := list(islice(ready, GROUP)):
                yield from self._align_group(group, workers)

    # --- Texts and sounds ---

    def _read(self, task: Task) -> _Ready | DataError:
        """Read a sound, and find the pronunciations of its words."""
        try:
            words = self._words(task)
            try:
                sampled = self.model.signature.sampled(task.sound, name=task.name, longest=SHORT)
            except LongSound:
                return _Ready(task, words, None)
            if sampled is None:
                raise DataError("frames have no sound to align; give a sound file or samples [N]")
            self._check_length(words, sampled.recording.seconds)
            return _Ready(task, words, sampled)
        except DataError as error:
            return error

    def _words(self, task: Task) -> tuple[Word, ...]:
        """Return the words of a task; errors name its line in a manifest."""
        try:
            return self._pronounced(task)
        except DataError as error:
            if isinstance(task.sound, Pair):
                raise task.sound.origin.error(str(error)) from None
            raise

    def _pronounced(self, task: Task) -> tuple[Word, ...]:
        """Return the words of a task; of phones, each phone is a word."""
        if (task.text is None) == (task.phones is None):
            raise DataError("give either a text or phones")
        targets = self.model.signature.targets
        if task.text is not None:
            if self._lexicon is None:
                self._lexicon = english_lexicon()
            words = self._lexicon.words(task.text)
            known = set(targets.symbols)
            if not all(known.issuperset(phones) for w in words for phones in w.pronunciations):
                raise DataError(
                    "the model does not write the 39 ARPAbet phones of English, so that it can "
                    "align no text; give phones in its own symbols"
                )
            return words
        phones = task.phones.split() if isinstance(task.phones, str) else list(task.phones or ())
        if not phones:
            raise DataError("there are no phones; write those that are said")
        if unknown := targets.unknown(phones):
            raise DataError(
                f"{unknown[0]!r} is no phone that the model knows; it knows "
                f"{' '.join(targets.symbols)}"
            )
        return tuple(Word(phone, ((phone,),)) for phone in phones)

    def _check_length(self, words: Sequence[Word], seconds: float) -> None:
        shortest = sum(min(map(len, word.pronunciations)) for word in words)
        if shortest > MOST_PHONES * seconds:
            raise DataError(
                f"the text has {shortest} phones, more than can be said in {seconds:.1f} seconds; "
                "give the text of this recording"
            )

    # --- Short sounds, several at once ---

    def _align_group(
        self, group: Sequence[_Ready | DataError], workers: ThreadPoolExecutor
    ) -> Iterator[Alignment | DataError]:
        """Yield the alignment of each task of a group."""
        short = [one.sampled for one in group if isinstance(one, _Ready) and one.sampled]
        heard = iter(self._hear(short))
        jobs = [
            workers.submit(self._align_short, one, next(heard))
            if isinstance(one, _Ready) and one.sampled
            else one
            for one in group
        ]
        for job in jobs:
            if isinstance(job, DataError):
                yield job
            elif isinstance(job, _Ready):
                yield self._align_long(job, workers)
            else:
                yield job.result()

    def _hear(self, sounds: Sequence[Sampled]) -> list[_Heard | DataError]:
        """Return the vectors of each sound, and what a search without a text hears."""
        framed = self.model.signature.framed(sounds, self.model.device)
        vectors = self._transcribe([one.frames for one in framed if isinstance(one, Example)])
        heard = iter(map(_Heard, vectors, self._free(vectors)))
        return [next(heard) if isinstance(one, Example) else one for one in framed]

    @torch.no_grad()
    def _transcribe(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return f [T, K+1] of each sound's frames."""
        if not frames:
            return []
        lengths = torch.tensor([len(one) for one in frames], device=self.model.device)
        padded = pad_sequence(list(frames), batch_first=True).to(self.model.device)
        return transcribe(self._network, padded, lengths)

    def _free(self, vectors: Sequence[Tensor]) -> list[list[Labels]]:
        """Return the most probable label sequences of each sound, without a text."""
        if not vectors:
            return []
        network = self._network.prediction_network
        found = run_search(list(vectors), network, None, FREE, "auto")
        return [[hypothesis.labels for hypothesis in hypotheses] for hypotheses in found]

    def _align_short(self, ready: _Ready, heard: _Heard | DataError) -> Alignment | DataError:
        if isinstance(heard, DataError):
            return heard
        assert ready.sampled is not None
        wave, recording, pair = ready.sampled.wave, ready.sampled.recording, ready.sampled.pair
        if not heard.free[0] or recording.loudest < QUIET:
            return _nothing_said(pair)
        stretch = Heard(lambda: wave, heard.vectors, recording.seconds)
        words, path = self._align_stretch(ready.words, stretch, heard.free)
        free = path.with_labels(heard.free[0]).log_likelihood
        unlikely = free - path.log_likelihood > OTHER * len(path.labels)
        if unlikely and 2 * sum(not word.fits for word in words) > len(words):
            return self._other_text(pair, heard.free[0])
        return self._alignment(ready, words, pair, recording.seconds)

    def _other_text(self, pair: Pair, heard: Labels) -> DataError:
        """Return the error of a text that was not said."""
        first = " ".join(self.model.signature.targets.decode(heard[:SHOWN]))
        rest = " ..." if len(heard) > SHOWN else ""
        return DataError(
            f"{pair.origin}: the sound does not fit the text; its phones sound like {first}{rest}; "
            "give the text of this recording"
        )

    def _alignment(
        self, ready: _Ready, words: Sequence[AlignedWord], pair: Pair, seconds: float
    ) -> Alignment:
        path = pair.source.path if isinstance(pair.source, Audio) else None
        return Alignment(pair.name, seconds, tuple(words), ready.task.text is not None, path)

    def _align_stretch(
        self, words: Sequence[Word], heard: Heard, free: list[Labels]
    ) -> tuple[list[AlignedWord], LabelPath]:
        """Align words with the whole of a stretch of sound; return their path too."""
        targets = self.model.signature.targets
        variants = [[tuple(targets.encode(p)) for p in word.pronunciations] for word in words]
        chosen = choose_pronunciations(heard.vectors, self._weights, variants)
        fits = word_fits(chosen.path, chosen.spans, free)
        word_starts = {first for first, _ in chosen.spans}
        times = boundaries(self.model, heard, chosen.path.labels, word_starts)
        symbols = targets.decode(chosen.path.labels)
        phones = [AlignedPhone(*one) for one in zip(symbols, times, strict=True)]
        aligned = [
            AlignedWord(
                word.text,
                tuple(phones[slice(*span)]),
                fit.log_ratio,
                tuple(targets.decode(fit.heard)),
            )
            for word, span, fit in zip(words, chosen.spans, fits, strict=True)
        ]
        return self._with_second_opinion(aligned, heard), chosen.path

    def _with_second_opinion(self, words: Sequence[AlignedWord], heard: Heard) -> list[AlignedWord]:
        """Ask the hidden Markov model, if there is one, about the phones of doubtful words."""
        hmm = hmm_of(self.model)
        if hmm is None or not any(word.doubtful for word in words):
            return list(words)
        from transduce.alignment.acoustics import phone_deficits  # it needs Numba

        frames, _ = hmm.frames_and_levels(heard.read())

        def deficit(word: AlignedWord) -> float:
            spans = [(p.interval.start.time, p.interval.end.time) for p in word.phones]
            return sum(phone_deficits(hmm, frames, [p.symbol for p in word.phones], spans))

        return [
            replace(word, acoustic_deficit=deficit(word)) if word.doubtful else word
            for word in words
        ]

    # --- Long sounds, in stretches ---

    def _align_long(self, ready: _Ready, workers: ThreadPoolExecutor) -> Alignment | DataError:
        """Align a long sound: hear all of it, find the words in it, and align each stretch."""
        signature, targets = self.model.signature, self.model.signature.targets
        parts, seconds, pair = list[Tensor](), 0.0, None
        windows = signature.windows(ready.task.sound, self._step)
        read = partial(self._read_window, ready.task.name)
        readable = read_ahead(workers, read, windows, 2 * WINDOWS)
        while group := list(islice(readable, WINDOWS)):
            sounds, examples = list[Sampled](), list[Example]()
            for sampled in group:
                if isinstance(sampled, DataError):
                    return sampled
                [example] = signature.framed([sampled], self.model.device)
                if isinstance(example, DataError):
                    return example
                sounds.append(sampled)
                examples.append(example)
            vectors = self._transcribe([example.frames for example in examples])
            for sampled, part in zip(sounds, vectors, strict=True):
                parts.append(_of_length(part, round(sampled.recording.seconds / self._step)))
                seconds += sampled.recording.seconds
            pair = pair or sounds[0].pair
        assert pair is not None
        try:
            self._check_length(ready.words, seconds)
        except DataError as error:
            return error
        network = self._network.prediction_network
        found = run_greedy_search(parts, network, None, GREEDY, "auto")
        offsets = accumulate(map(len, parts), initial=0)
        frames = [t + first for one, first in zip(found, offsets, strict=False) for t in one.frames]
        heard = tuple(label for one in found for label in one.labels)
        if not heard:
            return _nothing_said(pair)
        usual = [tuple(targets.encode(word.pronunciations[0])) for word in ready.words]
        whole = torch.cat(parts)
        stretches = find_stretches(usual, heard, frames, len(whole))
        if sum(one.last_word - one.first_word for one in stretches) < LEAST_FOUND * len(usual):
            return self._other_text(pair, heard)
        align = partial(self._align_part, ready, whole, seconds)
        aligned = list(workers.map(align, stretches))
        words = _assembled(ready.words, stretches, aligned)
        return self._alignment(ready, words, pair, seconds)

    def _read_window(self, name: str | None, window: Window[Source]) -> Sampled | DataError:
        try:
            sampled = self.model.signature.sampled(window.sound, name=name)
        except DataError as error:
            return error
        assert sampled is not None
        return sampled

    def _align_part(
        self, ready: _Ready, vectors: Tensor, seconds: float, stretch: Stretch
    ) -> list[AlignedWord]:
        """Align one stretch of a long sound, with times in the whole of it."""
        first, last = stretch.first_vector, stretch.last_vector
        part, start = vectors[first:last], first * self._step
        duration = seconds - start if last == len(vectors) else (last - first) * self._step
        read = partial(self._samples, ready.task.sound, start, duration)
        [free] = self._free([part])
        words = ready.words[stretch.first_word : stretch.last_word]
        aligned, _ = self._align_stretch(words, Heard(read, part, duration), free)
        return [
            replace(word, phones=tuple(phone.shifted(start) for phone in word.phones))
            for word in aligned
        ]

    def _samples(self, sound: Source, start: float, seconds: float) -> Tensor:
        """Read the samples of a part of a long sound."""
        features = self.model.signature.features
        assert features is not None
        if isinstance(sound, np.ndarray | Tensor):
            first, last = (round(t * features.sample_rate) for t in (start, start + seconds))
            return float_numbers(sound)[first:last]
        source = sound.source if isinstance(sound, Pair) else sound
        audio = source if isinstance(source, Audio) else Audio(Path(str(source)))
        part = replace(audio, start=(audio.start or 0.0) + start, duration=seconds)
        return read_wave(part, features.sample_rate, convert=True)


def _of_length(vectors: Tensor, number: int) -> Tensor:
    """Repeat the last vector, or leave it out, so that a window has as many as its time."""
    missing = number - len(vectors)
    return (
        torch.cat([vectors, vectors[-1:].expand(missing, -1)]) if missing > 0 else vectors[:number]
    )


def _assembled(
    words: Sequence[Word], stretches: Sequence[Stretch], aligned: Sequence[list[AlignedWord]]
) -> list[AlignedWord]:
    """Return all words: those of the stretches, and those between them, which were not found."""
    found = [AlignedWord(word.text, (), 0.0, ()) for word in words]
    for stretch, part in zip(stretches, aligned, strict=True):
        found[stretch.first_word : stretch.last_word] = part
    for before, after in pairwise(stretches):
        if before.last_word == after.first_word and before.last_vector == after.first_vector:
            left, right = found[before.last_word - 1], found[after.first_word]
            found[before.last_word - 1] = _joined(left, right)
    return found


def _joined(left: AlignedWord, right: AlignedWord) -> AlignedWord:
    """Let a word last until the next one, unless there is a pause between them."""
    last, following = left.phones[-1], right.phones[0].interval.start
    if following.time - last.interval.end.time >= JOINED:
        return left
    interval = last.interval._replace(end=following)
    return replace(left, phones=(*left.phones[:-1], replace(last, interval=interval)))


def _nothing_said(pair: Pair) -> DataError:
    return DataError(
        f"{pair.origin}: nothing in the sound is recognised as speech; give a recording of the text"
    )


def check_aligns(model: Model) -> None:
    """Raise ValueError unless a model can align texts with sound."""
    network = model.network
    if not isinstance(network, Transducer):
        kind = "an ensemble" if isinstance(network, Ensemble) else f"a {network.kind} network"
        raise ValueError(f"{kind} cannot align; give a transducer of sound")
    if network.backwards:
        raise ValueError("a transducer that reads backwards cannot align; give another one")
    if model.signature.features is None:
        raise ValueError("the model does not take sound, so it cannot align; give one that does")
