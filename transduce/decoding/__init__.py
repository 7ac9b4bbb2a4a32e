"""From frames to labels: the search through the output sequences (Algorithm 1)."""

from transduce.decoding.fusion import LanguageModel, NGram
from transduce.decoding.hypothesis import Hypothesis, Timing, label_timings
from transduce.decoding.search import beam_search, greedy_search
from transduce.decoding.steps import Flow, Survivor, beam_search_steps

__all__ = [
    "Flow",
    "Hypothesis",
    "LanguageModel",
    "NGram",
    "Survivor",
    "Timing",
    "beam_search",
    "beam_search_steps",
    "greedy_search",
    "label_timings",
]
