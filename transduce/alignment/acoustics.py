"""A second opinion of each phone: whether another one fits its interval better.

The recogniser hears a phone together with its neighbours, and expects phones that follow each other
often. The hidden Markov model knows neither, and errs elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from transduce.alignment.bands import log_likelihoods
from transduce.alignment.phone_hmm import ACOUSTIC_SCALE, STATES, PhoneHMM, Spans
from transduce.kernels.sentinels import IMPOSSIBLE
from transduce.kernels.simd.options import compiled


def phone_deficits(
    hmm: PhoneHMM, frames: Tensor, phones: Sequence[str], spans: Spans
) -> list[float]:
    """Return by how much, for each frame, another phone or silence fits each span better.

    `frames` are all those of a sound [T, D]. The log-likelihoods, of the best path through a
    phone's three states, are times the acoustic scale. A phone that fits best has 0.
    """
    numbers = frames.numpy()
    columns = np.ascontiguousarray(np.concatenate([numbers, numbers * numbers], 1).T)
    found = list[float]()
    for phone, span in zip(phones, spans, strict=True):
        first, last = (round(hmm.frame(time)) for time in span)
        first = min(max(0, first), max(0, len(numbers) - STATES))
        last = min(max(first + STATES, last), len(numbers))  # no phone has fewer frames than states
        scores = _path_scores(columns, *hmm.alone.densities, first, last)
        own = scores[hmm.symbols.index(phone)]
        found.append(ACOUSTIC_SCALE * float(scores.max() - own) / (last - first))
    return found


@compiled
def _path_scores(columns, weights, constants, first, last):
    """Return ln of the best path through each phone's states in some frames, and of silence."""
    T, S = last - first, weights.shape[0]
    likelihoods = np.empty((S, T), np.float32)
    for state in range(S):
        log_likelihoods(columns, weights[state], constants[state], first, last, likelihoods[state])
    found = np.empty(S // STATES + 1)
    for phone in range(S // STATES):
        at = np.full(STATES, IMPOSSIBLE)  # the best path that is in each state
        at[0] = 0.0
        for t in range(T):
            for i in range(STATES - 1, -1, -1):
                if i > 0 and t > 0:
                    at[i] = max(at[i], at[i - 1])
                at[i] += likelihoods[STATES * phone + i, t]
        found[phone] = at[-1]
    found[-1] = likelihoods[-1].astype(np.float64).sum()
    return found
