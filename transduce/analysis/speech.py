"""When a continuous transducer says each symbol of its input, and what it expects at each node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import logsigmoid

from transduce.analysis.figures import INPUT_COLOURS, LATTICE_COLOURS, RED, SMALL
from transduce.analysis.lattice import check_node
from transduce.analysis.sensitivity import Sensitivity, one_hot
from transduce.architectures import ContinuousTransducer
from transduce.audio.outputs import FrameOutputs
from transduce.data.pairs import Symbols
from transduce.lattice.loss import best_alignment, lattice_loss, log_occupancy
from transduce.lattice.mixtures import (
    gaussian_log_density,
    mixture_at,
    mixture_of,
    mixture_transitions,
)
from transduce.model.checkpoint import TrainedModel


@dataclass(frozen=True, eq=False)
class SpeechView:
    """The output lattice of symbols and the outputs that say them, on the CPU.

    T is the number of transcription vectors: with pooling, it is less than that of symbols.
    """

    symbols: Symbols
    outputs: Tensor  # [U, D]
    format: FrameOutputs
    transcription: Tensor  # [T, P], f
    prediction: Tensor  # [U+1, P], g
    num_components: int
    log_null: Tensor  # [T, U+1], ln Pr(∅|t,u)
    log_emission: Tensor  # [T, U], ln of 1 - Pr(∅|t,u) times the density of the next output
    log_product: Tensor  # [T, U+1], ln of the probability that the alignment passes a node, Eq. 19
    posterior: Tensor  # [T, U], that output u was emitted at vector t; each column sums to 1
    best: tuple[int, ...]  # the vector of each output on the most probable alignment
    log_density: float  # ln of the density of the outputs given the symbols, in nats
    pooling: int = 1  # symbols of a vector

    @property
    def names(self) -> tuple[str, ...]:
        """The symbols of each transcription vector."""
        firsts = range(0, len(self.symbols), self.pooling)
        return tuple(" ".join(self.symbols[t : t + self.pooling]) for t in firsts)

    @property
    def log_next_output(self) -> Tensor:
        """Return ln of the density of the next output where one is emitted, [T, U], in nats."""
        log_emitting = torch.log(-torch.expm1(self.log_null[:, :-1]))
        return self.log_emission - log_emitting

    @property
    def bits_per_output(self) -> float:
        """Return -log2 of the density of the outputs, over their number."""
        return -self.log_density / math.log(2) / max(1, len(self.outputs))

    def check_node(self, t: int, u: int) -> None:
        """Raise ValueError unless the lattice has a node t, u."""
        check_node(t, u, *self.posterior.shape)


@torch.no_grad()
def view_speech(model: TrainedModel, ids: Tensor, outputs: Tensor) -> SpeechView:
    """Compute at which symbol each output was emitted, from ids [T] and outputs [U, D]."""
    signature = model.signature
    network = speaker_of(model)
    assert signature.sources is not None and signature.outputs is not None
    x, y = ids[None].to(model.device), outputs[None].to(model.device)
    lengths = [torch.tensor([n], device=model.device) for n in (len(ids), len(outputs))]
    f, g, num_vectors = network.eval()(x, lengths[0], y)
    null, label = mixture_transitions(f.double(), g.double(), y.double(), network.num_components)
    loss, occupancies = lattice_loss(null, label, num_vectors, lengths[1], with_occupancies=True)
    best, _ = best_alignment(null[0], label[0])
    return SpeechView(
        tuple(signature.sources.decode(ids.tolist())),
        outputs.cpu(),
        signature.outputs,
        f[0].double().cpu(),
        g[0].double().cpu(),
        network.num_components,
        null[0].cpu(),
        label[0].cpu(),
        log_occupancy(null[0], label[0]).cpu(),
        occupancies.label[0].cpu(),
        tuple(best),
        -float(loss),
        network.transcription_network.pooling,
    )


def speaker_of(model: TrainedModel) -> ContinuousTransducer:
    """Return the model's network; raise ValueError unless it is a continuous transducer."""
    network = model.network
    if not isinstance(network, ContinuousTransducer) or model.signature.outputs is None:
        raise ValueError("the model outputs labels; give a continuous transducer")
    return network


