"""Sequence transduction with recurrent neural networks (Graves, 2012)."""

from transduce.alphabet import NULL, Alphabet
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
    "PeepholeLSTM",
    "PredictionNetwork",
    "TranscriptionNetwork",
    "Transducer",
    "backward_variables",
    "best_alignment",
    "forward_variables",
    "lattice_transitions",
    "log_likelihood",
    "log_occupancy",
    "remove_nulls",
    "rnnt_loss",
    "transducer_loss",
]
