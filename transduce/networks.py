"""The transcription network and the prediction network (Eqs. 2-3, 9-11)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from transduce.alphabet import NULL
from transduce.kernels.backends import INTEGERS, Backend, check_tensors, resolve
from transduce.lstm.layer import BACKENDS, INITIAL_RANGE, PeepholeLSTM


class PredictionNetwork(nn.Module):
    """The prediction network 𝒢 (predictor): reads the labels y, outputs the vectors g (Eqs. 2-3).

    A label is a one-hot vector and null the vector of zeros, so the input layer has num_labels
    units. The output layer has one more, for null. With `with_null=False` it has none for null:
    this is the next-label predictor of the paper's experiments, whose output k is label k+1.
    Continuous outputs are vectors of `num_labels` numbers in the place of the one-hot ones, and
    `num_outputs` is the size of g.
    """

    def __init__(
        self,
        num_labels: int,
        hidden_size: int = 128,
        num_layers: int = 1,
        dropout: float = 0.0,
        with_null: bool = True,
        embedding_size: int = 0,
        num_outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.num_labels, self.with_null, self.dropout = num_labels, with_null, dropout
        self.lstm = PeepholeLSTM(
            num_labels, hidden_size, num_layers, False, dropout, embedding_size
        )
        self.output = _output_layer(hidden_size, num_outputs or num_labels + with_null)

    def forward(self, labels: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Return g [B, U+1, K+1] of the labels y [B, U], with null prepended.

        Padding may be null or any negative number; it affects only the vectors after it. y may
        also be vectors [B, U, K], one-hot or not.
        """
        check_tensors(labels=labels)
        if labels.is_floating_point() and labels.ndim == 3:
            inputs = nn.functional.pad(labels, (0, 0, 1, 0))
        else:
            if not torch.compiler.is_compiling():  # the compiled LSTM checks its ids
                _check_labels(labels, self.num_labels)
            inputs = nn.functional.pad(labels.clamp(min=NULL), (1, 0), value=NULL)
        hidden, _ = self.lstm(inputs, backend=backend)  # Eq. 2
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        prediction: Tensor = self.output(hidden)  # Eq. 3
        return prediction

    def start(self, batch: int) -> tuple[Tensor, ...]:
        """Return the state (h, s) before any label: zeros [batch, num_layers, hidden_size]."""
        shape = (batch, self.lstm.num_layers, self.lstm.hidden_size)
        zeros = self.output.weight.new_zeros(shape)
        return zeros, zeros

    def step(
        self, labels: Tensor, state: Tensor | tuple[Tensor, ...], *, backend: Backend = "auto"
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return g [N, K+1] after one more label each [N], or vector [N, K], and the new state.

        The first step takes null, or zeros, and the state that `start` returns.
        """
        h, s = (part.transpose(0, 1).contiguous() for part in state)
        hidden, after = self.lstm(labels[:, None], state=(h, s), backend=backend)
        return self.output(hidden[:, 0]), tuple(part.transpose(0, 1) for part in after)


class TranscriptionNetwork(nn.Module):
    """The transcription network ℱ (encoder): reads the input x, outputs the vectors f (Eqs. 9-11).

    It is bidirectional as in the paper, or forward only. Inputs are vectors [B, T, input_size], or
    ids [B, T] of one-hot vectors, id 0 being the vector of zeros. `pooling` n > 1 averages the
    first layer's outputs over every n frames, so that all later sequences are n times shorter; the
    last average may be of fewer frames. A forward network with a `lookahead` of n > 0 reads each
    vector together with the n vectors to its right, so that f depends on no input further ahead. If
    `product_type` is torch.bfloat16 or torch.float16, the LSTMs multiply such numbers on a GPU, as
    under autocast, and f stays float32.
    """

    product_type: torch.dtype | None = None

    def __init__(
        self,
        input_size: int,
        num_labels: int,
        hidden_size: int = 128,
        num_layers: int = 1,
        bidirectional: bool = True,
        dropout: float = 0.0,
        pooling: int = 1,
        embedding_size: int = 0,
        lookahead: int = 0,
    ) -> None:
        super().__init__()
        if pooling < 1:
            raise ValueError(f"pooling must be at least 1, not {pooling}")
        check_lookahead(lookahead, bidirectional)
        self.input_size, self.lookahead = input_size, lookahead
        self.pooling, self.dropout = pooling, dropout
        width = hidden_size * (2 if bidirectional else 1)
        # Pooling comes between the first layer and the rest.
        first = 1 if pooling > 1 else num_layers
        stacked = (1 + lookahead) * input_size
        self.lstm = PeepholeLSTM(
            stacked, hidden_size, first, bidirectional, dropout, embedding_size
        )
        self.upper_lstm = (
            PeepholeLSTM(width, hidden_size, num_layers - first, bidirectional, dropout)
            if num_layers > first
            else None
        )
        self.output = _output_layer(width, num_labels + 1)

    def forward(
        self, frames: Tensor, num_frames: Tensor | None = None, *, backend: Backend = "auto"
    ) -> tuple[Tensor, Tensor]:
        """Return f [B, T, K+1] and the numbers of vectors [B]."""
        hidden, num_vectors = self.hidden(frames, num_frames, backend=backend)
        return self.output(hidden), num_vectors  # Eq. 11

    @torch.no_grad()
    def forward_one_by_one(
        self, frames: Tensor, num_frames: Tensor, *, backend: Backend = "auto"
    ) -> list[Tensor]:
        """Return f [T, K+1] of each utterance, bit for bit the same in any batch.

        The backend "cpu" computes every vector independently of the rest of the batch. PyTorch's
        products do not, so all other backends run one utterance at a time.
        """
        if resolve(backend, frames.device, BACKENDS) != "cpu":
            return [
                self(frames[b : b + 1, :length], backend=backend)[0][0]
                for b, length in enumerate(num_frames.tolist())
            ]
        hidden, num_vectors = self.hidden(frames, num_frames, backend=backend)
        from transduce.kernels.simd.affine import PackedAffine

        f = PackedAffine(self.output)(hidden)
        return [f[b, :length] for b, length in enumerate(num_vectors.tolist())]

    def hidden(
        self, frames: Tensor, num_frames: Tensor | None = None, *, backend: Backend = "auto"
    ) -> tuple[Tensor, Tensor]:
        """Return the last hidden layer's outputs [B, T, width] and their numbers [B]."""
        check_tensors(frames=frames, **({} if num_frames is None else {"num_frames": num_frames}))
        if num_frames is None:
            num_frames = torch.full((len(frames),), frames.shape[1], device=frames.device)
        elif num_frames.shape != frames.shape[:1]:
            raise ValueError(
                f"num_frames must be [B] = [{len(frames)}], because frames is [B, T, ...] = "
                f"{list(frames.shape)}; it is {list(num_frames.shape)}"
            )
        if self.lookahead:
            frames = stack_frames(frames, num_frames, self.lookahead)
        with self._rounding():
            hidden, _ = self.lstm(frames, num_frames, backend=backend)  # Eqs. 9-10
            if self.pooling > 1:
                hidden, num_frames = average_frames(hidden, num_frames, self.pooling)
            if self.upper_lstm is not None:
                hidden = nn.functional.dropout(hidden, self.dropout, self.training)
                hidden, _ = self.upper_lstm(hidden, num_frames, backend=backend)
        return nn.functional.dropout(hidden, self.dropout, self.training), num_frames

    def _rounding(self) -> AbstractContextManager[object]:
        """Return the autocast of the LSTMs, if there is a type."""
        if self.product_type is None:
            return nullcontext()
        return torch.autocast("cuda", self.product_type)


def _check_labels(labels: Tensor, num_labels: int) -> None:
    """Raise ValueError unless the labels are ids [B, U]; on the CPU, also if one is too large.

    Compiled code leaves the values to the LSTM, which checks ids too.
    """
    if labels.ndim != 2 or labels.dtype not in INTEGERS:
        raise ValueError(f"labels must be ids [B, U], not {labels.dtype} {list(labels.shape)}")
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    if (outside := (labels > num_labels).nonzero()).numel():
        b, u = outside[0].tolist()
        raise ValueError(
            f"labels of item {b} has label {int(labels[b, u])} at position {u}, but there are only "
            f"{num_labels}, counted from 1"
        )


def check_lookahead(lookahead: int, bidirectional: bool) -> None:
    """Raise ValueError if a lookahead is negative, or that of a bidirectional network."""
    if lookahead < 0:
        raise ValueError(f"lookahead must be at least 0, not {lookahead}")
    if lookahead and bidirectional:
        raise ValueError(
            f"lookahead is {lookahead}, but the network is bidirectional, which sees all frames; "
            "set bidirectional to false, or lookahead to 0"
        )


def stack_frames(frames: Tensor, num_frames: Tensor, lookahead: int) -> Tensor:
    """Concatenate each frame and the `lookahead` ones after it: [B, T, (1 + lookahead) D].

    Frames past an utterance's end count as zeros.
    """
    if frames.ndim != 3:
        raise ValueError(
            f"a network with a lookahead reads vectors [B, T, D], not {list(frames.shape)}; for "
            "ids set lookahead to 0"
        )
    B, T, D = frames.shape
    outside = torch.arange(T, device=frames.device) >= num_frames[:, None]
    inside = frames.masked_fill(outside[..., None], 0.0)
    padded = nn.functional.pad(inside, (0, 0, 0, lookahead))
    stacked = padded.unfold(1, 1 + lookahead, 1)  # [B, T, D, 1 + lookahead]
    return stacked.transpose(2, 3).reshape(B, T, (1 + lookahead) * D)


def average_frames(hidden: Tensor, num_frames: Tensor, pooling: int) -> tuple[Tensor, Tensor]:
    """Average every `pooling` frames; return [B, ceil(T / pooling), width] and the numbers [B].

    Frames past an utterance's end must be zero, as the LSTM leaves them.
    """
    B, T, width = hidden.shape
    padded = nn.functional.pad(hidden, (0, 0, 0, -T % pooling)).view(B, -1, pooling, width)
    sums = padded[:, :, 0]
    for i in range(1, pooling):  # in this order, whatever the shape
        sums = sums + padded[:, :, i]
    starts = torch.arange(sums.shape[1], device=hidden.device) * pooling
    counts = (num_frames[:, None] - starts).clamp(1, pooling)
    return sums / counts[..., None].to(sums.dtype), (num_frames + pooling - 1) // pooling


def _output_layer(width: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(width, num_outputs)
    nn.init.uniform_(layer.weight, -INITIAL_RANGE, INITIAL_RANGE)
    nn.init.uniform_(layer.bias, -INITIAL_RANGE, INITIAL_RANGE)
    return layer
