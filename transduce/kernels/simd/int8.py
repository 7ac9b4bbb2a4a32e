"""Weights in a quarter of the memory: rows of float32 that are int8 times a power of two.

So are the rows of a model that was saved in int8. A product with a power of two only changes the
exponent, so that sums of the integers' products, times the scale, are those of the weights to the
bit.
"""

from __future__ import annotations

import math

import numpy as np

from transduce.kernels.simd.options import compiled

MOST = 127  # steps of the largest weight of a row
# The scales' exponents, far from where a sum would be too large or too small for float32 with the
# scale, and not without it.
EXPONENTS = (-32, 32)


def int8_rows(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return integers [R, C] and scales [R] whose products are the weights [R, C] to the bit.

    Scales are powers of two. None if there are none, or if the weights are not float32.
    """
    if weights.dtype != np.float32:
        return None
    integers, scales = np.empty(weights.shape, np.int8), np.empty(len(weights), np.float32)
    return (integers, scales) if _split_rows(weights, integers, scales) else None


@compiled
def _split_rows(weights, integers, scales):
    """Write integers and scales; return whether they are exact. Stop at the first row that fails.

    A scale is the smallest power of two that reaches the row's largest weight in MOST steps. A file
    has the same scale: rounding to its steps leaves the largest weight at more than MOST / 2 steps.
    """
    found = np.empty(weights.shape[1], np.float32)
    for r in range(weights.shape[0]):
        row, steps = weights[r], integers[r]
        largest = np.float32(0)
        for k in range(row.size):
            largest = max(largest, abs(row[k]))
        exponent = 0  # of a row of zeros, or with NaN or infinite weights, which are found below
        if 0 < largest < np.inf:
            fraction, exponent = math.frexp(np.float64(largest) / MOST)
            exponent -= fraction == 0.5
        if not EXPONENTS[0] <= exponent <= EXPONENTS[1]:
            return False
        scale = np.float32(2.0**exponent)
        scales[r] = scale
        for k in range(row.size):
            quotient = row[k] / scale if abs(row[k]) <= largest < np.inf else 0
            steps[k] = np.int8(np.rint(quotient))
            found[k] = np.float32(steps[k]) * scale
        # Bits, because -0 is not what the product gives.
        if not np.array_equal(found.view(np.int32), row.view(np.int32)):
            return False
    return True
