"""Time and memory measurements that the benchmarks share.

They run on the GPU if there is one, timed by CUDA events, and on the CPU otherwise.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def machine() -> str:
    """Describe the processor, the versions and the commit."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        fields = dict(
            map(str.strip, line.split(":", 1))
            for line in information.read_text().splitlines()
            if ":" in line
        )
        widths = [w for w in ("avx512f", "avx2", "avx") if w in fields.get("flags", "").split()]
        cpu = f"{fields.get('model name', cpu)}, {widths[0] if widths else 'no avx'}"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    if DEVICE == "cuda":
        cpu = f"{torch.cuda.get_device_name()}, {cpu}"
    return (
        f"{cpu}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}, commit {commit or 'unknown'}"
    )


def medians(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median time of each contender in milliseconds.

    The contenders take turns until the time is up. A turn is three calls, of which the last one is
    timed: each contender is then warm, and a slow moment of the machine affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in contenders.items():
            times[name].append(_third(call))
    return {name: median(t) for name, t in times.items()}


def _third(call: Callable[[], object]) -> float:
    """Return the milliseconds of the third of three calls."""
    call()
    call()
    if DEVICE == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Capture the call's kernels in a CUDA graph, and return a call that replays it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def extra_megabytes(call: Callable[[], object]) -> float:
    """Return the peak of the extra memory of a call in MiB.

    On the GPU it is PyTorch's own count; on the CPU it is the growth of the process, by Linux's
    high-water mark, which is reset before the call. On other systems it is NaN.
    """
    if DEVICE == "cuda":
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if platform.system() != "Linux":
        return float("nan")
    call()
    ctypes.CDLL(None).malloc_trim(0)  # reused memory would not count
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """Return a field of /proc/self/status in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table 110 columns wide at most, in a terminal and in a file alike."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
