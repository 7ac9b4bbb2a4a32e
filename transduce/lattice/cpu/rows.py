"""Maximum and validity of a row of numbers."""

from __future__ import annotations

import numpy as np

from transduce.kernels.simd.options import compiled, compiled_with


@compiled_with({"nnan", "nsz"})
def largest(row):
    """Return the largest number of a row that has no NaN."""
    top = row[0]
    for k in range(row.size):
        if row[k] > top:
            top = row[k]
    return top


@compiled
def count_bad(row):
    """Count the numbers of a row that are NaN or +inf."""
    count = 0
    for k in range(row.size):
        count += not (row[k] < np.inf)
    return count