class NodeMixture(NamedTuple):
    """What a continuous transducer expects at a node: null, or an output by M Gaussians."""

    null: float  # Pr(∅|t,u)
    weights: Tensor  # [M], which sum to 1
    means: Tensor  # [M, D]
    deviations: Tensor  # [M, D]
    log_densities: Tensor  # [M], ln of the next output's density by each; [0] after the last output

    @property
    def log_density(self) -> float:
        """Return ln of the next output's density where an output is emitted, in nats."""
        return float((self.weights.log() + self.log_densities).logsumexp(0))


def node_mixture(view: SpeechView, t: int, u: int) -> NodeMixture:
    """Return null's probability and the mixture at node t, u (docs/derivations.md, section 10)."""
    view.check_node(t, u)
    U, D = view.outputs.shape
    shares = (view.transcription[t], view.prediction[u])
    node = mixture_at(*(mixture_of(share, view.num_components, D) for share in shares))
    log_densities = torch.empty(0, dtype=torch.float64)
    if u < U:
        squares = (node.log_precisions.exp() * (view.outputs[u] - node.means).square()).sum(1)
        log_densities = gaussian_log_density(squares, node.log_precisions.sum(1), D)
    return NodeMixture(
        float(node.logits[0].sigmoid()),
        node.logits[1:].softmax(0),
        node.means,
        (-node.log_precisions / 2).exp(),
        log_densities,
    )


def null_sensitivity(model: TrainedModel, view: SpeechView, t: int, u: int) -> Sensitivity:
    """Differentiate Pr(∅|t,u) with respect to the inputs and the outputs before the node.

    Inputs are one-hot vectors, and the derivatives are with respect to all values of each.
    """
    view.check_node(t, u)
    network, sources = speaker_of(model).eval(), model.signature.sources
    assert sources is not None
    weights = network.prediction_network.output.weight
    ids = torch.tensor(sources.encode(view.symbols), device=weights.device)
    with torch.enable_grad():
        x = one_hot(ids, len(sources)).to(weights).requires_grad_()
        y = view.outputs.detach().to(weights).requires_grad_()
        f, _ = network.transcription_network(x[None])
        g = network.prediction_network(y[None])
        sizes = (network.num_components, network.output_size)
        shares = (mixture_of(share.double(), *sizes) for share in (f[0, t], g[0, u]))
        # Of the logarithm, which does not vanish in float32 where the probability is near 0.
        log_null = logsigmoid(mixture_at(*shares).logits[0])
        derivatives = torch.autograd.grad(log_null, (x, y))
    probability = log_null.detach().exp().cpu()
    return Sensitivity(*(probability * derivative.double().cpu() for derivative in derivatives))


def speech_figure(view: SpeechView) -> Figure:
    """Draw the outputs as a spectrogram, and below it when each symbol is said.

    Each column of the map is the posterior of the symbol at which an output was emitted. The best
    alignment is red.
    """
    T, U = view.posterior.shape
    seconds = U * view.format.shift
    figure = Figure(figsize=(7.5, 2.6 + 0.3 * T), layout="constrained")
    spectrogram, alignment = figure.subplots(2, 1, sharex=True, height_ratios=[1.8, 0.3 * T])
    options = {"origin": "lower", "aspect": "auto", "interpolation": "nearest"}
    frames = view.format.to_frames(view.outputs)
    extent = (0, seconds, 0.5, frames.shape[1] + 0.5)
    spectrogram.imshow(frames.T.numpy(), cmap=INPUT_COLOURS, extent=extent, **options)
    spectrogram.set_ylabel("mel channel")
    spectrogram.set_title(
        f"ln of the density of the outputs: {view.log_density:.1f} nats", fontsize=9, loc="left"
    )
    image = alignment.imshow(
        view.posterior.numpy(), cmap=LATTICE_COLOURS, vmin=0, vmax=1,
        extent=(0, seconds, -0.5, T - 0.5), **options,
    )  # fmt: skip
    edges = [u * view.format.shift for u in range(U + 1)]
    alignment.stairs(view.best, edges, color=RED, baseline=None, linewidth=1.5)
    alignment.set_yticks(range(T), view.names, fontsize=SMALL + 1)
    alignment.invert_yaxis()  # the input reads downwards
    alignment.set_xlabel("time, seconds")
    bar = figure.colorbar(image, ax=alignment, pad=0.01)
    bar.set_label("Pr(symbol | outputs)", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    return figure
