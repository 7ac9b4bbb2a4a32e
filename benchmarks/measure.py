"""How the benchmarks measure: contenders in turn, warm, medians; and how much memory they take.

They run on the GPU if there is one, timed by its events, else on the CPU.
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
    """What the figures were measured with."""
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
    """The median time of each in milliseconds.

    All take turns for the whole time, three calls a turn of which the last counts, so that each is
    warm and none gets the machine's good moments.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in contenders.items():
            times[name].append(_third(call))
    return {name: median(t) for name, t in times.items()}


def _third(call: Callable[[], object]) -> float:
    """How many milliseconds the third of three calls takes."""
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
    """The call's kernels as one CUDA graph, so that no launch waits for Python."""
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
    """How much more memory a call takes at most: PyTorch's count of it on the GPU; on the CPU the
    process's growth, by Linux's high-water mark, reset before."""
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
    ctypes.CDLL(None).malloc_trim(0)  # so that no memory left from before is used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """The table as text that reads the same in a file."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
