"""TIMIT, the corpus of the paper's experiments, in three folder layouts.

The LDC's: `TRAIN/DR1/FCJF0/SA1.WAV`, in upper or lower case. Kaggle's: the same under `data`, with
RIFF copies `SA1.WAV.wav`. The corpus sample's: `dr1-fvmh0/sa1.wav`, without training and test sets.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transduce.data.pairs import Audio, DataError, Origin, Pair, Splits, skipping

# fmt: off
CORE_TEST_SPEAKERS = frozenset((
    "mdab0", "mwbt0", "felc0", "mtas1", "mwew0", "fpas0", "mjmp0", "mlnt0", "fpkt0", "mlll0",
    "mtls0", "fjlm0", "mbpm0", "mklt0", "fnlp0", "mcmj0", "mjdh0", "fmgd0", "mgrt0", "mnjm0",
    "fdhc0", "mjln0", "mpam0", "fmld0",
))
PAPER_COUNTS = {"training": 3696 - 184, "validation": 184, "test": 192}

# Lee and Hon (1989): TIMIT's 61 labels, and the maps from 61 to 48 and from 48 to 39.
PHONES = (
    "aa", "ae", "ah", "ao", "aw", "ax", "ax-h", "axr", "ay", "b", "bcl", "ch", "d", "dcl", "dh",
    "dx", "eh", "el", "em", "en", "eng", "epi", "er", "ey", "f", "g", "gcl", "h#", "hh", "hv",
    "ih", "ix", "iy", "jh", "k", "kcl", "l", "m", "n", "ng", "nx", "ow", "oy", "p", "pau", "pcl",
    "q", "r", "s", "sh", "t", "tcl", "th", "uh", "uw", "ux", "v", "w", "y", "z", "zh",
)
# fmt: on
GLOTTAL_STOP = "q"  # dropped from 48 and 39
TO_48 = {"ax-h": "ax", "axr": "er", "em": "m", "eng": "ng", "hv": "hh", "nx": "n", "ux": "uw"}
TO_48 |= dict.fromkeys(("bcl", "dcl", "gcl"), "vcl") | dict.fromkeys(("kcl", "pcl", "tcl"), "cl")
TO_48 |= {"h#": "sil", "pau": "sil"}
TO_39 = {"ao": "aa", "ax": "ah", "el": "l", "en": "n", "ix": "ih", "zh": "sh"}
TO_39 |= dict.fromkeys(("vcl", "cl", "epi"), "sil")

PhoneSet = Literal[61, 48, 39]


def fold(phones: Sequence[str], num_phones: PhoneSet = 39) -> tuple[str, ...]:
    """Map TIMIT's labels to the set of 48 or 39, dropping glottal stops; 61 keeps them all."""
    if num_phones not in (61, 48, 39):
        raise ValueError(f"num_phones must be 61, 48 or 39, not {num_phones}")
    if num_phones == 61:
        return tuple(phones)
    folded = (TO_48.get(phone, phone) for phone in phones if phone != GLOTTAL_STOP)
    return tuple(TO_39.get(phone, phone) if num_phones == 39 else phone for phone in folded)


@dataclass(frozen=True)
class Timit(Splits):
    """The paper's three sets, or parts of them if the corpus is partial."""

    seed: int  # of the random choice of the validation set

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of sentences in each set."""
        return {name: len(getattr(self, name)) for name in PAPER_COUNTS}

    @property
    def complete(self) -> bool:
        """Say whether each set has as many sentences as the paper's."""
        return self.counts == PAPER_COUNTS


