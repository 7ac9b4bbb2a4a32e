"""The options of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Required, TypedDict

from transduce.decoding.fusion import FusedScores, Fusion

# The widest beam: small problems searched exhaustively against memory, kilobytes a hypothesis.
MAX_BEAM_WIDTH = 100_000


def check_whole(name: str, number: object) -> None:
    """Raise ValueError unless an option is a whole number."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ValueError(f"{name} must be a whole number, not {number!r}")


def widened(beam_width: int, n_best: int) -> int:
    """Check a width and a number of outputs; return the width, or the outputs if they are more."""
    for name, number in (("beam_width", beam_width), ("n_best", n_best)):
        check_whole(name, number)
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if n_best > MAX_BEAM_WIDTH:
        raise ValueError(f"n_best must be at most {MAX_BEAM_WIDTH}, not {n_best}")
    return max(beam_width, n_best)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search: its width, its language model, and what it returns."""

    beam_width: int = 1  # hypotheses kept after every frame, the paper's W
    n_best: int = 1  # hypotheses returned, at most beam_width
    length_normalised: bool = True  # sort by log Pr(y) / |y|, as the paper does, or by log Pr(y)
    max_labels_per_frame: int = 20  # a bound on the loop within a frame, which the paper lacks
    fusion: Fusion | None = None  # a language model whose log-probabilities are added to labels'
    fusion_weight: float | None = None  # times which they are added; needed with `fusion`
    null_bias: float = 0.0  # added to null's logit; below 0 it makes outputs longer
    with_timings: bool = True  # compute `frames` and `timings`, a lattice for each hypothesis

    def __post_init__(self) -> None:
        for name in ("beam_width", "n_best", "max_labels_per_frame"):
            check_whole(name, getattr(self, name))
        if self.beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, not {self.beam_width}")
        if self.beam_width > MAX_BEAM_WIDTH:
            raise ValueError(
                f"beam_width must be at most {MAX_BEAM_WIDTH}, not {self.beam_width}; give a "
                "narrower one, such as 100"
            )
        if not 1 <= self.n_best <= self.beam_width:
            raise ValueError(
                f"n_best must be between 1 and the beam_width, {self.beam_width}, not {self.n_best}"
            )
        if self.max_labels_per_frame < 1:
            raise ValueError(
                f"max_labels_per_frame must be at least 1, not {self.max_labels_per_frame}"
            )
        if not math.isfinite(self.null_bias):
            raise ValueError(f"null_bias must be a finite number, not {self.null_bias}")
        if self.fusion is not None and self.fusion_weight is None:
            raise ValueError("there is a fusion but no fusion_weight; give it, such as 0.3")
        weight = self.fusion_weight or 0.0
        if not 0 <= weight < math.inf:
            raise ValueError(f"fusion_weight must be a number that is not negative, not {weight}")
        if self.fusion is None and weight > 0:
            raise ValueError(f"fusion_weight is {weight}, but there is no fusion")

    @property
    def fuses(self) -> bool:
        """Whether a language model takes part in the search."""
        return self.fusion is not None and bool(self.fusion_weight)

    def fused_scores(self, num_labels: int) -> FusedScores | None:
        """Return a new state of the language model for one utterance; None without fusion."""
        if self.fusion is None or not self.fusion_weight:
            return None
        return FusedScores(self.fusion, self.fusion_weight, num_labels)

    @property
    def greedy(self) -> bool:
        """Whether the greedy search suffices: one output, without timings or fusion."""
        return self.beam_width == 1 and not self.with_timings and not self.fuses


class SearchKeywords(TypedDict, total=False):
    """The fields of `SearchOptions` as keyword arguments."""

    beam_width: Required[int]
    n_best: int
    length_normalised: bool
    max_labels_per_frame: int
    fusion: Fusion | None
    fusion_weight: float | None
    null_bias: float
    with_timings: bool


assert [field.name for field in fields(SearchOptions)] == list(SearchKeywords.__annotations__)
