"""An affine layer without gradients whose rows do not depend on each other, to the last bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.simd.options import VECTOR_BYTES, compiled
from transduce.kernels.simd.products import multiply_packed, pack

BLOCK = 48  # rows of a product: reuse of the weights against sums that fit the cache


class PackedAffine:
    """The layer x -> W x + b of a PyTorch module, packed once for many calls."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        weight, bias = (x.detach().to(self.dtype).numpy() for x in (layer.weight, layer.bias))
        lanes = VECTOR_BYTES // bias.itemsize
        self.size, columns = len(bias), -(-len(bias) // lanes) * lanes
        self.packed = np.empty(weight.shape[1] * columns, bias.dtype)
        pack(weight.T, columns, self.packed)
        self.biases = np.zeros(columns, bias.dtype)
        self.biases[: self.size] = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return W x + b of the rows of x [..., I]."""
        rows = x.detach().to(self.dtype).reshape(-1, x.shape[-1]).contiguous()
        return torch.from_numpy(self.rows(rows.numpy())).view(*x.shape[:-1], self.size)

    def rows(self, x: np.ndarray) -> np.ndarray:
        """Return W x + b of contiguous rows [R, I] of the layer's type."""
        result = np.empty((len(x), self.size), x.dtype)
        _affine(x, self.packed, self.biases, result)
        return result


@compiled
def _affine(x, packed, biases, result):
    sums = np.empty((BLOCK, biases.size), x.dtype)
    for first in range(0, x.shape[0], BLOCK):
        rows = min(BLOCK, x.shape[0] - first)
        for r in range(rows):
            sums[r] = biases
        multiply_packed(x[first : first + rows], rows, packed, biases.size, sums, True)
        for r in range(rows):
            result[first + r] = sums[r, : result.shape[1]]