def read_timit(
    folder: str | Path,
    num_phones: PhoneSet = 39,
    seed: int = 0,
    *,
    partial: bool = False,
    skipped: list[DataError] | None = None,
) -> Timit:
    """Read the paper's sets: 3696 sentences, 184 of them for validation, and the core test set.

    Leave out the dialect sentences (SA), which all speakers read. Refuse an incomplete corpus
    unless `partial`; its results must then not be called TIMIT. If all core test speakers are
    missing, as from the corpus sample, draw a quarter of the speakers as the test set.
    """
    folder = Path(folder)
    sentences = [s for s in _sentences(folder) if not s.name.startswith("sa")]
    if not sentences:
        raise Origin(folder).error("the folder has no .phn files; give the folder of the corpus")
    draw = random.Random(seed)
    speakers = sorted({s.speaker for s in sentences})
    no_core = partial and CORE_TEST_SPEAKERS.isdisjoint(speakers)
    test_speakers = draw.sample(speakers, len(speakers) // 4) if no_core else CORE_TEST_SPEAKERS
    training, test = [], []
    for sentence in sentences:
        with skipping(skipped):
            if sentence.speaker in test_speakers:
                test.append(sentence.pair(num_phones))
            elif sentence.part != "test" or no_core:  # other test speakers are in no set
                training.append(sentence.pair(num_phones))
    share = PAPER_COUNTS["validation"] / (PAPER_COUNTS["validation"] + PAPER_COUNTS["training"])
    held_out = set(draw.sample(range(len(training)), round(len(training) * share)))
    corpus = Timit(
        tuple(pair for i, pair in enumerate(training) if i not in held_out),
        tuple(training[i] for i in sorted(held_out)),
        tuple(test),
        seed,
    )
    if not corpus.complete and not partial:
        found = ", ".join(f"{count} {name}" for name, count in corpus.counts.items())
        wanted = ", ".join(f"{count} {name}" for name, count in PAPER_COUNTS.items())
        raise Origin(folder).error(
            f"this is not the whole of TIMIT: it has {found} sentences where TIMIT has {wanted}; "
            "restore the missing files, or set `partial`"
        )
    return corpus


@dataclass(frozen=True)
class _Sentence:
    """A recording, as its path describes it."""

    phones_file: Path
    audio_file: Path | None
    part: str  # train, test, or neither
    dialect: str
    speaker: str
    name: str

    def pair(self, num_phones: PhoneSet) -> Pair:
        """Read the phones; raise a DataError if they or the recording are missing."""
        origin = Origin(self.phones_file)
        if self.audio_file is None:
            raise origin.error("there is no .wav file beside it; restore the recording")
        phones = fold(_read_phones(self.phones_file), num_phones)
        if not phones:
            raise origin.error("the file has no phones; restore it from the corpus")
        name = f"{self.dialect}-{self.speaker}-{self.name}"
        return Pair(name, Audio(self.audio_file), phones, origin)


def _sentences(folder: Path) -> list[_Sentence]:
    """List the recordings under the folder, sorted by dialect, speaker and name."""
    if not folder.is_dir():
        raise Origin(folder).error("there is no such folder; give the folder of the corpus")
    found: dict[tuple[str, str, str], _Sentence] = {}
    for place, _, files in os.walk(folder, followlinks=True):
        names = {file.lower(): Path(place, file) for file in files}
        for name, path in names.items():
            if not name.endswith(".phn"):
                continue
            stem = name.removesuffix(".phn")
            # Prefer a RIFF copy, because the original may be compressed.
            audio = names.get(f"{stem}.wav.wav") or names.get(f"{stem}.wav")
            part, dialect, speaker = _parse_folder(path, folder)
            key = (dialect, speaker, stem)
            if key in found:
                raise Origin(path).error(
                    f"the sentence is also in {found[key].phones_file}; give the folder of one copy"
                )
            found[key] = _Sentence(path, audio, part, *key)
    return [found[key] for key in sorted(found)]


def _parse_folder(path: Path, folder: Path) -> tuple[str, str, str]:
    """Parse the part of the corpus, the dialect and the speaker from the folder of a file."""
    # The given folder may itself be TRAIN; the folders above it mean nothing.
    inside = path.absolute().relative_to(folder.absolute().parent).parent.as_posix().lower()
    speaker = re.search(r"(?:^|/)(dr[1-8])[-/]([fm][a-z]{3}\d)$", inside)
    if speaker is None:
        raise Origin(path).error(
            "its folder is not a dialect and a speaker, as DR1/FCJF0 or dr1-fcjf0; "
            "give the folder of the corpus as it was delivered"
        )
    # Take the last: the corpus may lie in a folder named test.
    parts = re.findall(r"(?:^|/)(train|test)(?=/)", inside)
    return parts[-1] if parts else "neither", speaker[1], speaker[2]


def _read_phones(path: Path) -> list[str]:
    """Read the third column of a .phn file; the first two are a phone's first and last sample."""
    phones = []
    for number, line in enumerate(path.read_text("latin-1").splitlines(), start=1):
        fields = line.split()
        if fields and (len(fields) != 3 or fields[2] not in PHONES):
            raise Origin(path, number).error(
                f"{line.strip()!r} is not a start, an end and one of TIMIT's 61 phones; "
                "restore the file from the corpus"
            )
        phones += fields[2:]
    return phones
