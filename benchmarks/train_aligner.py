"""Train the hidden Markov model of phones that `transduce align` takes boundaries from.

    python benchmarks/train_aligner.py MANIFEST OUTPUT [--initial FILE] [--limit N] [--seed 0]

MANIFEST has `audio_filepath` and `phones` on each line. The shipped recogniser's emissions give the
initial alignment; `--initial` names a JSON file that keeps it: {sound: [[start, end], ...]}, in
seconds. Each pass fits the mixtures of the states to the frames that the alignment gives them (EM),
and then replaces the alignment by the most probable one (Viterbi training). Nothing is fitted to
hand labels.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.alignment.boundaries import Heard, emission_boundaries
from transduce.alignment.phone_hmm import STATES, PhoneHMM, Spans, state_lattice
from transduce.audio.features import FeatureSettings
from transduce.audio.sound import read_wave
from transduce.data.manifest import read_manifest
from transduce.data.pairs import Audio, Notation, Pair, Symbols
from transduce.decoding.search import transcribe
from transduce.lattice.loss import best_alignment
from transduce.model.model import Model, load

SETTINGS = FeatureSettings(window=0.020, shift=0.005, num_deltas=2, delta_reach=3)
GAUSSIANS = 1, 1, 2, 2, 4, 4, 8, 8, 16, 16  # in each state, pass by pass
STEPS = 3  # of EM in each pass
FLOOR = 0.01  # added to variances, where frames have variance 1
MOST_FRAMES = 20_000  # of a state that EM sees: accuracy against time
FEWEST_FRAMES = 20  # a state with fewer keeps its mixture
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


def best_states(hmm: PhoneHMM, utterance: Utterance) -> tuple[Tensor, float] | None:
    """Return the state [T] of each frame on the most probable path, and its log-likelihood.

    Return None if there are fewer frames than states.
    """
    states = torch.tensor(hmm.state_sequence(utterance.phones, utterance.spans).states)
    T = len(utterance.frames)
    if len(states) > T:
        return None
    log_likelihoods = hmm.log_likelihoods(utterance.frames, states).double()
    last, log_likelihood = best_alignment(*state_lattice(log_likelihoods))
    starts = [0, *(t + u + 1 for u, t in enumerate(last)), T]
    return states.repeat_interleave(torch.tensor(starts).diff()), log_likelihood


def split(hmm: PhoneHMM) -> PhoneHMM:
    """Return a model with twice as many Gaussians: each is replaced by two beside it."""
    step = 0.2 * hmm.variances.sqrt() * torch.randn_like(hmm.means).sign()
    return replace(
        hmm,
        means=torch.cat([hmm.means + step, hmm.means - step], 1),
        variances=hmm.variances.repeat(1, 2, 1),
        log_weights=hmm.log_weights.repeat(1, 2) - math.log(2),
    )


def fit(hmm: PhoneHMM, frames: Tensor, states: Tensor) -> PhoneHMM:
    """Return the model after some steps of EM on the frames [N, D] of each state."""
    means, variances, weights = hmm.means.clone(), hmm.variances.clone(), hmm.log_weights.clone()
    order, counts = states.argsort(), states.bincount(minlength=len(means)).tolist()
    for state, own in enumerate(order.split(counts)):
        if len(own) < FEWEST_FRAMES:
            continue
        own = own[torch.randperm(len(own))[:MOST_FRAMES]]
        mixture = means[state], variances[state], weights[state]
        for _ in range(STEPS):
            mixture = em_step(frames[own], *mixture)
        means[state], variances[state], weights[state] = mixture
    return replace(hmm, means=means, variances=variances, log_weights=weights)


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


def untrained(symbols: Symbols) -> PhoneHMM:
    """Return a model with one standard normal distribution in each state."""
    S, D = STATES * len(symbols) + 1, SETTINGS.size
    numbers = torch.zeros(S, 1, D), torch.ones(S, 1, D), torch.zeros(S, 1)
    return PhoneHMM(symbols, SETTINGS, torch.ones(D), *numbers)


def train(hmm: PhoneHMM, utterances: list[Utterance]) -> Iterator[PhoneHMM]:
    """Yield the model after each pass; print the log-likelihood of a frame on the best paths."""
    alignments = [initial_states(hmm, one) for one in utterances]
    frames = torch.cat([one.frames for one in utterances])
    for number, gaussians in enumerate(GAUSSIANS, start=1):
        began, total, aligned = time.monotonic(), 0.0, 0
        if hmm.means.shape[1] < gaussians:
            hmm = split(hmm)
        hmm = fit(hmm, frames, torch.cat(alignments))
        for i, utterance in enumerate(utterances):
            if (best := best_states(hmm, utterance)) is not None:
                alignments[i] = best[0]
                total, aligned = total + best[1], aligned + len(best[0])
        print(
            f"pass {number}: {gaussians} Gaussians in each state, log-likelihood of a frame "
            f"{total / aligned:.3f}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        yield hmm


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
    frames = [hmm.frames(samples_of(pairs[i])) for i in chosen]
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
