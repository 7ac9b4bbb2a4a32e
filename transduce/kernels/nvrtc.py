"""CUDA C++ compiled when first used, by the NVRTC that comes with PyTorch, and its launches."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_ARGUMENTS = 32
USUAL_SHARED = 48 * 1024  # bytes; a kernel that needs more must ask
MOST_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Thread(threading.local):
    """A thread's own room for a launch's arguments, and the device whose context it has."""

    def __init__(self) -> None:
        self.device: int | None = None
        self.values = (ctypes.c_int64 * MAX_ARGUMENTS)()
        first = ctypes.addressof(self.values)
        places = range(first, first + 8 * MAX_ARGUMENTS, 8)
        self.pointers = (ctypes.c_void_p * MAX_ARGUMENTS)(*places)


_thread = _Thread()


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
    text = source.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"transduce.cu", 0, None, None):
        raise RuntimeError("NVRTC did not take the source")
    try:
        return _compiled(nvrtc, program, options, capability)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _compiled(
    nvrtc: Any, program: ctypes.c_void_p, options: tuple[str, ...], capability: tuple[int, int]
) -> bytes:
    flags = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", *options]
    array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    size = ctypes.c_size_t()
    if nvrtc.nvrtcCompileProgram(program, len(flags), array):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC did not compile: {log.value.decode()}")
    failed = nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    if failed or nvrtc.nvrtcGetCUBIN(program, code):
        raise RuntimeError("NVRTC gave no machine code")
    return code.raw


class Kernel:
    """One function of a module on one device. Its arguments are all 64 bits wide."""

    def __init__(self, function: ctypes.c_void_p, context: ctypes.c_void_p, device: int) -> None:
        self.function, self.context, self.device = function, context, device
        self.shared = USUAL_SHARED

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | float | None],
        shared: int = 0,
        together: bool = False,
    ) -> None:
        """Launch on the current stream: tensors as pointers, None as a null one, int as long long,
        float as double.

        `shared` is the dynamic shared memory in bytes. With `together` all blocks run at once, so
        that one may wait for another.
        """
        _thread.values[: len(arguments)] = [_bits(argument) for argument in arguments]
        if _thread.device != self.device:  # autograd's threads begin without a context
            _check(_driver().cuCtxSetCurrent(self.context), "setting the context")
            _thread.device = self.device
        if shared > self.shared:
            what = _driver().cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, shared)
            _check(what, f"asking for {shared} bytes of shared memory")
            self.shared = shared
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.device))
        options = (self.function, *grid, 1, threads, 1, 1, shared, stream, _thread.pointers)
        if together:
            _check(_driver().cuLaunchCooperativeKernel(*options), "a kernel's launch")
        else:
            _check(_driver().cuLaunchKernel(*options, None), "a kernel's launch")


def _bits(argument: Tensor | int | float | None) -> int:
    if argument is None:
        return 0
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, int):
        return argument
    bits: int = struct.unpack("q", struct.pack("d", argument))[0]
    return bits


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which the device is the current one."""
    here = device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


def without_autocast() -> AbstractContextManager[Any]:
    """A context for products of tensors as they are, in TF32 if PyTorch was told so."""
    on = torch.is_autocast_enabled("cuda")
    return torch.autocast("cuda", enabled=False) if on else nullcontext()


def full_float32() -> AbstractContextManager[None]:
    """A context for products in full float32, whatever PyTorch was told of TF32 and half types."""
    rounded = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _full_float32() if rounded or torch.is_autocast_enabled("cuda") else nullcontext()


@contextmanager
def _full_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and where 16 bytes can be loaded at once; copied if it is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def set_all_bits(tensor: Tensor) -> None:
    """Fill a tensor with ones, bit by bit, on the current stream."""
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(tensor.get_device()))
    place, words = ctypes.c_void_p(tensor.data_ptr()), tensor.nbytes // 4
    _check(_driver().cuMemsetD32Async(place, 0xFFFFFFFF, ctypes.c_size_t(words), stream), "a fill")


@cache
def shared_memory(device: int) -> int:
    """How many bytes of it a block may ask for."""
    number, handle = ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "finding the GPU")
    code = _driver().cuDeviceGetAttribute(ctypes.byref(number), MOST_SHARED, handle)
    _check(code, "asking for the GPU's shared memory")
    return number.value


@cache
def kernels(
    source: str, options: tuple[str, ...], names: tuple[str, ...], device: int
) -> tuple[Kernel, ...]:
    """The named kernels of a source, loaded on a device; call it with that device current."""
    code = compile_cuda(source, options, torch.cuda.get_device_capability(device))
    module, context, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "finding the GPU")
    # PyTorch's own context; the thread may have none yet.
    what = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    _check(what, "asking for the GPU's context")
    _check(_driver().cuCtxSetCurrent(context), "setting the context")
    _thread.device = device
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "loading a module")
    loaded = []
    for name in names:
        function = ctypes.c_void_p()
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            f"finding {name}",
        )
        loaded.append(Kernel(function, context, device))
    return tuple(loaded)
