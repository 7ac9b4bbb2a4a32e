"""The CUDA sources compile, with NVRTC and without a GPU."""

import ctypes
import re
import struct
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slow import slow_except

from transduce.decoding import cuda as decoding
from transduce.decoding import utterances
from transduce.kernels import nvrtc, sentinels
from transduce.lattice import cuda as lattice
from transduce.lstm import cuda as lstm
from transduce.lstm import tensor_cores

B200, H200, A100, T4 = (10, 0), (9, 0), (8, 0), (7, 5)  # compute capabilities
SHARED = {
    B200: 227 << 10,
    H200: 227 << 10,
    A100: 163 << 10,
    T4: 64 << 10,
}  # bytes of shared memory of a block


@pytest.fixture(autouse=True)
def compiler():
    try:
        nvrtc._nvrtc()
    except ImportError as error:
        pytest.skip(str(error))


LATTICES = [(U, torch.float32, H200) for U in (1, 40, 600, 2000, 2100, 4200)]
LATTICES += [(40, dtype, H200) for dtype in (torch.float64, torch.float16, torch.bfloat16)]
LATTICES += [(40, torch.bfloat16, A100), (40, torch.bfloat16, T4)]


@pytest.mark.parametrize("num_labels, dtype, capability", slow_except({1}, LATTICES))
def test_the_lattice_compiles(num_labels, dtype, capability):
    threads, per_thread = lattice.threads_for(num_labels)
    options = lattice.options(dtype, threads, per_thread)
    code = nvrtc.compile_cuda(lattice.SOURCE, options, capability)
    assert all(name.encode() in code for name in lattice.NAMES)


LAYERS = [(B, H, torch.float32, H200) for B, H in ((1, 128), (64, 512), (3, 5), (7, 900))]
LAYERS += [
    (64, 128, torch.float64, H200),
    (64, 128, torch.float32, A100),
    (7, 5, torch.float64, T4),
]


@pytest.mark.parametrize("B, H, dtype, capability", slow_except({0, 6}, LAYERS))
@pytest.mark.parametrize("parts", [1, 4], ids=["forward", "back"])
def test_the_lstm_compiles(parts, B, H, dtype, capability):
    plan = lstm.plan(parts, B, 2, H, dtype.itemsize, 40, SHARED[capability])
    code = nvrtc.compile_cuda(lstm.SOURCE, lstm.options(plan, H, dtype), capability)
    assert all(name.encode() in code for name in lstm.NAMES[parts])


ROUNDED = [(B, H, torch.bfloat16, H200) for B, H in ((1, 1), (64, 512), (7, 900), (300, 1024))]
ROUNDED += [(64, 320, torch.float16, H200), (64, 320, torch.bfloat16, A100)]
ROUNDED += [(3, 33, torch.float16, A100), (64, 320, torch.bfloat16, B200)]
# float32 stands for TF32.
ROUNDED += [(B, H, torch.float32, H200) for B, H in ((1, 1), (64, 512), (7, 900), (300, 1024))]
ROUNDED += [(64, 320, torch.float32, A100), (3, 700, torch.float32, A100)]
ROUNDED += [(64, 320, torch.float32, B200)]


@pytest.mark.parametrize("B, H, dtype, capability", slow_except({1}, ROUNDED))
@pytest.mark.parametrize("parts", [1, 4], ids=["forward", "back"])
def test_the_lstm_on_tensor_cores_compiles(parts, B, H, dtype, capability):
    P, room = tensor_cores.padded(H), SHARED[capability]
    layout = tensor_cores.layout_for(parts, B, 2, P, dtype.itemsize, 108, room)
    for half_output in {False, dtype.itemsize == 2}:
        options = tensor_cores.options(layout, dtype, half_output)
        assert tensor_cores.NAMES[parts].encode() in nvrtc.compile_cuda(
            tensor_cores.SOURCE, options, capability
        )


@pytest.mark.parametrize("capability", slow_except({0}, [(H200,), (A100,), (T4,)]))
def test_the_search_compiles(capability):
    code = nvrtc.compile_cuda(decoding.SOURCE, (), capability)
    assert all(name.encode() in code for name in decoding.NAMES)


@pytest.mark.parametrize("K1, L, H", slow_except({0}, [(40, 1, 128), (2, 3, 5), (5001, 2, 640)]))
@pytest.mark.parametrize("capability", slow_except({0}, [(H200,), (T4,)]))
def test_the_search_of_batches_compiles(capability, K1, L, H):
    code = nvrtc.compile_cuda(utterances.SOURCE, utterances.options(K1, L, H), capability)
    assert all(name.encode() in code for name in utterances.NAMES)


def test_the_sources_take_the_sentinels_from_one_place():
    for double in (False, True):
        least, never = sentinels.impossible(double), sentinels.never(double)
        assert least < 10 * never < 0
        assert f"({least!r}" in sentinels.cuda_options(double)[0]
    literals = re.compile(r"-1e\+?(290|280|30|29)\b")
    folder = Path(sentinels.__file__).parent.parent
    for path in (*folder.rglob("*.py"), *folder.rglob("*.cu")):
        assert path.name == "sentinels.py" or not literals.search(path.read_text()), path


