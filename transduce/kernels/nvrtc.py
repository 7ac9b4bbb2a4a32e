"""Compile CUDA C++ when it is first used, with the NVRTC that comes with PyTorch, and launch it.

Every launch goes through the CUDA driver's C interface and PyTorch's public streams; no private
interface of PyTorch is used. `full_float32_matmul` is here because the same backends need it: no
function changes PyTorch's process-wide precision switches.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_ARGUMENTS = 32
USUAL_SHARED = 48 * 1024  # bytes of shared memory; a kernel that needs more must ask for it
MOST_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Thread(threading.local):
    """A thread's buffers for a launch's arguments, and the device of its current context."""

    def __init__(self) -> None:
        self.device: int | None = None
        self.values = (ctypes.c_int64 * MAX_ARGUMENTS)()
        first = ctypes.addressof(self.values)
        places = range(first, first + 8 * MAX_ARGUMENTS, 8)
        self.pointers = (ctypes.c_void_p * MAX_ARGUMENTS)(*places)


_thread = _Thread()


@cache
def _nvrtc() -> Any:
    """Load NVRTC: the one of PyTorch's CUDA version, or any that is installed beside PyTorch."""
    major = (torch.version.cuda or "").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    root = Path(torch.__file__).parent.parent / "nvidia"
    names += [str(path) for path in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError(f"NVRTC was not found; looked for {', '.join(names)}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _context(device: int) -> ctypes.c_void_p:
    """Return the context of a device that PyTorch uses, its primary one."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "finding the GPU")
    code = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    _check(code, "asking for the GPU's context")
    return context


def _enter_context(device: int) -> None:
    """Make the device's context current in this thread; autograd's threads start without one."""
    if _thread.device != device:
        _check(_driver().cuCtxSetCurrent(_context(device)), "setting the context")
        _thread.device = device


def _check(code: int, what: str) -> None:
    """Raise RuntimeError if the driver returned an error code; `what` names the action."""
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(name))
        raise RuntimeError(f"{what} failed: {(name.value or b'?').decode()} ({code})")


@cache
def compile_cuda(source: str, options: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """Compile a source for one compute capability; return the machine code."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    text = source.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"transduce.cu", 0, None, None):
        raise RuntimeError("NVRTC did not accept the source")
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
        raise RuntimeError("NVRTC returned no machine code")
    return code.raw


class Kernel:
    """One kernel of a module, loaded on one device. All its arguments are 64 bits wide."""

    def __init__(self, function: ctypes.c_void_p, device: int) -> None:
        self.function, self.device = function, device
        self.shared = USUAL_SHARED

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | float | None],
        shared: int = 0,
        together: bool = False,
        stream: int | None = None,
    ) -> None:
        """Launch the kernel: pass tensors as pointers, None as a null pointer, int as long long and
        float as double.

        `shared` is the dynamic shared memory in bytes. With `together` all blocks run at once, so
        that one may wait for another. `stream` is the handle of the current stream, for a caller
        that makes several launches; without it the launch asks for it.
        """
        thread, driver = _thread, _driver()
        # ctypes converts a whole list and plain ints fastest; declared types would cost more.
        thread.values[: len(arguments)] = [x if type(x) is int else _bits(x) for x in arguments]
        _enter_context(self.device)
        if shared > self.shared:
            code = driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, shared)
            _check(code, f"asking for {shared} bytes of shared memory")
            self.shared = shared
        handle = ctypes.c_void_p(current_stream(self.device) if stream is None else stream)
        options = (self.function, *grid, 1, threads, 1, 1, shared, handle, thread.pointers)
        if together:
            code = driver.cuLaunchCooperativeKernel(*options)
        else:
            code = driver.cuLaunchKernel(*options, None)
        if code:
            _check(code, "a kernel's launch")


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
    """Return a context in which the device is the current one."""
    here = device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


def current_stream(device: int) -> int:
    """Return the handle of a device's current stream, for launches."""
    return torch.cuda.current_stream(device).cuda_stream


def without_autocast(device_type: str = "cuda") -> AbstractContextManager[Any]:
    """Return a context in which autocast casts no product of this thread; TF32 stays as it is."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def tf32_enabled() -> bool:
    """Return whether PyTorch's switch lets a GPU's products of float32 numbers be TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


LOW_BITS = 13  # of a float32's 23 bits of mantissa, those that TF32 leaves out


def full_float32_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b of matrices or batches in full precision, even if TF32 or autocast is on.

    With TF32 enabled, each operand is split into a part that TF32 holds exactly and the rest, and
    the four products are added, smallest first. The process-wide switch stays as it is. `out` may
    be neither a nor b.
    """
    product = torch.bmm if a.ndim == 3 else torch.mm  # half of matmul's time per call
    single = a.is_cuda and a.dtype == torch.float32
    tf32 = single and tf32_enabled()
    if not tf32 and not torch.is_autocast_enabled(a.device.type):
        return product(a, b, out=out)
    with without_autocast(a.device.type):
        if not tf32:
            return product(a, b, out=out)
        (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
        result = product(a_low, b_low, out=out)
        for left, right in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
            result += product(left, right)
        return result


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of x that TF32 holds exactly, and the rest."""
    high = (x.contiguous().view(torch.int32) & -(1 << LOW_BITS)).view(torch.float32)
    return high, x - high


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned to 16 bytes; copy it if it is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def set_all_bits(tensor: Tensor, stream: int) -> None:
    """Set every bit of a tensor, on the stream of a handle."""
    _enter_context(tensor.get_device())
    handle, place = ctypes.c_void_p(stream), ctypes.c_void_p(tensor.data_ptr())
    words = ctypes.c_size_t(tensor.nbytes // 4)
    if code := _driver().cuMemsetD32Async(place, 0xFFFFFFFF, words, handle):
        _check(code, "a fill")


@cache
def shared_memory(device: int) -> int:
    """Return the bytes of shared memory that a block may ask for on a device."""
    number, handle = ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "finding the GPU")
    code = _driver().cuDeviceGetAttribute(ctypes.byref(number), MOST_SHARED, handle)
    _check(code, "asking for the GPU's shared memory")
    return number.value


@cache
def kernels(
    source: str, options: tuple[str, ...], names: tuple[str, ...], device: int
) -> tuple[Kernel, ...]:
    """Return the named kernels of a source, loaded on a device, which must be the current one."""
    code = compile_cuda(source, options, torch.cuda.get_device_capability(device))
    _enter_context(device)
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "loading a module")
    loaded = []
    for name in names:
        function = ctypes.c_void_p()
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            f"finding {name}",
        )
        loaded.append(Kernel(function, device))
    return tuple(loaded)
