"""Phone boundaries of forced alignment against the hand labels of TIMIT.

    python benchmarks/boundaries.py TIMIT [--emissions | --boundaries MODULE:FUNCTION] [--classes]

FUNCTION takes samples [N] of 16 kHz, a sequence of phones (of the 39 ARPAbet phones) and the
indices of those that start words, and returns the (start, end) of each phone in seconds; without
it, the boundaries of `transduce align` are measured, and with --emissions those of the shipped
recogniser alone. --classes prints the errors by the phones on either side too, and --json FILE
writes the measures to a file. TIMIT is the folder of the corpus or of its sample. Nothing may be
fitted to it.

**Reference.** The 61 labels become ARPAbet phones. A closure and the burst after it are one phone,
and a closure alone is its stop; before ch and jh a closure belongs to the affricate. Silences (h#,
pau, epi) and glottal stops (q) are left out, so that they are pauses. Syllabic el, em, en, eng are
L, M, N, NG; the flap dx is T; ix is IH; ax and ax-h are AH; axr is ER.

**Boundaries** are the start of each phone, and the end of each phone before a pause.

**From the reference phones**, the function gets these phones, each as a word of its own, and each
boundary has its error. **From text**, it gets the pronunciations that the recogniser's lattice
chooses among CMUdict's variants of the sentence's words. The phones are matched with the reference
by edit distance; errors are those of equal phones, the ends of those that the reference puts before
a pause. Precision, recall and F1 count all boundaries of both sides, matched in order, one to one,
within 20 ms.

**Within the bounds** are the starts of reference phones between the 5 % and 95 % quantiles that the
aligner gives.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

from transduce.alignment.boundaries import Boundaries, Heard, boundaries, emission_boundaries
from transduce.alignment.pronunciations import english_lexicon
from transduce.alignment.variants import choose_pronunciations
from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio
from transduce.decoding.cpu.prediction import packed_weights
from transduce.decoding.search import transcribe
from transduce.model.model import Model, load

RATE = 16_000
TOLERANCES = 0.010, 0.020, 0.025, 0.050
AGREEMENT = 0.020  # of boundaries that count as found
SILENT = "h#", "pau", "epi", "q"
CLOSURES = {f"{stop}cl": stop.upper() for stop in "bdgkpt"}
BURSTS = {closure: (stop,) for closure, stop in CLOSURES.items()}
BURSTS |= {"dcl": ("D", "JH"), "tcl": ("T", "CH")}
TO_ARPABET = {"ax": "AH", "ax-h": "AH", "axr": "ER", "dx": "T", "el": "L", "em": "M", "en": "N"}
TO_ARPABET |= {"eng": "NG", "hv": "HH", "ix": "IH", "nx": "N", "ux": "UW"}

Spans = Sequence[tuple[float, float]]
BoundaryFunction = Callable[[torch.Tensor, Sequence[str], Collection[int]], Spans]
KINDS = {
    "stop": "B CH D G JH K P T",
    "fricative": "DH F HH S SH TH V Z ZH",
    "nasal": "M N NG",
    "liquid or glide": "L R W Y",
    "vowel": "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW",
}
KIND_OF = {phone: kind for kind, phones in KINDS.items() for phone in phones.split()}
GROSS = 0.050  # seconds


class Segment(NamedTuple):
    """A phone of the reference, in seconds."""

    phone: str
    start: float
    end: float


class Sentence(NamedTuple):
    """A recording with its words and hand-labelled phones."""

    name: str
    samples: torch.Tensor  # [N]
    text: str
    segments: list[Segment]


def reference(rows: Sequence[tuple[int, int, str]]) -> list[Segment]:
    """Turn the rows of a .phn file into segments: closures joined with bursts, no silence."""
    found: list[Segment] = []
    closure = ""  # the label of the row before, if it was a closure
    for first, last, label in rows:
        phone = CLOSURES.get(label) or TO_ARPABET.get(label, label.upper())
        start, end = first / RATE, last / RATE
        if closure and label not in CLOSURES and phone in BURSTS[closure]:
            found[-1] = Segment(phone, found[-1].start, end)
        elif label not in SILENT:
            found.append(Segment(phone, start, end))
        closure = label if label in CLOSURES else ""
    return found


def sentences(folder: Path) -> Iterator[Sentence]:
    """Read all sentences below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".phn")
    for file in files:
        rows = [line.split() for line in file.read_text().splitlines()]
        wave = next(p for p in (file.with_suffix(s) for s in (".wav", ".WAV")) if p.exists())
        words = next(p for p in (file.with_suffix(s) for s in (".txt", ".TXT")) if p.exists())
        yield Sentence(
            f"{file.parent.name}/{file.stem}",
            read_wave(Audio(wave), RATE, convert=True),
            " ".join(words.read_text().split()[2:]),
            reference([(int(first), int(last), label) for first, last, label in rows]),
        )


