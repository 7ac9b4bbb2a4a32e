"""Sequence transduction with recurrent neural networks (Graves, 2012)."""

from transduce.alphabet import NULL, Alphabet
from transduce.ctc import ctc_best_path, ctc_prefix_search
from transduce.decoding import (
    Hypothesis,
    LanguageModel,
    NGram,
    Timing,
    beam_search,
    greedy_search,
    label_timings,
)
from transduce.ensemble import ensemble
from transduce.lattice.loss import (
    backward_variables,
    best_alignment,
    forward_variables,
    lattice_transitions,
    log_likelihood,
    log_occupancy,
    remove_nulls,
    rnnt_loss,
    transducer_loss,
)
from transduce.lstm.layer import PeepholeLSTM
from transduce.networks import PredictionNetwork, TranscriptionNetwork, Transducer

__version__ = "0.1.0"

__all__ = [
    "NULL",
    "Alphabet",
    "Hypothesis",
    "LanguageModel",
    "NGram",
    "PeepholeLSTM",
    "PredictionNetwork",
    "Timing",
    "TranscriptionNetwork",
    "Transducer",
    "backward_variables",
    "beam_search",
    "best_alignment",
    "ctc_best_path",
    "ctc_prefix_search",
    "ensemble",
    "forward_variables",
    "greedy_search",
    "label_timings",
    "lattice_transitions",
    "log_likelihood",
    "log_occupancy",
    "remove_nulls",
    "rnnt_loss",
    "transducer_loss",
]
