"""Train the hidden Markov model of phones that `transduce align` takes boundaries from.

    python benchmarks/train_aligner.py MANIFEST OUTPUT [--initial FILE] [--limit N] [--seed 0]

MANIFEST has `audio_filepath` and `phones` on each line. The shipped recogniser's emissions give the
initial alignment; `--initial` names a JSON file that keeps it: {sound: [[start, end], ...]}, in
seconds. Each pass fits the mixtures of the states to the frames that the alignment gives them (EM),
and then replaces the alignment by the most probable one (Viterbi training). The mixtures that
depend on the phone alone come first; with them, the model decides where the pauses are. Then come
those that depend on the phone beside it too. Nothing is fitted to hand labels.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.alignment.boundaries import Heard, emission_boundaries
from transduce.alignment.phone_hmm import (
    STATES,
    Mixtures,
    PhoneHMM,
    Spans,
    StateSequence,
    state_lattice,
)
from transduce.audio.features import FeatureSettings
from transduce.audio.sound import read_wave
from transduce.data.manifest import read_manifest
from transduce.data.pairs import Audio, Notation, Pair, Symbols
from transduce.decoding.search import transcribe
from transduce.lattice.loss import best_alignment
from transduce.model.model import Model, load

SETTINGS = FeatureSettings(
    "log_mel", window=0.020, shift=0.005, num_channels=26, num_deltas=2, delta_reach=1
)
CLASSES = (
    "P T K",
    "B D G",
    "CH JH",
    "F TH S SH HH",
    "V DH Z ZH",
    "M N NG",
    "L R ER W Y",
    "IY IH EY EH AE AY",
    "AA AO AW AH OW OY UH UW",
)  # of neighbours
ALONE = 1, 1, 2, 2, 4, 4, 8, 8, 16, 16  # Gaussians in each state, pass by pass
BESIDE = 1, 2, 4, 8, 8  # the same, of the states that depend on the phone beside theirs
STEPS = 3  # of EM in each pass
FLOOR = 0.01  # added to variances, where frames have variance 1
MOST_FRAMES = 20_000  # of a state that EM sees: accuracy against time
FEWEST_FRAMES = 40  # for each Gaussian: a state with fewer keeps its mixture
WORKERS = 2  # threads that align utterances
BATCH = 16  # utterances that the recogniser hears at once


class Utterance(NamedTuple):
    """Frames [T, D], their phones and approximate spans."""

    frames: Tensor
    phones: Symbols
    spans: Spans


def samples_of(pair: Pair) -> Tensor:
    """Read the samples of a pair."""
    assert isinstance(pair.source, Audio)
    return read_wave(pair.source, SETTINGS.sample_rate, convert=True)


def initial_spans(model: Model, pairs: Sequence[Pair]) -> Iterator[Spans]:
    """Yield the spans of each pair's phones, from the recogniser's emissions."""
    targets = model.signature.targets
    for start in range(0, len(pairs), BATCH):
        some = pairs[start : start + BATCH]
        waves = [samples_of(pair) for pair in some]
        frames = [model.signature.example(wave).frames for wave in waves]
        lengths = torch.tensor([len(one) for one in frames])
        with torch.no_grad():
            vectors = transcribe(model.network, pad_sequence(frames, batch_first=True), lengths)
        for pair, wave, f in zip(some, waves, vectors, strict=True):
            heard = Heard(lambda wave=wave: wave, f, len(wave) / SETTINGS.sample_rate)
            found = emission_boundaries(model, heard, tuple(targets.encode(pair.target)))
            yield [(one.start.time, one.end.time) for one in found]


def read_initial(model: Model, pairs: Sequence[Pair], file: Path | None) -> list[Spans]:
    """Return the initial spans of each pair; read them from a file, or write them there."""
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        return [kept[pair.name] for pair in pairs]
    spans = list(initial_spans(model, pairs))
    if file is not None:
        kept = {pair.name: one for pair, one in zip(pairs, spans, strict=True)}
        file.write_text(json.dumps(kept))
    return spans


def initial_states(hmm: PhoneHMM, utterance: Utterance) -> Tensor:
    """Return the state [T] of each frame if the states of a phone divide its span equally."""
    found = torch.full((len(utterance.frames),), hmm.silence)
    margin, shift = SETTINGS.margin, SETTINGS.shift
    for phone, (start, end) in zip(utterance.phones, utterance.spans, strict=True):
        edges = torch.linspace(start, end, STATES + 1, dtype=torch.float64)
        frames = ((edges - margin) / shift).round().clamp(min=0).long().tolist()
        for i, (first, last) in enumerate(pairwise(frames)):
            found[first:last] = STATES * hmm.symbols.index(phone) + i
    return found


def best_path(log_likelihoods: Tensor) -> tuple[Tensor, float]:
    """Return the index [T] of each frame's state on the most probable path; its log-likelihood."""
    last, log_likelihood = best_alignment(*state_lattice(log_likelihoods.double()))
    T, N = log_likelihoods.shape
    starts = [0, *(t + u + 1 for u, t in enumerate(last)), T]
    return torch.arange(N).repeat_interleave(torch.tensor(starts).diff()), log_likelihood


