"""Finite stand-ins for ln 0 in the compiled kernels, so that no difference of two of them is NaN.

IMPOSSIBLE is stored in place of -inf. Sums of it with ordinary log-probabilities stay below NEVER,
so a kernel tests `x <= NEVER`. The Numba kernels compute in float64 and use the float64 pair; a
CUDA kernel uses the pair of its own type, which it gets as compiler options.
"""

from __future__ import annotations

IMPOSSIBLE = -1e290
NEVER = -1e280
IMPOSSIBLE_FLOAT32 = -1e30
NEVER_FLOAT32 = -1e29


def impossible(double: bool) -> float:
    """Return IMPOSSIBLE of a CUDA kernel that computes in float64 (`double`) or in float32."""
    return IMPOSSIBLE if double else IMPOSSIBLE_FLOAT32


def never(double: bool) -> float:
    """Return NEVER of a CUDA kernel that computes in float64 (`double`) or in float32."""
    return NEVER if double else NEVER_FLOAT32


def cuda_options(double: bool) -> tuple[str, str]:
    """Return the compiler options that define IMPOSSIBLE and NEVER in a CUDA source."""
    suffix = "" if double else "f"  # a float literal, so that float32 code stays in float32
    return f"-DIMPOSSIBLE=({impossible(double)!r}{suffix})", f"-DNEVER=({never(double)!r})"
