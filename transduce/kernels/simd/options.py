"""Compiler options of the CPU kernels."""

from collections.abc import Callable
from typing import Any

from numba import extending, njit

from transduce.kernels.simd.cache import KernelCache

# `contract` allows fused multiply-add. No sum is reordered, so that results are the same from run
# to run, and the result of a row does not depend on the other rows.
CONTRACT = {"contract"}


def compiled_with(fastmath: set[str]) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function when it is first called, and keeps it on disk."""

    def decorator(function: Any) -> Any:
        # Without the wrapper through which C would call the function: none does.
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
        kernel: Any = njit(fastmath=fastmath, **options)(function)
        kernel._cache = KernelCache(function)
        return kernel

    return decorator


compiled = compiled_with(CONTRACT)
intrinsic: Any = extending.intrinsic
overload: Any = extending.overload

# One cache line: two AVX2 registers, or one of AVX-512. A tile of wider vectors would need more
# registers than AVX2 has; narrower ones would leave half of AVX-512 idle.
VECTOR_BYTES = 64
