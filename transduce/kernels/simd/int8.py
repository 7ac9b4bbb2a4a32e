"""Weights in a quarter of the memory: rows of float32 that are int8 times a scale, to the bit.

So are the rows of a model that was saved in int8: its largest weight is ±127 steps.
"""

from __future__ import annotations

import numpy as np

from transduce.kernels.simd.options import compiled

MOST = 127  # steps of the largest weight of a row


def int8_rows(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return integers [R, C] and scales [R] whose products are the weights [R, C] to the bit.

    None if there are none with the largest weight of each row at 127 steps, or if the weights are
    not float32.
    """
    if weights.dtype != np.float32:
        return None
    integers, scales = np.empty(weights.shape, np.int8), np.empty(len(weights), np.float32)
    return (integers, scales) if _split_rows(weights, integers, scales) else None


@compiled
def _split_rows(weights, integers, scales):
    """Write integers and scales; return whether they are exact. Stop at the first row that fails.

    The scale s of a file is the rounded quotient of a row's largest weight and 127. The largest
    weight that is loaded is the rounded product 127 s, and its quotient by 127 rounds to s again,
    for all s that are such quotients (the tests try every mantissa).
    """
    found = np.empty(weights.shape[1], np.float32)
    for r in range(weights.shape[0]):
        row, steps = weights[r], integers[r]
        largest = np.float32(0)
        for k in range(row.size):
            largest = max(largest, abs(row[k]))
        scale = largest / np.float32(MOST)
        scales[r] = scale
        for k in range(row.size):
            # A row of zeros has the scale zero. NaN and infinite weights are found below.
            quotient = row[k] / scale if abs(row[k]) <= largest < np.inf and scale > 0 else 0
            steps[k] = np.int8(np.rint(quotient))
            found[k] = np.float32(steps[k]) * scale
        # Bits, because -0 is not what the product gives.
        if not np.array_equal(found.view(np.int32), row.view(np.int32)):
            return False
    return True
