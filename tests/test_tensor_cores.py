"""The LSTM's kernels for tensor cores, run on the CPU and held against the reference in float64."""

from contextlib import nullcontext

import pytest
import torch
from emulated import emulated_kernels, needs_compiler
from lstms import problem, relative_errors, results
from slow import slow_except

from transduce.lstm import operators, tensor_cores

pytestmark = needs_compiler
# The relative errors are those of rounding: 2^-8 and 2^-11, some of them several times.
ROUNDING = {torch.bfloat16: 1.6e-2, torch.float32: 2e-3}
PROCESSORS, SHARED = 8, 128 << 10  # of the emulated GPU
SHAPES = {
    "one number": (1, 1, 1, 1),
    "ragged both ways": (5, 9, 4, 33, 1, True, [3, 9, 0, 1, 8]),
    "more sequences than a chunk": (19, 4, 3, 20, 1, False, [1 + b % 4 for b in range(19)]),
    "many units": (3, 3, 2, 128, 1, False, [3, 1, 2]),
}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Run the kernels on the CPU with the layouts that a function chooses."""

    def use(product_type, choose):
        def layout(parts, B, D, H, size, device):
            return choose(tensor_cores.layouts(parts, B, D, H, size, PROCESSORS, SHARED))

        def set_all_bits(tensor, stream):
            tensor.view(torch.int16).fill_(-1)

        monkeypatch.setattr(tensor_cores, "kernels", emulated_kernels)
        monkeypatch.setattr(tensor_cores, "current", lambda device: nullcontext())
        monkeypatch.setattr(tensor_cores, "current_stream", lambda device: 0)
        monkeypatch.setattr(tensor_cores, "set_all_bits", set_all_bits)
        tensor_cores._kernel.cache_clear()
        monkeypatch.setattr(tensor_cores, "_layout", layout)
        monkeypatch.setattr(tensor_cores, "_product", lambda a, b: a.float() @ b.float())
        monkeypatch.setattr(operators, "product_type_for", lambda biases, backend: product_type)
        monkeypatch.setattr(operators, "on_tensor_cores", lambda kind, biases: True)

    return use


LAYOUTS = {
    "weights in registers": lambda layouts: max(layouts, key=lambda x: (x.resident, x.chunk)),
    "weights in shared memory": lambda layouts: min(layouts, key=lambda x: (x.resident, x.chunk)),
    "weights in both": lambda layouts: max(
        layouts, key=lambda x: (0 < x.resident < x.share, x.chunks, x.blocks)
    ),
    "few units to a block": lambda layouts: max(layouts, key=lambda x: (x.blocks, x.chunks)),
}


@pytest.mark.parametrize("layout", slow_except({2}, LAYOUTS))
@pytest.mark.parametrize("dtype", ROUNDING, ids=["bfloat16", "TF32"])
@pytest.mark.parametrize("shape", slow_except({1}, SHAPES))
def test_the_lstm_on_tensor_cores_errs_by_rounding_alone(shape, dtype, layout, on_the_cpu):
    arguments, choose = problem(*SHAPES[shape]), LAYOUTS[layout]
    exact = results("reference", torch.float64, *arguments)
    on_the_cpu(dtype, choose)
    found = results("cpu", torch.float32, *arguments)
    assert not torch.equal(found["output"], exact["output"].float())
    bad = {n: e for n, e in relative_errors(found, exact).items() if not e <= ROUNDING[dtype]}
    assert not bad
