"""CUDA C++ compiled when first used, by the NVRTC that comes with PyTorch, and its launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_ARGUMENTS = 32


@cache
def _nvrtc() -> Any:
    major = (torch.version.cuda or "").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    root = Path(torch.__file__).parent.parent / "nvidia"
    names += [str(path) for path in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError(f"NVRTC is not there; looked for {', '.join(names)}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(name))
        raise RuntimeError(f"{what} failed: {(name.value or b'?').decode()} ({code})")


@cache
def compile_cuda(source: str, options: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """The machine code of a source for one kind of GPU."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"transduce.cu", 0, None, None)
    flags = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", *options]
    array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    if nvrtc.nvrtcCompileProgram(program, len(flags), array):
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC did not compile: {log.value.decode()}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


class Kernel:
    """One function of a module on one device. Its arguments are all 64 bits wide."""

    def __init__(self, function: ctypes.c_void_p, context: ctypes.c_void_p, device: int) -> None:
        self.function, self.context, self.device = function, context, device
        self.values = (ctypes.c_int64 * MAX_ARGUMENTS)()
        first = ctypes.addressof(self.values)
        places = range(first, first + 8 * MAX_ARGUMENTS, 8)
        self.pointers = (ctypes.c_void_p * MAX_ARGUMENTS)(*places)
        self.launch = _driver().cuLaunchKernel

    def __call__(
        self, grid: tuple[int, int], threads: int, arguments: Sequence[Tensor | int | float]
    ) -> None:
        """Launch on the current stream: tensors as pointers, int as long long, float as double."""
        for i, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                self.values[i] = argument.data_ptr()
            elif isinstance(argument, int):
                self.values[i] = argument
            else:
                self.values[i] = struct.unpack("q", struct.pack("d", argument))[0]
        # Autograd's threads begin without one.
        _check(_driver().cuCtxSetCurrent(self.context), "setting the context")
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.device))
        _check(
            self.launch(self.function, *grid, 1, threads, 1, 1, 0, stream, self.pointers, None),
            "a kernel's launch",
        )


@cache
def kernels(
    source: str, options: tuple[str, ...], names: tuple[str, ...], device: int
) -> tuple[Kernel, ...]:
    """The named kernels of a source, loaded on a device; call it with that device current."""
    code = compile_cuda(source, options, torch.cuda.get_device_capability(device))
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "loading a module")
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "reading the context")
    loaded = []
    for name in names:
        function = ctypes.c_void_p()
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            f"finding {name}",
        )
        loaded.append(Kernel(function, context, device))
    return tuple(loaded)