def split(mixtures: Mixtures) -> Mixtures:
    """Return mixtures with twice as many Gaussians: each is replaced by two beside it."""
    step = 0.2 * mixtures.variances.sqrt() * torch.randn_like(mixtures.means).sign()
    return Mixtures(
        torch.cat([mixtures.means + step, mixtures.means - step], 1),
        mixtures.variances.repeat(1, 2, 1),
        mixtures.log_weights.repeat(1, 2) - math.log(2),
    )


def fit(mixtures: Mixtures, frames: Tensor, states: Tensor, gaussians: int) -> Mixtures:
    """Return the mixtures after some steps of EM on the frames [N, D] of each state."""
    if mixtures.means.shape[1] < gaussians:
        mixtures = split(mixtures)
    means, variances = mixtures.means.clone(), mixtures.variances.clone()
    weights = mixtures.log_weights.clone()
    order, counts = states.argsort(stable=True), states.bincount(minlength=len(means)).tolist()
    for state, own in enumerate(order.split(counts)):
        if len(own) < FEWEST_FRAMES * gaussians:
            continue
        own = own[torch.randperm(len(own))[:MOST_FRAMES]]
        mixture = means[state], variances[state], weights[state]
        for _ in range(STEPS):
            mixture = em_step(frames[own], *mixture)
        means[state], variances[state], weights[state] = mixture
    return Mixtures(means, variances, weights)


def em_step(x: Tensor, means: Tensor, variances: Tensor, log_weights: Tensor) -> tuple[Tensor, ...]:
    """Return means [M, D], variances and log-weights [M] after one step of EM on x [N, D]."""
    precisions = variances.reciprocal()
    constants = (means.square() * precisions + variances.log()).sum(-1)
    products = x @ (means * precisions).T - 0.5 * x.square() @ precisions.T
    shares = (products - 0.5 * constants + log_weights).softmax(1)
    counts = shares.sum(0) + 1e-3
    means = shares.T @ x / counts[:, None]
    variances = shares.T @ x.square() / counts[:, None] - means.square()
    return means, variances.clamp(min=0) + FLOOR, (counts / counts.sum()).log()


def normal(S: int, D: int) -> Mixtures:
    """Return one standard normal distribution for each of S states."""
    return Mixtures(torch.zeros(S, 1, D), torch.ones(S, 1, D), torch.zeros(S, 1))


def untrained(symbols: Symbols) -> PhoneHMM:
    """Return a model with one standard normal distribution in each state."""
    classes = tuple(
        next(i for i, phones in enumerate(CLASSES) if symbol in phones.split())
        for symbol in symbols
    )
    nothing = normal(0, 0)
    hmm = PhoneHMM(symbols, classes, SETTINGS, torch.ones(0), nothing, nothing)
    return replace(
        hmm,
        scales=torch.ones(hmm.size),
        alone=normal(hmm.silence + 1, hmm.size),
        beside=normal(hmm.num_beside, hmm.size),
    )


