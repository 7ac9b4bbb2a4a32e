"""exp, log, log1p, sigmoid and tanh without branches, so that loops around them vectorise.

In float32 they are minimax polynomials over the range that remains after factoring out a power of
two. In float64, where precision matters more than speed, they are the C library's functions.
test_simd.py measures the errors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from transduce.kernels.simd.options import CONTRACT, intrinsic, overload


def _bit_cast(to: types.Type, to_ir: ir.Type) -> Any:
    @intrinsic
    def cast(typing_context: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], to_ir)

        return to(x), codegen

    return cast


_bits = _bit_cast(types.int32, ir.IntType(32))
_from_bits = _bit_cast(types.float32, ir.FloatType())

_LOG2_E = np.float32(math.log2(math.e))
_ROUND = np.float32(1.5 * 2**23)  # adding it rounds to an integer, in the low bits
_LN2_HIGH = np.float32(0.693145751953125)  # ln 2 in two parts; n * _LN2_HIGH is exact
_LN2_LOW = np.float32(math.log(2) - 0.693145751953125)
_EXP_LOW, _EXP_HIGH = np.float32(-87.33), np.float32(88.0)
_TANH_LOW, _TANH_HIGH = np.float32(-20.0), np.float32(20.0)  # bounds of 2x
_ONE, _TWO, _HALF, _ZERO = np.float32(1), np.float32(2), np.float32(0.5), np.float32(0)
_ONE_BITS = np.int32(127 << 23)
_MANTISSA = np.int32(23)
# e^r = 1 + r + r^2 (E0 + E1 r + ...) for |r| <= ln(2) / 2
_E0, _E1, _E2, _E3, _E4, _E5 = (
    np.float32(c)
    for c in (0.5, 0.16666667163, 0.0416662544, 0.00833326299, 0.00139472249, 0.00019919380)
)
# ln(1 + f) = f - f^2 / 2 + f^3 (L0 + L1 f + ...) for sqrt(1/2) - 1 <= f <= sqrt(2) - 1
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (
    np.float32(c)
    for c in (
        *(0.3333331048, -0.2499998659, 0.2000222653, -0.1666925102, 0.1421865821),
        *(-0.1238434836, 0.1187297627, -0.1178980768, 0.0691536814),
    )
)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
# ln(1 + z) = z (S0 + S1 z + ...) for 0 <= z <= 1
_S0, _S1, _S2, _S3, _S4, _S5, _S6, _S7, _S8, _S9 = (
    np.float32(c)
    for c in (
        *(0.9999998808, -0.4999934733, 0.3332148492, -0.2489211559, 0.1942333728),
        *(-0.1469127387, 0.0969111174, -0.0488452949, 0.0158852190, -0.0024245873),
    )
)


@njit(fastmath=CONTRACT)
def _split_exp(x):
    """Return 2^n and e^r - 1 with e^x = 2^n e^r, for x between _EXP_LOW and _EXP_HIGH."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    q = ((((_E5 * r + _E4) * r + _E3) * r + _E2) * r + _E1) * r + _E0
    power = _from_bits(np.int32((_bits(shifted) << _MANTISSA) + _ONE_BITS))
    return power, q * (r * r) + r


@njit(fastmath=CONTRACT)
def _exp32(x):
    clamped = _EXP_LOW if x < _EXP_LOW else x  # NaN stays NaN
    clamped = _EXP_HIGH if clamped > _EXP_HIGH else clamped
    power, rest = _split_exp(clamped)
    value = power * rest + power
    return _ZERO if x < _EXP_LOW else value


@njit(fastmath=CONTRACT)
def _log32(x):
    exponent = np.int32((_bits(x) - _SQRT_HALF_BITS) >> _MANTISSA)
    f = _from_bits(np.int32(_bits(x) - (exponent << _MANTISSA))) - _ONE
    p = (((((((_L8 * f + _L7) * f + _L6) * f + _L5) * f + _L4) * f + _L3) * f + _L2) * f + _L1) * f
    n = np.float32(exponent)
    tail = f * f * (f * (p + _L0) - _HALF) + n * _LN2_LOW
    return n * _LN2_HIGH + (f + tail)


@njit(fastmath=CONTRACT)
def _log1p32(z):
    p = (((((_S9 * z + _S8) * z + _S7) * z + _S6) * z + _S5) * z + _S4) * z + _S3
    return (((p * z + _S2) * z + _S1) * z + _S0) * z


@njit(fastmath=CONTRACT)
def _sigmoid32(x):
    return _ONE / (_ONE + _exp32(-x))


@njit(fastmath=CONTRACT)
def _tanh32(x):
    doubled = x * _TWO
    doubled = _TANH_LOW if doubled < _TANH_LOW else doubled
    doubled = _TANH_HIGH if doubled > _TANH_HIGH else doubled
    power, rest = _split_exp(doubled)
    grown = power * rest + (power - _ONE)  # e^2x - 1 without cancellation near 0
    return grown / (grown + _TWO)


@njit
def _exp64(x):
    return math.exp(x)


@njit
def _log64(x):
    return math.log(x)


@njit
def _log1p64(x):
    return math.log1p(x)


@njit
def _sigmoid64(x):
    return 1.0 / (1.0 + math.exp(-x))


@njit
def _tanh64(x):
    return math.tanh(x)


def exp(x: Any) -> Any:
    """Compute e^x; in float32 it is 0 below -87.33 and e^88 above 88."""


def log(x: Any) -> Any:
    """Compute ln x, for x positive and not denormal."""


def log1p(x: Any) -> Any:
    """Compute ln(1 + x), for x between 0 and 1."""


def sigmoid(x: Any) -> Any:
    """Compute the logistic sigmoid σ(x) = 1 / (1 + e^-x)."""


def tanh(x: Any) -> Any:
    """Compute the hyperbolic tangent."""


def cast_like(x: Any, like: Any) -> Any:
    """Convert the float64 x to the number type of the array `like`."""


def _by_type(function: Any, for_float32: Any, for_float64: Any) -> None:
    """Compile calls of `function` to one of two implementations, by the type of the argument."""

    @overload(function)
    def choose(x):
        if x == types.float32:
            return lambda x: for_float32(x)
        return lambda x: for_float64(x)


@overload(cast_like, inline="always")
def _cast_like(x, like):
    if like.dtype == types.float32:
        return lambda x, like: np.float32(x)
    return lambda x, like: x


_by_type(exp, _exp32, _exp64)
_by_type(log, _log32, _log64)
_by_type(log1p, _log1p32, _log1p64)
_by_type(sigmoid, _sigmoid32, _sigmoid64)
_by_type(tanh, _tanh32, _tanh64)
