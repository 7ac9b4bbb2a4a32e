"""When a continuous transducer says each symbol of its input: the posterior of the alignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from transduce.analysis.figures import INPUT_COLOURS, LATTICE_COLOURS, RED, SMALL
from transduce.architectures import ContinuousTransducer
from transduce.audio.outputs import FrameOutputs
from transduce.data.pairs import Symbols
from transduce.lattice.loss import best_alignment, lattice_loss
from transduce.lattice.mixtures import mixture_transitions
from transduce.model.checkpoint import TrainedModel


@dataclass(frozen=True, eq=False)
class SpeechView:
    """The output lattice of symbols and the outputs that say them."""

    symbols: Symbols  # T of them
    outputs: Tensor  # [U, D]
    format: FrameOutputs
    posterior: Tensor  # [T, U], that output u was emitted at symbol t; each column sums to 1
    best: tuple[int, ...]  # the symbol of each output on the most probable alignment
    log_density: float  # ln of the density of the outputs given the symbols, in nats


@torch.no_grad()
def view_speech(model: TrainedModel, ids: Tensor, outputs: Tensor) -> SpeechView:
    """Compute at which symbol each output was emitted, from ids [T] and outputs [U, D]."""
    network, signature = model.network, model.signature
    if not isinstance(network, ContinuousTransducer) or signature.outputs is None:
        raise ValueError("the model outputs labels; give a continuous transducer")
    assert signature.sources is not None
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
        occupancies.label[0].cpu(),
        tuple(best),
        -float(loss),
    )


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
    alignment.set_yticks(range(T), view.symbols, fontsize=SMALL + 1)
    alignment.invert_yaxis()  # the input reads downwards
    alignment.set_xlabel("time, seconds")
    bar = figure.colorbar(image, ax=alignment, pad=0.01)
    bar.set_label("Pr(symbol | outputs)", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    return figure