def pooled(hmm: PhoneHMM) -> Mixtures:
    """Return one Gaussian for each state that depends on its neighbour, from the phone alone."""
    weights = hmm.alone.log_weights.exp()[..., None]
    means = (weights * hmm.alone.means).sum(1)
    squares = (weights * (hmm.alone.variances + hmm.alone.means.square())).sum(1)
    K = hmm.num_neighbours
    own = torch.tensor([0] * K + [1] + [2] * K)  # the state of the phone alone
    states = torch.cat(
        [own + STATES * i for i in range(len(hmm.symbols))] + [torch.tensor([hmm.silence])]
    )
    variances = (squares - means.square())[states, None]
    return Mixtures(means[states, None], variances, torch.zeros(len(states), 1))


def train(hmm: PhoneHMM, utterances: list[Utterance]) -> Iterator[PhoneHMM]:
    """Yield the model after each pass; print the log-likelihood of a frame on the best paths."""
    paths = [initial_states(hmm, one) for one in utterances]
    every = torch.cat([one.frames for one in utterances])

    def alone(utterance: Utterance) -> tuple[StateSequence, Tensor] | None:
        """Return the states of an utterance, and the log-likelihoods of the phones alone."""
        frames, phones, _ = utterance
        states = hmm.state_sequence(phones, hmm.pauses(frames, phones, range(len(phones))))
        if len(states.alone) > len(frames):
            return None
        return states, hmm.alone.log_likelihoods(frames, states.alone)

    with ThreadPoolExecutor(WORKERS) as workers:
        for number, gaussians in enumerate(ALONE, start=1):
            began = time.monotonic()
            hmm = replace(hmm, alone=fit(hmm.alone, every, torch.cat(paths), gaussians))
            found = list(workers.map(alone, utterances))
            best = list(workers.map(lambda one: one and best_path(one[1]), found))
            for i, (one, path) in enumerate(zip(found, best, strict=True)):
                if one is not None:
                    paths[i] = torch.tensor(one[0].alone)[path[0]]
            _report(f"pass {number}", gaussians, best, began)
            yield hmm
        kept = [(frames, *one) for (frames, *_), one in zip(utterances, found, strict=True) if one]
        every = torch.cat([frames for frames, *_ in kept])
        indices = [path[0] for path in best if path]
        hmm = replace(hmm, beside=pooled(hmm))

        def both(one: tuple[Tensor, StateSequence, Tensor]) -> tuple[Tensor, float]:
            frames, states, log_alone = one
            return best_path((log_alone + hmm.beside.log_likelihoods(frames, states.beside)) / 2)

        for number, gaussians in enumerate(BESIDE, start=len(ALONE) + 1):
            began = time.monotonic()
            states = torch.cat(
                [torch.tensor(one[1].beside)[path] for one, path in zip(kept, indices, strict=True)]
            )
            hmm = replace(hmm, beside=fit(hmm.beside, every, states, gaussians))
            best = list(workers.map(both, kept))
            indices = [path for path, _ in best]
            _report(f"pass {number}, with neighbours", gaussians, best, began)
            yield hmm


def _report(
    name: str, gaussians: int, best: Sequence[tuple[Tensor, float] | None], began: float
) -> None:
    paths = [one for one in best if one]
    mean = sum(total for _, total in paths) / sum(len(path) for path, _ in paths)
    print(
        f"{name}: {gaussians} Gaussians in each state, log-likelihood of a frame {mean:.3f}, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )


def main() -> None:
    """Train on a manifest and write the model after each pass."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--initial", type=Path, help="a file that keeps the initial alignment")
    parser.add_argument("--limit", type=int, help="use N utterances only, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    recogniser = load("english-phone-recogniser")
    pairs = read_manifest(arguments.manifest, Notation("spaces", None), "phones")
    spans = read_initial(recogniser, pairs, arguments.initial)
    chosen = random.Random(arguments.seed).sample(range(len(pairs)), arguments.limit or len(pairs))
    hmm = untrained(tuple(sorted(recogniser.signature.targets.symbols)))
    frames = [hmm.frames_and_levels(samples_of(pairs[i]))[0] for i in chosen]
    scales = torch.cat(frames).std(0)
    utterances = [
        Utterance(one / scales, pairs[i].target, spans[i])
        for i, one in zip(chosen, frames, strict=True)
    ]
    print(f"{len(utterances)} utterances, {sum(map(len, frames)):,} frames", flush=True)
    for trained in train(replace(hmm, scales=scales), utterances):
        trained.save(arguments.output)


if __name__ == "__main__":
    main()
