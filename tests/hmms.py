"""Small hidden Markov models of phones."""

import torch

from transduce.alignment.phone_hmm import Mixtures, PhoneHMM
from transduce.audio.features import FeatureSettings

SETTINGS = FeatureSettings(
    "log_mel", window=0.020, shift=0.005, num_channels=26, num_deltas=2, delta_reach=1
)
SYMBOLS = ("A", "P", "S", "E")  # P is a stop
CLASSES = (0, 1, 2, 0)
D = 39


def random_mixtures(states, spread, gaussians, generator):
    means = spread * torch.randn(states, 1, D, generator=generator)
    means = means + 0.3 * torch.randn(states, gaussians, D, generator=generator)
    variances = 0.5 + torch.rand(states, gaussians, D, generator=generator)
    log_weights = torch.randn(states, gaussians, generator=generator).log_softmax(1)
    return Mixtures(means, variances, log_weights)


def random_hmm(spread=1.0, gaussians=2, seed=0):
    """Return a model of four phones; `spread` is the distance of the means from each other.

    What depends on the neighbours is equal to what depends on the phone alone.
    """
    generator = torch.Generator().manual_seed(seed)
    alone = random_mixtures(3 * len(SYMBOLS) + 1, spread, gaussians, generator)
    own = [3 * i + state for i in range(4) for state in (0, 0, 0, 0, 1, 2, 2, 2, 2)] + [12]
    beside = Mixtures(alone.means[own], alone.variances[own], alone.log_weights[own])
    scales = 1 + torch.rand(D, generator=generator)
    return PhoneHMM(SYMBOLS, CLASSES, SETTINGS, scales, alone, beside)
