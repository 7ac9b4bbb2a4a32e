"""CUDA kernels on the CPU: g++ compiles a source, and coroutines stand for a block's threads."""

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from transduce.kernels.nvrtc import _bits

HEADER = Path(__file__).with_name("emulated_block.h")
INSTRUCTIONS = Path(__file__).with_name("emulated_instructions.h")
PTX = re.compile(r"// --- PTX instructions;.*?// --- End of the PTX instructions ---", re.DOTALL)
THREADS = 64  # of a block: patch the module whose kernels are emulated
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


@cache
def emulated_kernels(source, options, names, device):
    """Return functions that run the named kernels on CPU tensors, with few threads a block."""
    source = re.sub(r"extern __shared__ [^;]*;", "", source)
    source = PTX.sub(f'#include "{INSTRUCTIONS}"', source)
    doors = ""
    for name in names:
        parameters = re.search(rf" {name}\(([^)]*)\) {{", source)[1].split(",")
        types = [re.sub(r"\w+\s*$", "", parameter.strip()) for parameter in parameters]
        read = ", ".join(
            f"__longlong_as_double(v[{i}])" if kind.strip() == "double" else f"({kind})v[{i}]"
            for i, kind in enumerate(types)
        )
        doors += f"static void body_{name}(const long long *v) {{ {name}({read}); }}\n"
        doors += f'extern "C" int run_{name}(int blocks, int threads, int all, const long long *v) '
        doors += f"{{ return run_grid(body_{name}, blocks, threads, all, v); }}\n"
    folder = Path(mkdtemp())
    (folder / "kernels.cpp").write_text(f'#include "{HEADER}"\n{source}\n{doors}')
    library = folder / "kernels.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *options]
    subprocess.run([*command, "-o", library, folder / "kernels.cpp"], check=True)
    loaded = ctypes.CDLL(str(library))

    def kernel(name):
        def launch(grid, threads, arguments, shared=0, together=False, stream=None):
            assert shared <= 1 << 17
            values = (ctypes.c_int64 * len(arguments))(*map(_bits, arguments))
            run = getattr(loaded, f"run_{name}")
            assert run(grid[0], threads, together, values) == 0, (
                "threads wait for others that have ended"
            )

        return launch

    return tuple(map(kernel, names))
