"""From frames to labels: the search through the output sequences (Algorithm 1)."""

from transduce.decoding.fusion import LanguageModel, NGram
from transduce.decoding.hypothesis import Hypothesis, Timing, label_timings
from transduce.decoding.search import beam_search, greedy_search

__all__ = [
    "Hypothesis",
    "LanguageModel",
    "NGram",
    "Timing",
    "beam_search",
    "greedy_search",
    "label_timings",
]
