"""The prediction network, one step from many prefixes at once (Eqs. 2-8), compiled by Numba.

A search takes hundreds of thousands of steps from states that are scattered in memory. Therefore
the weights are packed once for the whole search, and states are read and written in place. A row's
sums do not depend on the rows beside it, so a prefix has the same g in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.products import multiply_packed, pack
from transduce.lstm.cpu import LANES, gate_columns, step
from transduce.networks import PredictionNetwork

BLOCK = 48  # rows stepped at once: reuse of the weights against sums that fit the cache


class PackedWeights(NamedTuple):
    """A network's weights, L layers; each gate's columns are padded to `wide`, whole vectors."""

    inputs: np.ndarray  # [K+1, 4 wide], added to the first layer's sums by label k; zero for null
    below: np.ndarray  # [L, 4 wide x H], packed weights of the layer below, if there is one
    hidden: np.ndarray  # [L, 4 wide x H], packed
    biases: np.ndarray  # [L, 4 wide]
    peepholes: np.ndarray  # [L, 3, H]
    output: np.ndarray  # [H x columns], packed
    output_biases: np.ndarray  # [columns], K+1 of them padded to whole vectors


def packed_weights(network: PredictionNetwork) -> PackedWeights:
    """Pack a network's weights for the kernels, in float64 if they are, else in float32."""
    dtype = torch.promote_types(network.output.weight.dtype, torch.float32)

    def array(weights: Tensor) -> np.ndarray:
        return weights.detach().to("cpu", dtype).numpy()

    L, H = network.lstm.num_layers, network.lstm.hidden_size
    wide = _whole_vectors(H)
    kind = array(network.output.bias).dtype
    weights = PackedWeights(
        inputs=np.zeros((network.num_labels + 1, 4 * wide), kind),
        below=np.zeros((L, 4 * wide * H), kind),
        hidden=np.zeros((L, 4 * wide * H), kind),
        biases=np.zeros((L, 4 * wide), kind),
        peepholes=np.zeros((L, 3, H), kind),
        output=np.zeros(H * _whole_vectors(network.output.out_features), kind),
        output_biases=np.zeros(_whole_vectors(network.output.out_features), kind),
    )
    layers = cast(Iterable[Any], network.lstm.layers)
    for i, layer in enumerate(layers):
        inputs, hidden, peepholes, biases = (array(w)[0] for w in layer.weights())
        weights.peepholes[i] = peepholes
        weights.biases[i] = gate_columns(biases[:, None])[0]
        pack(gate_columns(hidden), 4 * wide, weights.hidden[i])
        if i == 0:
            weights.inputs[1:] = gate_columns(inputs)
        else:
            pack(gate_columns(inputs), 4 * wide, weights.below[i])
    pack(array(network.output.weight).T, weights.output_biases.size, weights.output)
    weights.output_biases[: network.output.out_features] = array(network.output.bias)
    return weights


def _whole_vectors(size: int) -> int:
    return (size + LANES - 1) // LANES * LANES


@compiled
def step_prefixes(first, last, weights, parent, label, h, s, g):
    """Compute h and s [N, L, H] and g [N, K+1] of prefixes first to last-1 from their parents'.

    Prefix 0 is the empty sequence; before it h and s are zero.
    """
    L, H = h.shape[1:]
    wide, columns = weights.biases.shape[1] // 4, weights.output_biases.size
    sums = np.empty((BLOCK, 4 * wide), h.dtype)
    outputs = np.empty((BLOCK, columns), h.dtype)
    gates = np.empty(4 * H, h.dtype)
    h_block, h_below = np.empty((BLOCK, H), h.dtype), np.empty((BLOCK, H), h.dtype)
    for start in range(first, last, BLOCK):
        rows = min(BLOCK, last - start)
        for i in range(L):
            for r in range(rows):
                node = start + r
                if node > 0:
                    h_block[r] = h[parent[node], i]
                    s[node, i] = s[parent[node], i]
                else:
                    h_block[r] = 0
                    s[node, i] = 0
                sums[r] = weights.biases[i]
                if i == 0:
                    sums[r] += weights.inputs[label[node]]
            if i > 0:
                multiply_packed(h_below, rows, weights.below[i], 4 * wide, sums, True)
            multiply_packed(h_block, rows, weights.hidden[i], 4 * wide, sums, True)
            for r in range(rows):
                node = start + r
                step(H, wide, sums[r], weights.peepholes[i], h_block[r], s[node, i], gates)
                h[node, i] = h_block[r]
            h_block, h_below = h_below, h_block
        for r in range(rows):
            outputs[r] = weights.output_biases
        multiply_packed(h_below, rows, weights.output, columns, outputs, True)  # Eq. 3
        for r in range(rows):
            g[start + r] = outputs[r, : g.shape[1]]


@compiled
def step_levels(starts, weights, parent, label):
    """Return g [N, K+1] of prefixes that are sorted by length; length u begins at starts[u].

    Prefix 0 is the empty sequence, the only one without labels.
    """
    L, H = weights.peepholes.shape[0], weights.peepholes.shape[2]
    kind = weights.biases.dtype
    h, s = np.empty((label.size, L, H), kind), np.empty((label.size, L, H), kind)
    g = np.empty((label.size, weights.inputs.shape[0]), kind)
    for level in range(starts.size - 1):
        step_prefixes(starts[level], starts[level + 1], weights, parent, label, h, s, g)
    return g
