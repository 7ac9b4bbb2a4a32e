"""Generate the outputs of a continuous transducer: means, or samples.

A generation walks through the output lattice: at each node it takes null, which leads to the next
input, or emits an output, which the prediction network then reads.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from transduce.decoding.search import eval_mode
from transduce.lattice.mixtures import Mixture, mixture_at, mixture_of
from transduce.networks import PredictionNetwork, TranscriptionNetwork


class ContinuousModel(Protocol):
    """The parts of a continuous transducer that a generation uses."""

    output_size: int
    num_components: int
    transcription_network: TranscriptionNetwork
    prediction_network: PredictionNetwork


@dataclass(frozen=True)
class GenerationOptions:
    """The options of a generation."""

    # Of outputs. 0: the mean of the most probable component. Above 0, the component is drawn with
    # its logit divided by this, and the output with deviations times this; 1: as the model has
    # them. Means alone may repeat themselves, because what would lead on is left out
    temperature: float = 0.4
    # When null is taken. median: as soon as the probability of having emitted so many outputs at an
    # input, the product of 1 - Pr(∅), is below one half; drawn: with its probability
    durations: Literal["median", "drawn"] = "median"
    # Where so many outputs came from one input, the generation takes null there
    max_outputs_per_input: int = 100
    seed: int = 0  # of what is drawn

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")
        if self.durations not in ("median", "drawn"):
            raise ValueError(f"durations must be median or drawn, not {self.durations!r}")
        if self.max_outputs_per_input < 1:
            raise ValueError(
                f"max_outputs_per_input must be at least 1, not {self.max_outputs_per_input}"
            )


@dataclass(frozen=True, eq=False)
class Generated:
    """The outputs that were generated for one input sequence."""

    outputs: Tensor  # [U, D], on the CPU
    inputs: tuple[int, ...]  # the transcription vector at which each was emitted, from 0


@torch.no_grad()
def generate(
    model: ContinuousModel,
    frames: Tensor,  # [B, T, D], or ids [B, T]
    num_frames: Tensor,  # [B]
    options: GenerationOptions | None = None,
) -> list[Generated]:
    """Generate outputs for each input sequence of a batch.

    The outputs of an input do not depend on the rest of the batch: each has random numbers of its
    own, which begin with the same seed. Temperature 1 and drawn durations draw from the model.
    """
    options = options or GenerationOptions()
    with eval_mode(model):
        f, num_vectors = model.transcription_network(frames, num_frames)
        return _Generation(model, f, num_vectors, options).run()


class _Generation:
    """The state of a generation of B sequences, each at its own node."""

    def __init__(
        self, model: ContinuousModel, f: Tensor, num_vectors: Tensor, options: GenerationOptions
    ) -> None:
        self.network, self.num_vectors, self.options = (
            model.prediction_network,
            num_vectors,
            options,
        )
        self.sizes = (model.num_components, model.output_size)
        self.f, self.size = mixture_of(f, *self.sizes), model.output_size
        B, device = len(num_vectors), f.device
        self.draws = [torch.Generator().manual_seed(options.seed) for _ in range(B)]
        self.t = torch.zeros(B, dtype=torch.int64, device=device)
        self.stayed = torch.ones(B, device=device)  # the probability of no null so far at t
        self.counts = torch.zeros_like(self.t)  # outputs at t
        start = torch.zeros(B, self.size, device=device)
        g, state = self.network.step(start, self.network.start(B))
        self.g, self.state = g, list(state)
        self.num_bounded = 0

    def run(self) -> list[Generated]:
        """Walk through the lattices of all sequences until the last of them has ended."""
        outputs: list[list[Tensor]] = [[] for _ in self.num_vectors]
        inputs: list[list[int]] = [[] for _ in self.num_vectors]
        while len(rows := (self.t < self.num_vectors).nonzero()[:, 0]):
            f = Mixture(*(part[rows, self.t[rows]] for part in self.f))
            node = mixture_at(f, mixture_of(self.g[rows], *self.sizes))
            is_null = self._is_null(rows, node.logits[:, 0])
            self.t[rows[is_null]] += 1
            self.stayed[rows[is_null]] = 1.0
            self.counts[rows[is_null]] = 0
            emitting = rows[~is_null]
            if not len(emitting):
                continue
            vectors = self._emitted(emitting, Mixture(*(part[~is_null] for part in node)))
            self.counts[emitting] += 1
            state = tuple(part[emitting] for part in self.state)
            self.g[emitting], after = self.network.step(vectors, state)
            for part, new in zip(self.state, after, strict=True):
                part[emitting] = new
            where = zip(emitting.tolist(), self.t[emitting].tolist(), vectors.cpu(), strict=True)
            for b, t, vector in where:
                outputs[b].append(vector)
                inputs[b].append(t)
        if self.num_bounded:
            warnings.warn(
                f"max_outputs_per_input {self.options.max_outputs_per_input} ended the outputs at "
                f"{self.num_bounded} inputs; raise it, or train the network longer",
                stacklevel=2,
            )
        return [
            Generated(torch.stack(one) if one else torch.zeros(0, self.size), tuple(at))
            for one, at in zip(outputs, inputs, strict=True)
        ]

    def _is_null(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Return which of the sequences `rows` take null, [N], at nodes with these logits."""
        probability = logits.sigmoid()
        if self.options.durations == "drawn":
            drawn = [torch.rand((), generator=self.draws[b]) for b in rows.tolist()]
            is_null = torch.stack(drawn).to(rows.device) < probability
        else:
            self.stayed[rows] *= 1 - probability
            is_null = self.stayed[rows] < 0.5
        bounded = ~is_null & (self.counts[rows] >= self.options.max_outputs_per_input)
        self.num_bounded += int(bounded.sum())
        return is_null | bounded

    def _emitted(self, rows: Tensor, node: Mixture) -> Tensor:
        """Return the mean of the most probable component, or a sample, of each mixture, [N, D].

        The mixtures are those of the sequences `rows`.
        """
        logits, temperature = node.logits[:, 1:], self.options.temperature
        each = torch.arange(len(logits), device=logits.device)
        if not temperature:
            return node.means[each, logits.argmax(-1)]
        draws = [self.draws[b] for b in rows.tolist()]
        # The largest of logits with Gumbel noise is a sample of their softmax.
        uniform = torch.stack([torch.rand(logits.shape[1], generator=draw) for draw in draws])
        gumbel = -(-uniform.clamp(min=1e-20).log()).log().to(logits.device)
        component = (logits / temperature + gumbel).argmax(-1)
        noise = torch.stack([torch.randn(self.size, generator=draw) for draw in draws])
        deviation = (-node.log_precisions[each, component] / 2).exp()
        return node.means[each, component] + temperature * deviation * noise.to(logits.device)
