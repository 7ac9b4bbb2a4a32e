"""The arguments of a search backend: transcription vectors, a prediction network, a joint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from transduce.decoding.fusion import FusedScores
from transduce.decoding.hypothesis import Found, Greedy
from transduce.decoding.options import SearchOptions
from transduce.decoding.protocols import Joint, Predictor, State
from transduce.networks import PredictionNetwork

# The least and the number per hypothesis of the beam of two limits. Prefixes in the trie before
# any is removed: memory against steps of the prediction network that are taken again. Extensions in
# A before the last are taken first: memory against hypotheses that are expanded in vain.
SPARE_PREFIXES = 1 << 14, 32
MOST_OPEN = 1 << 16, 32


@dataclass(frozen=True)
class EagerPrediction:
    """A `PredictionNetwork` that is stepped by plain PyTorch operations."""

    network: PredictionNetwork

    def start(self, batch: int) -> State:
        """Return the network's first state."""
        return self.network.start(batch)

    def step(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """Step the network without compiled kernels."""
        return self.network.step(labels, state, backend="eager")


@dataclass(frozen=True)
class Problem:
    """The utterances to search, and the networks to search with."""

    transcriptions: list[Tensor]  # f [T, ...] of each utterance
    network: Predictor
    joint: Joint | None  # None: the sum
    num_outputs: int  # K+1, with null
    options: SearchOptions

    def __post_init__(self) -> None:
        """Raise an error for a network that is none, or if f and g cannot be added.

        The compiled kernels would not notice.
        """
        missing = [name for name in ("start", "step") if not hasattr(self.network, name)]
        if missing:
            raise TypeError(
                f"a prediction network needs start(batch) and step(labels, state), and "
                f"{type(self.network).__name__} has no {' and no '.join(missing)}; add it"
            )
        network = self._added_network()
        if network is not None and network.output.out_features != self.num_outputs:
            raise ValueError(
                f"the transcription has K+1 = {self.num_outputs} outputs, and the prediction "
                f"network {network.output.out_features}; build both for the same labels"
            )

    @property
    def beam_width(self) -> int:
        """The paper's W."""
        return self.options.beam_width

    @property
    def max_labels_per_frame(self) -> int:
        """The bound on labels that a hypothesis emits in a frame."""
        return self.options.max_labels_per_frame

    @property
    def spare_prefixes(self) -> int:
        """The prefixes in the trie before any is removed."""
        least, each = SPARE_PREFIXES
        return max(least, each * self.beam_width)

    @property
    def most_open(self) -> int:
        """The extensions in A before the last are taken first."""
        least, each = MOST_OPEN
        return max(least, each * self.beam_width)

    def fused_scores(self) -> FusedScores | None:
        """Return a new state of the language model for one utterance; None without fusion."""
        return self.options.fused_scores(self.num_outputs - 1)

    def peephole_network(self) -> PredictionNetwork | None:
        """Return the prediction network if it is ours and the joint is the sum; None otherwise.

        The compiled kernels step such a network themselves. A subclass may step differently, so
        only the class itself counts.
        """
        return self._added_network() if type(self.network) is PredictionNetwork else None

    def _added_network(self) -> PredictionNetwork | None:
        """Return the prediction network, also of a subclass, if its outputs are added to f."""
        network = self.network
        if isinstance(network, EagerPrediction):
            network = network.network
        if self.joint is None and isinstance(network, PredictionNetwork) and network.with_null:
            return network
        return None


class SearchBackend(Protocol):
    """The functions of each module of `decoding` that searches."""

    @staticmethod
    def beam_searches(problem: Problem) -> list[Found]:
        """Return the beam B after the last frame of each utterance."""

    @staticmethod
    def greedy_searches(problem: Problem) -> list[Greedy]:
        """Return each utterance's greedy alignment."""


def padded(transcriptions: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return f [B, T, ...], padded with zeros, and the numbers of vectors [B]."""
    f = torch.nn.utils.rnn.pad_sequence(transcriptions, batch_first=True)
    lengths = [len(transcription) for transcription in transcriptions]
    return f, torch.tensor(lengths, device=f.device)
