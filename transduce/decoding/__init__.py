"""From frames to labels: the search through the output sequences (Algorithm 1)."""

from transduce.decoding.arpa import ArpaModel, read_arpa
from transduce.decoding.fusion import LanguageModel, NGram
from transduce.decoding.hypothesis import Hypothesis, Timing, label_timings
from transduce.decoding.options import SearchOptions
from transduce.decoding.protocols import Joint, Predictor
from transduce.decoding.search import beam_search, greedy_search, search
from transduce.decoding.steps import Flow, Survivor, beam_search_steps

__all__ = [
    "ArpaModel",
    "Flow",
    "Hypothesis",
    "Joint",
    "LanguageModel",
    "NGram",
    "Predictor",
    "SearchOptions",
    "Survivor",
    "Timing",
    "beam_search",
    "beam_search_steps",
    "greedy_search",
    "label_timings",
    "read_arpa",
    "search",
]
