"""Transducers that learn, roughly and within seconds, to name the notes of melodies."""

import torch

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import Features, FeatureSettings, Statistics
from transduce.data.pairs import Notation
from transduce.lattice.loss import transducer_loss
from transduce.model.model import Model
from transduce.model.signature import Signature

RATE = 16_000
NOTES = {"A": 300.0, "B": 550.0, "C": 950.0, "D": 1600.0, "E": 2600.0}


def melody(seed, num_notes=None):
    """Return samples [N] of a melody with some noise, and the numbers of its notes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return low + (high - low) * float(torch.rand((), generator=generator))

    num_notes = num_notes or 2 + int(draw(0, 6))
    notes = torch.randint(len(NOTES), (num_notes,), generator=generator).tolist()
    parts = [torch.zeros(round(draw(0.05, 0.15) * RATE))]
    for note in notes:
        time = torch.arange(round(draw(0.08, 0.2) * RATE)) / RATE
        tone = torch.sin(2 * torch.pi * list(NOTES.values())[note] * time)
        parts += [draw(0.1, 0.5) * tone, torch.zeros(round(draw(0.03, 0.1) * RATE))]
    wave = torch.cat(parts)
    return wave + 0.003 * torch.randn(len(wave), generator=generator), notes


def trained_model(kind="sherpa", steps=300, **network):
    """Train a transducer to name the notes of melodies; return the model."""
    features = FeatureSettings(kind=kind, num_channels=24, num_deltas=0)
    extract = Features(features)
    heard = [melody(seed) for seed in range(100)]
    frames = [extract(wave[None])[0][0] for wave, _ in heard]
    statistics = Statistics.over(frames)
    inputs = [statistics.normalise(one) for one in frames]
    labels = [torch.tensor(notes) + 1 for _, notes in heard]
    config = NetworkConfig(hidden_size=24, prediction_size=12, **network)
    torch.manual_seed(1)
    model = build_network(config, features.size, len(NOTES))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        chosen = [(step * 16 + i) % len(inputs) for i in range(16)]
        x, y = ([group[i] for i in chosen] for group in (inputs, labels))
        num_frames, num_labels = (torch.tensor([len(one) for one in group]) for group in (x, y))
        padded = [torch.nn.utils.rnn.pad_sequence(group, True) for group in (x, y)]
        f, g, num_vectors = model(padded[0], num_frames, padded[1])
        loss = transducer_loss(f, g, padded[1], num_vectors, num_labels).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
    signature = Signature(
        Alphabet(NOTES), Notation("spaces", None), features=features, statistics=statistics
    )
    return Model(model.eval(), config, signature)
