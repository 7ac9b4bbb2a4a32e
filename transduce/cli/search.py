"""The options of a search on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from transduce.architectures import NextLabelPredictor
from transduce.cli.runs import read_pairs
from transduce.decoding.arpa import read_arpa
from transduce.decoding.fusion import Fusion, NGram
from transduce.decoding.options import SearchOptions
from transduce.model.checkpoint import load_model
from transduce.model.signature import Signature

NGRAM_ORDER = 4


@Parameter(name="*")
@dataclass(frozen=True)
class SearchFlags:
    """What a search may be asked, beside its width."""

    fusion: str | None = None
    """A language model of the labels (shallow fusion): an .arpa file; ngram:FILE, a 4-gram counted
    from the targets of a manifest, .tsv or text file (ngram-5:FILE: a 5-gram); or the run of a
    prediction network."""
    fusion_weight: float | None = None
    """How much the language model counts, such as 0.2; choose it on a validation set."""
    null_bias: float = 0.0
    """A number added to null's logit; below 0 it makes outputs longer."""
    length_normalised: bool = True
    """Sort outputs by log Pr(y) / |y|, as the paper does, or by log Pr(y)."""
    max_labels_per_frame: int = 20
    """How many labels an output may have from one frame."""

    def options(
        self,
        signature: Signature,
        beam_width: int,
        n_best: int = 1,
        *,
        with_timings: bool = False,
        target: str = "text",
    ) -> SearchOptions:
        """Return what a search is asked; the beam is at least as wide as outputs are wanted."""
        for name, number in (("--beam-width", beam_width), ("--n-best", n_best)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        fusion = None if self.fusion is None else read_fusion(self.fusion, signature, target)
        return SearchOptions(
            beam_width=max(beam_width, n_best),
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
    targets = signature.targets
    if counted := re.fullmatch(r"ngram(?:-(\d+))?:(.+)", described):
        order, file = int(counted[1] or NGRAM_ORDER), Path(counted[2])
        pairs = read_pairs(file, signature, target)
        known = set(targets.symbols)
        texts = [pair.target for pair in pairs if known.issuperset(pair.target)]
        return NGram(order, len(targets), map(targets.encode, texts))
    if described.endswith(".arpa"):
        return read_arpa(described, targets)
    model = load_model(Path(described))
    if not isinstance(model.network, NextLabelPredictor):
        raise ValueError(
            f"--fusion {described} is a {model.network.kind}, not a prediction network; give "
            "ngram:FILE, an .arpa file, or the run of a prediction network"
        )
    if model.signature.targets.symbols != targets.symbols:
        raise ValueError(f"--fusion {described} has other target symbols than the model")
    return model.network
