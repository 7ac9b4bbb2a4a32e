"""The options of a search on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from cyclopts import Parameter

from transduce.architectures import NextLabelPredictor
from transduce.cli.runs import read_pairs
from transduce.decoding.arpa import read_arpa
from transduce.decoding.fusion import Fusion, NGram
from transduce.decoding.options import SearchOptions, widened
from transduce.model.checkpoint import load_model
from transduce.model.signature import Signature
from transduce.model.tensors import is_safetensors
from transduce.settings import OptionError

NGRAM_ORDER = 4
FUSIONS = "give ngram:FILE, an .arpa file, or the run of a prediction network"


@Parameter(name="*")
@dataclass(frozen=True)
class SearchFlags:
    """The options that several commands pass on to a search."""

    fusion: str | None = None
    """A language model of the labels (shallow fusion): an .arpa file; the run of a prediction
    network; or ngram:FILE, a 4-gram model counted from the targets in a manifest, .tsv or text file
    (ngram-5:FILE counts 5-grams)."""
    fusion_weight: float | None = None
    """The weight of the language model, such as 0.2; choose it on a validation set."""
    null_bias: float = 0.0
    """A number to add to the logit of null (blank penalty); a negative one makes outputs longer."""
    length_normalised: bool = True
    """Sort outputs by log Pr(y) / |y|, as the paper does; otherwise by log Pr(y)."""
    max_labels_per_frame: int = 20
    """The largest number of labels that a frame may emit."""

    def options(
        self,
        signature: Signature,
        beam_width: int,
        n_best: int = 1,
        *,
        with_timings: bool = False,
        target: str = "text",
    ) -> SearchOptions:
        """Return the options of the search; widen the beam to `n_best` if it is narrower.

        `target` is the field of a manifest from which an n-gram model is counted.
        """
        with _named_by_flags():
            width = widened(beam_width, n_best)
        fusion = None if self.fusion is None else read_fusion(self.fusion, signature, target)
        with _named_by_flags():
            return SearchOptions(
                beam_width=width,
                n_best=n_best,
                length_normalised=self.length_normalised,
                max_labels_per_frame=self.max_labels_per_frame,
                fusion=fusion,
                fusion_weight=self.fusion_weight,
                null_bias=self.null_bias,
                with_timings=with_timings,
            )


def read_fusion(described: str, signature: Signature, target: str = "text") -> Fusion:
    """Read the language model that --fusion names."""
    if counted := re.fullmatch(r"ngram(?:-(\d+))?:(.+)", described):
        order = int(counted[1] or NGRAM_ORDER)
        if order < 1:
            raise ValueError(f"--fusion {described}: order must be at least 1, not {order}")
        return _count_ngrams(order, Path(counted[2]), signature, target)
    if described.endswith(".arpa"):
        return read_arpa(described, signature.targets)
    if not Path(described).exists():
        raise ValueError(f"--fusion {described}: there is no such file or run; {FUSIONS}")
    if Path(described).is_file() and not is_safetensors(Path(described)):
        raise ValueError(
            f"--fusion {described} is neither an .arpa file nor a model; to count n-grams in its "
            f"targets, give --fusion ngram:{described}"
        )
    model = load_model(Path(described))
    if not isinstance(model.network, NextLabelPredictor):
        raise ValueError(
            f"--fusion {described} is a {model.network.kind}, not a prediction network; {FUSIONS}"
        )
    if model.signature.targets.symbols != signature.targets.symbols:
        raise ValueError(
            f"--fusion {described} has other target symbols than the model; give a run that was "
            "trained on the same targets"
        )
    return model.network


def _count_ngrams(order: int, file: Path, signature: Signature, target: str) -> NGram:
    """Count n-grams in the targets of a file; leave out targets with unknown symbols."""
    known = set(signature.targets.symbols)
    targets = [pair.target for pair in read_pairs(file, signature, target)]
    usable = [symbols for symbols in targets if known.issuperset(symbols)]
    if not usable:
        raise ValueError(
            f"{file} has no target whose symbols the model knows; give targets of the same kind"
        )
    return NGram(order, len(known), map(signature.targets.encode, usable))


@contextmanager
def _named_by_flags() -> Iterator[None]:
    """Replace the names of options in error messages by those of the command line."""
    names = "|".join(sorted((field.name for field in fields(SearchOptions)), reverse=True))
    try:
        yield
    except ValueError as error:
        named = re.sub(rf"\b({names})\b", lambda name: "--" + name[0].replace("_", "-"), str(error))
        raise OptionError(named) from None
