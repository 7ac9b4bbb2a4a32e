"""The command that compiles the CPU kernels ahead of their use."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from transduce.alignment.detours import Detour, LabelPath
from transduce.alignment.phone_hmm import shipped_hmm
from transduce.alphabet import Alphabet
from transduce.architectures import AnyNetwork, NetworkConfig, Transducer, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.cli.terminal import user_errors
from transduce.data.batches import Batch
from transduce.data.pairs import Notation
from transduce.decoding import NGram
from transduce.decoding.ensemble import Ensemble
from transduce.decoding.options import SearchOptions
from transduce.lattice.distillation import distillation_loss
from transduce.lattice.loss import (
    backward_variables,
    best_alignment,
    forward_variables,
    lattice_loss,
    lattice_transitions,
    log_occupancy,
    rnnt_loss,
    transducer_loss,
)
from transduce.model.model import Model
from transduce.model.signature import Signature
from transduce.model.tensors import dequantise, quantise

LABELS, SIZE = 4, 6  # of the networks; any do, because kernels do not depend on sizes


def warm_up() -> None:
    """Compile the CPU kernels ahead of their use.

    Example: transduce warm-up

    Kernels are compiled when they are first used, and kept on disk. This command compiles those of
    training and of every search at once, so that no later command waits for the compiler: run it
    when you build an image, or once on a new machine. It takes a minute or two, and a few seconds
    if everything is compiled.
    """
    from transduce.kernels.simd.cache import kernel_folder, listening

    with user_errors():
        started, names = time.monotonic(), list[str]()
        with _progress(len(WORK)) as (show, advance):

            def compiling(name: str) -> None:
                names.append(name)
                show(name)

            with listening(compiling), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of searches by a network that has learnt nothing
                for name, call in WORK.items():
                    show(name)
                    if not sys.stderr.isatty():  # where there is no bar, as in logs
                        print(f"transduce: compiling {name}", file=sys.stderr)
                    call()
                    advance()
        seconds = time.monotonic() - started
        done = f"compiled {len(names)} functions in {seconds:.0f} s"
        print(f"{done if names else 'everything was compiled before'}; kept in {kernel_folder()}")


# --- One call of every kernel -------------------------------------------------------------------


def _batch(of_text: bool) -> Batch:
    frames = torch.ones(2, 5, dtype=torch.int64) if of_text else torch.rand(2, 5, LABELS)
    labels = torch.ones(2, 3, dtype=torch.int64)
    return Batch((), frames, torch.tensor([5, 4]), labels, torch.tensor([3, 2]))


def _networks() -> Iterator[tuple[AnyNetwork, Batch]]:
    """Yield a network of every kind that commands train, with a batch."""
    sizes = {"hidden_size": SIZE, "prediction_size": SIZE, "num_layers": 2, "prediction_layers": 2}
    for kind in ("transducer", "ctc", "prediction"):
        for of_text in (True, False):
            for more in ({}, {"embedding_size": 3, "dropout": 0.2}, {"bidirectional": False}):
                config = NetworkConfig(kind, **sizes, **more)  # type: ignore[arg-type]
                yield build_network(config, LABELS, LABELS), _batch(of_text)


def _train() -> None:
    for network, batch in _networks():
        terms = [network.losses(batch), *network.consistency_losses(batch.repeat(2))]
        torch.autograd.backward([term.sum() for term in terms])
        with torch.no_grad():
            network.eval().losses(batch)


def _search() -> None:
    ngram = NGram(2, LABELS, [[1, 2], [2, 1]])
    for network, batch in _networks():
        network.eval()
        if not network.reads_input:
            continue
        for options in (
            SearchOptions(with_timings=False),
            SearchOptions(3, n_best=2, with_timings=False),
            SearchOptions(2, with_timings=network.has_timings),
            SearchOptions(2, fusion=ngram, fusion_weight=0.5, with_timings=False),
        ):
            network.search(batch, options, backend="auto")


def _search_by_ensembles() -> None:
    from transduce.graphones.model import JointNGram  # it needs Numba

    config = NetworkConfig(hidden_size=SIZE, prediction_size=SIZE)
    backwards = NetworkConfig(hidden_size=SIZE, prediction_size=SIZE, backwards=True)
    members = [build_network(one, LABELS, LABELS).eval() for one in (config, config, backwards)]
    ids = np.arange(1, LABELS + 1)
    scorer = JointNGram.learn([(ids, ids)], LABELS, LABELS)
    for some in (members[:2], members):
        ensemble = Ensemble(some, scorers=[scorer])  # type: ignore[arg-type]
        ensemble.losses(_batch(True))
        ensemble.search(_batch(True), SearchOptions(2))


def _stream() -> None:
    features = FeatureSettings(num_deltas=0, kind="log_mel", num_channels=LABELS)
    statistics = Statistics(torch.zeros(LABELS), torch.ones(LABELS))
    config = NetworkConfig(
        hidden_size=SIZE, num_layers=2, prediction_size=SIZE, bidirectional=False, pooling=2
    )
    signature = Signature(
        Alphabet("abcd"), Notation("characters", None), features=features, statistics=statistics
    )
    model = Model(build_network(config, LABELS, LABELS).eval(), config, signature)
    greedy = {"beam_width": 1, "with_timings": False}
    for in_int8, options in ((False, greedy), (False, {"beam_width": 2}), (True, greedy)):
        if in_int8:  # the weights of models that were saved in it have kernels of their own
            for name, weights in model.network.state_dict().items():
                weights.copy_(dequantise(name, quantise(name, weights, torch.int8)))
        stream = model.stream(**options)  # type: ignore[arg-type]
        stream.accept(torch.rand(16_000))
        stream.finish()


def _losses() -> None:
    labels = torch.ones(2, 3, dtype=torch.int64)
    lengths = (torch.tensor([5, 4]), torch.tensor([3, 2]))
    f, g = (torch.rand(2, n, LABELS + 1, requires_grad=True) for n in (5, 4))
    logits = torch.rand(2, 5, 4, LABELS + 1, requires_grad=True)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            found = [transducer_loss(f, g, labels, *lengths, reduction="sum")]
            for fused in (True, False):
                log_probs = logits.log_softmax(-1)
                found.append(rnnt_loss(log_probs, labels, *lengths, 0, 0.5, "sum", fused))
            arrows = (logits[..., 0], logits[:, :, :-1, 1])
            found.append(lattice_loss(*arrows, *lengths, reduction="sum"))
            found.append(distillation_loss(f, g, labels, *lengths, torch.rand(g.shape)).sum())
            if gradients:
                torch.autograd.backward(found)


def _parts() -> None:
    for dtype in (torch.float32, torch.float64):  # timings are computed in float64
        f, g = torch.rand(5, LABELS + 1, dtype=dtype), torch.rand(4, LABELS + 1, dtype=dtype)
        arrows = lattice_transitions(f, g, torch.ones(3, dtype=torch.int64))
        for part in (forward_variables, backward_variables, log_occupancy, best_alignment):
            part(*arrows)


def _align() -> None:
    from transduce.alignment.acoustics import phone_deficits  # it needs Numba, as the other does
    from transduce.decoding.cpu.prediction import packed_weights

    network = Transducer(LABELS, LABELS, SIZE).prediction_network
    path = LabelPath.of(torch.rand(5, LABELS + 1), packed_weights(network), (1, 2))
    path.gains([Detour(0, 1, (3,))])
    hmm, samples = shipped_hmm(), torch.rand(8000) - 0.5
    hmm.boundaries(samples, ["AA"], [(0.1, 0.2)], [0])
    phone_deficits(hmm, hmm.frames_and_levels(samples)[0], ["AA"], [(0.1, 0.2)])


WORK = {
    "losses": _losses,
    "parts of the lattice": _parts,
    "training": _train,
    "searches": _search,
    "ensembles": _search_by_ensembles,
    "streams": _stream,
    "alignment": _align,
}


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Yield functions that show what is compiled now, and advance the bar, on standard error."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        yield (
            lambda name: bar.update(task, description=f"compiling {name}"),
            lambda: bar.advance(task),
        )