def edges(spans: Spans) -> list[float]:
    """Return the start of each phone, and the end of each phone before a pause."""
    found = [start for start, _ in spans]
    found += [end for (_, end), (start, _) in pairwise(spans) if start > end + 1e-9]
    return sorted([*found, *(end for _, end in spans[-1:])])


def matches(found: Sequence[float], wanted: Sequence[float]) -> int:
    """Return the most pairs of boundaries within AGREEMENT of each other, both lists sorted."""
    i = j = count = 0
    while i < len(found) and j < len(wanted):
        if abs(found[i] - wanted[j]) <= AGREEMENT + 1e-9:
            count, i, j = count + 1, i + 1, j + 1
        elif found[i] < wanted[j]:
            i += 1
        else:
            j += 1
    return count


class Scores:
    """The errors of boundaries, summed over sentences."""

    def __init__(self) -> None:
        self.errors: list[float] = []  # found minus wanted, seconds
        self.kinds: list[tuple[str, str]] = []  # of sound before and after each boundary
        self.num_found = self.num_wanted = self.num_matched = 0
        self.num_phones = self.num_equal = 0

    def add(self, phones: Sequence[str], spans: Spans, wanted: list[Segment]) -> None:
        """Compare the phones and spans of a sentence with its reference."""
        pairs = _equal_phones(phones, [segment.phone for segment in wanted])
        self.num_phones, self.num_equal = self.num_phones + len(wanted), self.num_equal + len(pairs)
        for i, j in pairs:
            kind = KIND_OF.get(wanted[j].phone, "other")
            joined = j > 0 and wanted[j].start <= wanted[j - 1].end
            before = KIND_OF.get(wanted[j - 1].phone, "other") if joined else "pause"
            self.errors.append(spans[i][0] - wanted[j].start)
            self.kinds.append((before, kind))
            if j + 1 == len(wanted) or wanted[j + 1].start > wanted[j].end:
                self.errors.append(spans[i][1] - wanted[j].end)
                self.kinds.append((kind, "pause"))
        ours, theirs = edges(spans), edges([(one.start, one.end) for one in wanted])
        self.num_found, self.num_wanted = self.num_found + len(ours), self.num_wanted + len(theirs)
        self.num_matched += matches(ours, theirs)

    def table(self) -> dict[str, float]:
        """Return the measures; times in milliseconds, shares in percent."""
        errors = np.array(self.errors)
        precision = self.num_matched / max(1, self.num_found)
        recall = self.num_matched / max(1, self.num_wanted)
        return {
            "boundaries": len(errors),
            "equal phones %": 100 * self.num_equal / self.num_phones,
            "mean absolute error ms": 1000 * float(np.abs(errors).mean()),
            "median error ms": 1000 * float(np.median(errors)),
            **{
                f"within {1000 * t:.0f} ms %": 100 * float((np.abs(errors) <= t + 1e-9).mean())
                for t in TOLERANCES
            },
            "precision %": 100 * precision,
            "recall %": 100 * recall,
            "F1 %": 200 * precision * recall / max(1e-9, precision + recall),
        }

    def table_of_kinds(self) -> str:
        """Return a Markdown table of the errors by the kinds of sound on either side."""
        groups = defaultdict[tuple[str, str], list[float]](list)
        for kinds, error in zip(self.kinds, self.errors, strict=True):
            groups[kinds].append(error)
        total = sum(map(abs, self.errors))
        titles = "boundaries", "mean absolute error ms", "median error ms"
        titles += "within 20 ms %", "over 50 ms %", "share of all error %"
        lines = [f"| | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
        for (before, after), own in sorted(groups.items(), key=lambda g: -sum(map(abs, g[1]))):
            sizes = np.abs(own)
            numbers = 1000 * sizes.mean(), 1000 * np.median(own), 100 * (sizes <= AGREEMENT).mean()
            numbers += 100 * (sizes > GROSS).mean(), 100 * sizes.sum() / total
            shown = " | ".join(f"{number:.1f}" for number in numbers)
            lines.append(f"| {before} → {after} | {len(own)} | {shown} |")
        return "\n".join(lines)


def _equal_phones(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """Return the indices of phones that the edit distance matches and that are equal."""
    return [
        (block.src_start + i, block.dest_start + i)
        for block in Levenshtein.opcodes(list(ours), list(theirs))
        if block.tag == "equal"
        for i in range(block.src_end - block.src_start)
    ]


class Recogniser:
    """The shipped recogniser: phones of a text, and the boundaries of phones."""

    def __init__(self, model: Model, emissions: bool = False) -> None:
        self.model = model
        self._emissions = emissions
        self._weights = packed_weights(model.network.prediction_network)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def vectors(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the transcription vectors of samples; remember the last ones."""
        if self._last is None or self._last[0] is not samples:
            frames = self.model.signature.example(samples).frames
            lengths = torch.tensor([len(frames)])
            with torch.no_grad():
                [f] = transcribe(self.model.network, frames[None], lengths)
            self._last = samples, f
        return self._last[1]

    def phones(self, samples: torch.Tensor, text: str) -> tuple[list[str], set[int]]:
        """Return the pronunciation of a text that the lattice chooses, and where words start."""
        alphabet = self.model.signature.targets
        words = [
            [tuple(alphabet.encode(phones)) for phones in word.pronunciations]
            for word in english_lexicon().words(text)
        ]
        chosen = choose_pronunciations(self.vectors(samples), self._weights, words)
        return alphabet.decode(chosen.path.labels), {first for first, _ in chosen.spans}

    def intervals(
        self, samples: torch.Tensor, phones: Sequence[str], word_starts: Collection[int]
    ) -> list[Boundaries]:
        """Return the interval of each phone, with its bounds."""
        labels = tuple(self.model.signature.targets.encode(phones))
        heard = Heard(lambda: samples, self.vectors(samples), len(samples) / RATE)
        if self._emissions:
            return emission_boundaries(self.model, heard, labels)
        return boundaries(self.model, heard, labels, word_starts)

    def __call__(
        self, samples: torch.Tensor, phones: Sequence[str], word_starts: Collection[int]
    ) -> Spans:
        """Return the start and end of each phone."""
        found = self.intervals(samples, phones, word_starts)
        return [(one.start.time, one.end.time) for one in found]


def share_within_bounds(corpus: Sequence[Sentence], recogniser: Recogniser) -> float:
    """Return the share of the reference's starts that lie within the bounds of ours."""
    within = [
        found.start.earliest <= segment.start <= found.start.latest
        for one in corpus
        for segment, found in zip(
            one.segments,
            recogniser.intervals(
                one.samples, [segment.phone for segment in one.segments], range(len(one.segments))
            ),
            strict=True,
        )
    ]
    return float(np.mean(within))


def measure(
    corpus: Sequence[Sentence], recogniser: Recogniser, function: BoundaryFunction
) -> dict[str, Scores]:
    """Return the scores of a boundary function, from reference phones and from text."""
    by_phones, by_text = Scores(), Scores()
    for one in corpus:
        phones = [segment.phone for segment in one.segments]
        spans = function(one.samples, phones, range(len(phones)))
        by_phones.add(phones, spans, one.segments)
        chosen, word_starts = recogniser.phones(one.samples, one.text)
        by_text.add(chosen, function(one.samples, chosen, word_starts), one.segments)
    return {"from reference phones": by_phones, "from text": by_text}


def main() -> None:
    """Print the table of a boundary function."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("corpus", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--boundaries", help="MODULE:FUNCTION; those of the aligner by default")
    what.add_argument("--emissions", action="store_true", help="measure the recogniser alone")
    parser.add_argument("--classes", action="store_true", help="print errors by class of boundary")
    parser.add_argument("--limit", type=int, help="measure the first N sentences only")
    parser.add_argument("--json", type=Path, help="write the measures to a file too")
    arguments = parser.parse_args()
    recogniser = Recogniser(load("english-phone-recogniser"), arguments.emissions)
    function: BoundaryFunction = recogniser
    if arguments.boundaries:
        sys.path.insert(0, str(Path.cwd()))
        module, _, name = arguments.boundaries.partition(":")
        function = getattr(import_module(module), name)
    corpus = list(sentences(arguments.corpus))[: arguments.limit]
    scores = measure(corpus, recogniser, function)
    tables = {name: one.table() for name, one in scores.items()}
    print(f"{len(corpus)} sentences\n\n| | {' | '.join(tables)} |\n|---|{'---|' * len(tables)}")
    for measured in next(iter(tables.values())):
        numbers = " | ".join(f"{table[measured]:.1f}" for table in tables.values())
        print(f"| {measured} | {numbers} |")
    if arguments.classes:
        print(f"\nFrom text:\n\n{scores['from text'].table_of_kinds()}")
    if function is recogniser:
        print(f"\n{100 * share_within_bounds(corpus, recogniser):.1f} % within the bounds")
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=2))


if __name__ == "__main__":
    main()
