"""How the CPU kernels are compiled."""

from typing import Any

from numba import extending, njit

# `contract` lets a*b+c become one instruction. Nothing is reordered, so a result is the same from
# run to run, and a row's is the same whichever rows stand beside it.
CONTRACT = {"contract"}
compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath=CONTRACT)

intrinsic: Any = extending.intrinsic
overload: Any = extending.overload

VECTOR_BYTES = 64  # one cache line: two AVX2 registers, or one of AVX-512