class Driver:
    """Record what is launched, in place of the CUDA driver."""

    def __init__(self, code=0):
        self.code, self.launched, self.contexts, self.shared = code, [], [], []

    def cuCtxSetCurrent(self, context):
        self.contexts.append(context.value)
        return 0

    def cuDeviceGet(self, handle, device):
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):
        context._obj.value = 12
        return 0

    def cuMemsetD32Async(self, place, value, words, stream):
        # The driver refuses a thread without a context.
        return 0 if self.contexts else 201

    def cuFuncSetAttribute(self, function, attribute, value):
        self.shared.append((function.value, attribute, value))
        return 0

    def cuLaunchKernel(self, function, *options):
        *sizes, stream, pointers, _ = options
        values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers[:5]]
        self.launched.append((function.value, sizes, stream.value, values))
        return self.code

    def cuGetErrorString(self, code, name):
        name._obj.value = b"out of order"


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: found)
    monkeypatch.setattr(nvrtc, "_thread", nvrtc._Thread())
    nvrtc._context.cache_clear()
    yield found
    nvrtc._context.cache_clear()


def test_a_launch_passes_every_argument_in_64_bits(driver):
    kernel = nvrtc.Kernel(ctypes.c_void_p(11), 0)
    x = torch.zeros(3)
    kernel((5, 6), 64, (x, None, -7, 0.5, True), stream=9)
    half = struct.unpack("q", struct.pack("d", 0.5))[0]
    values = [x.data_ptr(), 0, -7, half, 1]
    assert driver.launched == [(11, [5, 6, 1, 64, 1, 1, 0], 9, values)]


def test_a_launch_sets_the_context_and_asks_for_shared_memory_once(driver):
    kernel = nvrtc.Kernel(ctypes.c_void_p(11), 0)
    for shared in (1000, 60_000, 60_000):
        kernel((1, 1), 32, (1, 2, 3, 4, 5), shared=shared, stream=0)
    assert driver.contexts == [12]
    assert driver.shared == [(11, nvrtc.MAX_DYNAMIC_SHARED, 60_000)]
    assert [sizes[-1] for _, sizes, _, _ in driver.launched] == [1000, 60_000, 60_000]


def test_a_fill_sets_the_context_of_a_thread_that_has_none(driver):
    nvrtc.set_all_bits(torch.zeros(3), stream=0)
    assert driver.contexts == [12]


def test_a_launch_that_fails_is_said(driver):
    driver.code = 3
    kernel = nvrtc.Kernel(ctypes.c_void_p(11), 0)
    with pytest.raises(RuntimeError, match=r"a kernel's launch failed: out of order \(3\)"):
        kernel((1, 1), 32, (1, 2, 3, 4, 5), stream=0)


def test_a_product_in_full_float32_is_a_product():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    assert torch.equal(nvrtc.full_float32_matmul(a, b.mT), a @ b.mT)
    assert torch.equal(nvrtc.full_float32_matmul(a[0], b[0].mT), a[0] @ b[0].mT)
    into = torch.empty(2, 3, 5)
    assert nvrtc.full_float32_matmul(a, b.mT, out=into) is into
    for x in (a, b.mT):
        high, low = nvrtc._split(x)
        assert torch.equal(high + low, x)
        assert not (high.view(torch.int32) & 0x1FFF).any()


def test_what_does_not_compile_is_said():
    with pytest.raises(RuntimeError, match="NVRTC did not compile"):
        nvrtc.compile_cuda("no such thing;", (), H200)


@pytest.mark.parametrize("processors", [20, 40, 108, 132])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("H", [1, 7, 8, 40, 128, 256, 512, 700, 1000, 1200])
def test_a_plan_covers_all_units_and_sequences_and_runs_at_once(H, D, processors):
    for parts, B in product((1, 4), (1, 2, 3, 16, 64, 100, 1000)):
        p = lstm.plan(parts, B, D, H, 4, processors, SHARED[T4])
        assert p.units * p.blocks >= H
        assert p.rows * p.groups >= B > p.rows * (p.groups - 1)
        assert p.directions * p.groups * p.blocks <= processors
        assert p.width >= H and p.chunk in (1, 2, 4, 8)


def test_a_layer_that_no_plan_fits_is_refused():
    with pytest.raises(ValueError, match="a layer of 100000 units and 1 sequences is too large"):
        lstm.plan(1, 1, 2, 100_000, 4, 132, SHARED[H200])


@pytest.mark.parametrize("processors", [20, 108, 132])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("H", [32, 64, 320, 512, 704, 1024, 1216])
def test_a_layout_covers_all_units_and_sequences_and_runs_at_once(H, D, processors):
    for parts, B, size in product((1, 4), (1, 3, 64, 100, 1000), (2, 4)):
        for found in tensor_cores.layouts(parts, B, D, H, size, processors, SHARED[H200]):
            assert found.units * found.blocks == H
            assert found.rows * found.groups >= B > found.rows * (found.groups - 1)
            assert found.directions * found.groups * found.blocks <= processors
            assert found.share * tensor_cores.WARPS * tensor_cores.STEP >= parts * H * size
            assert 0 <= found.resident <= found.share
            assert found.shared <= SHARED[H200]


def test_a_gpu_without_such_tensor_cores_or_without_room_computes_in_float32(monkeypatch):
    tensor_cores.fits.cache_clear()
    monkeypatch.setattr(tensor_cores, "shared_memory", lambda device: SHARED[A100])
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cases = (T4, 32, 2, False), (T4, 32, 4, False), (A100, 32, 2, True), (A100, 32, 4, True)
    cases += (A100, 700, 2, True), (A100, 700, 4, True), (A100, 1024, 2, True)
    cases += (A100, 1024, 4, False), (A100, 4000, 2, False)
    for capability, H, size, expected in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert tensor_cores.fits(H, 2, size, 0) == expected, (H, size)
        tensor_cores.fits.cache_clear()
