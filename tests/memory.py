"""How much memory a call takes, as Linux counts it: tensors, NumPy's and Numba's arrays alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
needs_proc = pytest.mark.skipif(not RESET.exists(), reason="the peak of memory is Linux's to count")


def extra_megabytes(call: Callable[[], object]) -> float:
    """Return by how many megabytes the process grew at most during a call."""
    RESET.write_text("5")  # the peak becomes what is used now
    before = _megabytes("VmRSS")
    call()
    return _megabytes("VmHWM") - before


def _megabytes(field: str) -> float:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1e3
