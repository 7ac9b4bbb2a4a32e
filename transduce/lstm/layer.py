"""The one door to the LSTM: `PeepholeLSTM`, layers and directions of Eqs. 4-8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

import transduce.lstm.eager as eager
import transduce.lstm.operators as operators
import transduce.lstm.reference as reference
from transduce.kernels.backends import INTEGERS, Backend, check_tensors, resolve

Layer = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    tuple[Tensor, Tensor, Tensor],
]
State = tuple[Tensor, Tensor]  # h and s, each [num_layers * directions, B, H]
BACKENDS = ("reference", "eager", "cpu", "cuda")
INITIAL_RANGE = 0.1  # the paper's: initial weights are uniform in [-0.1, 0.1]


class PeepholeLSTM(nn.Module):
    """Long Short-Term Memory with peepholes, batch first.

    The input and forget gates see the state s(n-1), the output gate s(n), each through a diagonal
    matrix; all four sums have a bias. `dropout` acts between layers. With `bidirectional`, a
    second set of weights scans each sequence from its own last frame, and each layer's output is
    the concatenation of the two. With `embedding_size`, the first layer's input weights are a
    product: each input stands for a vector of that size (an embedding), on which dropout acts too.

    The inputs x are vectors [B, N, input_size], or ids [B, N]: id k stands for the one-hot vector
    whose k-th element is one, counting from 1, and id 0 for the vector of zeros. Ids are looked
    up, so input_size may be large. `lengths` [B] gives the number of frames of each sequence; the
    LSTM ignores the padding after them, and its output there is zero. `state`, the pair (h, s) that
    an earlier call returned, continues that call; both are [num_layers * directions, B, H].
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        embedding_size: int = 0,
    ) -> None:
        super().__init__()
        for name, size, least in (
            ("input_size", input_size, 1),
            ("hidden_size", hidden_size, 1),
            ("num_layers", num_layers, 1),
            ("embedding_size", embedding_size, 0),
        ):
            if size < least:
                raise ValueError(f"{name} must be at least {least}, not {size}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {dropout}")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.num_directions = 2 if bidirectional else 1
        self.dropout, self.embedding_size = dropout, embedding_size
        between = hidden_size * self.num_directions
        sizes = [(input_size, embedding_size)] + [(between, 0)] * (num_layers - 1)
        self.layers = nn.ModuleList(
            _Layer(size, hidden_size, self.num_directions, embedded) for size, embedded in sizes
        )

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        state: State | None = None,
        *,
        backend: Backend = "auto",
    ) -> tuple[Tensor, State]:
        """Return the last layer's outputs [B, N, hidden_size * directions] and the last state."""
        check_tensors(x=x, **({} if lengths is None else {"lengths": lengths}))
        if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(self._first.biases.dtype)  # autocast may have rounded the layer before
        self._check(x, lengths, state)
        lengths = None if lengths is None else lengths.long().contiguous()
        name = resolve(backend, x.device, BACKENDS)
        dropout = self.dropout if self.training else 0.0
        embed = dropout > 0 and self.embedding_size > 0
        if (embed or name in ("reference", "eager")) and not torch.compiler.is_compiling():
            operators.check_values(x, lengths, self.input_size)  # the operator checks otherwise
        run: Layer = partial(operators.layer, backend=name)
        if name in ("reference", "eager"):
            run = reference.layer if name == "reference" else eager.layer
        D, last_h, last_s = self.num_directions, [], []
        for i, layer in enumerate(cast(Iterable[_Layer], self.layers)):
            if embed and i == 0:
                x = layer.embedded(x)
            if dropout > 0 and (i > 0 or embed):
                x = nn.functional.dropout(x, dropout)
            weights = layer.weights(of_embedded=embed)
            h, s = (part[i * D : (i + 1) * D] for part in state) if state else (None, None)
            x, h, s = run(x, lengths, *weights, h, s)
            last_h.append(h)
            last_s.append(s)
        if self.num_layers == 1:
            return x, (last_h[0], last_s[0])
        return x, (torch.cat(last_h), torch.cat(last_s))

    def _check(self, x: Tensor, lengths: Tensor | None, state: State | None) -> None:
        """Raise ValueError if the arguments' types, shapes or devices do not match."""
        weights = self._first.biases
        if x.is_floating_point():
            if x.ndim != 3 or x.shape[2] != self.input_size:
                raise ValueError(f"x must be [B, N, {self.input_size}], not {list(x.shape)}")
            if x.dtype != weights.dtype:
                raise ValueError(f"x is {x.dtype}, but the weights are {weights.dtype}")
        elif x.ndim != 2:
            raise ValueError(f"x must be ids [B, N], not {list(x.shape)}")
        if x.shape[0] == 0 or x.shape[1] == 0:
            raise ValueError(f"x must have a sequence and a frame, not {list(x.shape)}")
        if x.device != weights.device:
            raise ValueError(f"x is on {x.device}, but the weights are on {weights.device}")
        B = x.shape[0]
        if lengths is not None:
            if lengths.shape != (B,) or lengths.dtype not in INTEGERS:
                raise ValueError(
                    f"lengths must be integers [B] = [{B}], not {lengths.dtype} "
                    f"{list(lengths.shape)}"
                )
            _check_device("lengths", lengths, x.device)
        shape = (self.num_layers * self.num_directions, B, self.hidden_size)
        if state is not None and len(state) != 2:
            raise ValueError(f"the state must be the pair (h, s), not {len(state)} tensors")
        for name, part in zip("hs", state or (), strict=False):
            _check_device(f"the state's {name}", part, x.device)
            if part.shape != shape:
                raise ValueError(
                    f"the state's {name} must be {list(shape)}, not {list(part.shape)}"
                )

    @property
    def _first(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    def extra_repr(self) -> str:
        directions = ", bidirectional=True" if self.num_directions == 2 else ""
        embedded = f", embedding_size={self.embedding_size}" if self.embedding_size else ""
        sizes = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        return sizes + directions + embedded


class _Layer(nn.Module):
    """The weights of one layer, its directions stacked; the gates in the order of Eqs. 4-7."""

    def __init__(
        self, input_size: int, hidden_size: int, num_directions: int, embedding_size: int
    ) -> None:
        super().__init__()
        D, H = num_directions, hidden_size
        self.input_weights = nn.Parameter(torch.empty(D, 4 * H, embedding_size or input_size))
        self.hidden_weights = nn.Parameter(torch.empty(D, 4 * H, H))
        self.peepholes = nn.Parameter(torch.empty(D, 3, H))  # to input, forget and output gates
        self.biases = nn.Parameter(torch.empty(D, 4 * H))
        for weights in self.parameters():
            nn.init.uniform_(weights, -INITIAL_RANGE, INITIAL_RANGE)
        self.embedding: nn.Parameter | None = None  # [input_size, embedding_size]
        if embedding_size:
            self.embedding = nn.Parameter(torch.empty(input_size, embedding_size))
            nn.init.normal_(self.embedding, std=0.5)

    def weights(self, *, of_embedded: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the input weights, the hidden weights, the peepholes and the biases.

        The input weights include the embedding unless `of_embedded`.
        """
        inputs: Tensor = self.input_weights
        if self.embedding is not None and not of_embedded:
            inputs = inputs @ self.embedding.mT
        return inputs, self.hidden_weights, self.peepholes, self.biases

    def embedded(self, x: Tensor) -> Tensor:
        """Return the embeddings [B, N, embedding_size] of vectors or of ids [B, N]."""
        assert self.embedding is not None
        if x.is_floating_point():
            return x @ self.embedding
        return nn.functional.embedding(x, nn.functional.pad(self.embedding, (0, 0, 1, 0)))


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but x is on {device}")
