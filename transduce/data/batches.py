"""Examples as tensors, batches of similar lengths, and the predicted memory of a training step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.data.pairs import Pair, Recording
from transduce.sequences import reverse_padded


@dataclass(frozen=True, eq=False)
class Example:
    """A pair as tensors, the input of the networks."""

    pair: Pair
    frames: Tensor  # [T, D]; for text, ids [T]
    labels: Tensor  # [U], ids; for a network that speaks, outputs [U, D]
    recording: Recording | None = None  # the sound that the frames were computed from

    @property
    def num_frames(self) -> int:
        return len(self.frames)

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    def num_vectors(self, pooling: int) -> int:
        """Return the length of the transcription: num_frames / pooling, rounded up."""
        return -(-self.num_frames // pooling)


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples padded with zeros to equal lengths."""

    pairs: tuple[Pair, ...]
    frames: Tensor  # [B, T, D]; for text, ids [B, T]
    num_frames: Tensor  # [B]
    labels: Tensor  # [B, U]; for a network that speaks, outputs [B, U, D]
    num_labels: Tensor  # [B]
    # Of distillation, [B, U+1, K+1]: the distribution of what follows the first u labels, in the
    # order in which the network reads them; null is the end.
    targets: Tensor | None = None

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Batch:
        """Pad and stack the examples."""
        frames = pad_sequence([example.frames for example in examples], batch_first=True)
        labels = pad_sequence([example.labels for example in examples], batch_first=True)
        return cls(
            tuple(example.pair for example in examples),
            frames,
            torch.tensor([example.num_frames for example in examples]),
            labels,
            torch.tensor([example.num_labels for example in examples]),
        )

    @property
    def names(self) -> list[str]:
        """Return the names of the items in messages: those of the pairs, if there are any."""
        numbers = [f"item {b}" for b in range(len(self.num_frames))]
        return [repr(pair.name) for pair in self.pairs] or numbers

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return frames, num_frames, labels, num_labels, and targets if there are any."""
        tensors = (self.frames, self.num_frames, self.labels, self.num_labels)
        return tensors if self.targets is None else (*tensors, self.targets)

    def to(self, device: torch.device | str) -> Batch:
        """Copy the tensors to a device."""
        return Batch(self.pairs, *(t.to(device) for t in self.tensors))

    def repeat(self, copies: int) -> Batch:
        """Concatenate so many copies of the batch."""
        if copies == 1:
            return self
        return Batch(self.pairs * copies, *(torch.cat([t] * copies) for t in self.tensors))

    def reversed(self) -> Batch:
        """Reverse the frames and the labels of each example in time; keep the targets."""
        frames = reverse_padded(self.frames, self.num_frames)
        labels = reverse_padded(self.labels, self.num_labels)
        return replace(self, frames=frames, labels=labels)

    def __len__(self) -> int:
        return len(self.pairs)


class UnreadExamples(Sequence[Example]):
    """Examples that are read each time they are asked for, because memory does not hold them."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        num_frames: np.ndarray,  # [N], as far as it is known before reading
        num_labels: np.ndarray,  # [N]
        read: Callable[[Pair], Example],
    ) -> None:
        self.pairs, self.num_frames, self.num_labels, self.read = (
            pairs,
            num_frames,
            num_labels,
            read,
        )
        self.indices = np.arange(len(pairs))  # of the examples among the pairs

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.read(self.pair(index))

    def pair(self, index: int) -> Pair:
        """Return the pair of an example without reading its source."""
        return self.pairs[int(self.indices[index])]

    def subset(self, indices: np.ndarray) -> UnreadExamples:
        """Return the examples at some indices."""
        chosen = UnreadExamples(
            self.pairs, self.num_frames[indices], self.num_labels[indices], self.read
        )
        chosen.indices = self.indices[indices]
        return chosen


def pair_of(examples: Sequence[Example], index: int) -> Pair:
    """Return the pair of an example, without reading its source."""
    if isinstance(examples, UnreadExamples):
        return examples.pair(index)
    return examples[index].pair


def lengths_of(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of frames and of labels of all examples, [N] each."""
    if isinstance(examples, UnreadExamples):
        return examples.num_frames, examples.num_labels
    counts = [(example.num_frames, example.num_labels) for example in examples]
    lengths = np.array(counts, np.int64).reshape(len(examples), 2)
    return lengths[:, 0], lengths[:, 1]


LENGTH_JITTER = 0.5  # largest random stretch of a length: more mixes lengths, and pads more


class Batches:
    """Batches of at most `max_cells` cells of padded lattice, B x T x (U+1), T after pooling.

    A seed and an epoch's number determine its batches. A batch has examples of similar length
    T + U: an epoch sorts them by length, each stretched at random by up to LENGTH_JITTER, so that
    every gradient mixes shorter and longer sequences, with more and fewer labels a frame.
    `max_sequences=1` is the paper's online training, in random order.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        max_cells: int,
        seed: int,
        *,
        max_sequences: int | None = None,
        pooling: int = 1,
        stretch: float = 1.0,  # how much longer examples may be when they are loaded
    ) -> None:
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, or None, not {max_sequences}")
        if pooling < 1:
            raise ValueError(f"pooling must be at least 1, not {pooling}")
        self.examples, self.max_cells, self.seed = examples, max_cells, seed
        self.max_sequences = max_sequences or len(examples)
        num_frames, self.num_labels = lengths_of(examples)
        self.num_frames = np.ceil(stretch * num_frames).astype(np.int64)
        # Count targets without frames as one frame, so that max_cells bounds them too.
        T = np.maximum(1, -(-self.num_frames // pooling))
        self.sizes = np.stack([T, self.num_labels + 1], 1)
        for i in np.flatnonzero(self.sizes.prod(1) > max_cells)[:1]:
            pair, cells = pair_of(examples, i), int(self.sizes[i].prod())
            raise pair.origin.error(
                f"{pair.name} alone has {cells} cells of lattice where a batch may "
                f"have {max_cells}; raise max_cells, or leave the line out"
            )

    def epoch(self, number: int) -> list[list[int]]:
        """Return the batches of an epoch in random order, each a list of example indices."""
        draw = random.Random(f"{self.seed} {number}")
        order = list(range(len(self.examples)))
        if self.max_sequences > 1:
            drawn = np.array([draw.random() for _ in order])
            lengths = self.sizes.sum(1) * (1 + LENGTH_JITTER * drawn)
            order = lengths.argsort(kind="stable").tolist()
        batches = self._fill(order)
        draw.shuffle(batches)
        return batches

    def by_length(self) -> list[list[int]]:
        """Return batches sorted by length, without randomness, for evaluation."""
        keys = [_length_key(T, U) for T, U in self.sizes.tolist()]
        return self._fill(sorted(range(len(keys)), key=keys.__getitem__))

    def load(self, batches: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Yield the padded batch of each list of example indices."""
        for batch in batches:
            yield Batch.of([self.examples[i] for i in batch])

    def shape(self, batch: Sequence[int]) -> tuple[int, int, int]:
        """Return B, T before pooling, and U of a batch, without padding it."""
        return len(batch), int(self.num_frames[batch].max()), int(self.num_labels[batch].max())

    def _fill(self, order: Sequence[int]) -> list[list[int]]:
        """Cut the sequence of indices into batches within the bounds."""
        batches: list[list[int]] = []
        T = U = 0
        for i, (frames, labels) in zip(order, self.sizes[order].tolist(), strict=True):
            longest, most = max(T, frames), max(U, labels)
            fits = batches and longest * most * (len(batches[-1]) + 1) <= self.max_cells
            if not fits or len(batches[-1]) == self.max_sequences:
                batches.append([])
                longest, most = frames, labels
            batches[-1].append(i)
            T, U = longest, most
        return batches


def _length_key(T: int, U: int) -> tuple[int, int]:
    """Return the sort key of `by_length`: T in bands of 10 %, then U.

    U rises in one band and falls in the next, so that a batch across bands has little padding.
    """
    band = int(math.log(T, 1.1))
    return band, U if band % 2 else -U


# --- Memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkSizes:
    """The arguments of `Transducer` that determine the memory of a training step."""

    num_labels: int
    hidden_size: int = 128
    num_layers: int = 1
    bidirectional: bool = True
    dropout: float = 0.0
    pooling: int = 1
    prediction_size: int | None = None  # None: hidden_size
    prediction_layers: int = 1
    embedding_size: int = 0
    lookahead: int = 0
    input_size: int = 0  # only a lookahead needs it
    num_components: int = 0  # of a mixture over outputs of num_labels numbers; 0: labels
    product_rank: int = 0  # of the same


# The lattice has four float64 and two float32 arrays on the CPU, two and five on a GPU.
BYTES_PER_CELL = 40
# Distillation has two more float32 arrays on the CPU; on a GPU autograd keeps eleven float64 ones,
# and the backward pass takes five.
DISTILLED_BYTES_PER_CELL = {"cpu": 48, "cuda": 128}
# A mixture of Gaussians keeps float64 tensors for autograd: some thirteen of the numbers of all
# means, in f and in g; seven of the logits of a node; and 25 of a number for each node. There is
# none of the means at each node.
MIXTURE_BYTES_PER_MEAN, MIXTURE_BYTES_PER_LOGIT, MIXTURE_BYTES_PER_CELL = 106, 56, 200


def describe_step(num_sequences: int, copies: int, num_frames: int, num_labels: int) -> str:
    """Say what a step has, such as "32 sequences, each twice, of up to 20 frames and 9 labels"."""
    twice = "" if copies == 1 else ", each twice,"
    return f"{num_sequences} sequences{twice} of up to {num_frames} frames and {num_labels} labels"


def predicted_bytes(
    shape: tuple[int, int, int],  # B, T, U, as `Batches.shape` gives them
    sizes: NetworkSizes,
    device: str = "cpu",
    distilled: bool = False,
    candidates: int = 1,  # outputs of each input, in minimum-risk training
) -> int:
    """Return the peak memory of a transducer's training step in float32, without the weights.

    The peak comes during the backward pass of the transcription network's last layer: the lattice
    and the gates, states and outputs of every layer are then in memory. The transcription network
    runs once for each input, the rest once for each candidate.
    """
    B, T, U = shape
    directions = 2 if sizes.bidirectional else 1
    width, outputs = directions * sizes.hidden_size, _num_outputs(sizes)
    pooled = -(-T // sizes.pooling)
    upper = sizes.num_layers - 1
    saved = 6 * width * (T + upper * pooled)  # four gates, the state, the output
    prediction = sizes.prediction_size or sizes.hidden_size
    columns = candidates * (U + 1)
    saved += 6 * prediction * sizes.prediction_layers * columns
    if sizes.dropout:
        saved += 2 * width * upper * pooled  # the outputs after dropout and the mask
        saved += 3 * sizes.embedding_size * (T + columns)  # likewise, and the gradient
    if sizes.lookahead:
        saved += (1 + sizes.lookahead) * sizes.input_size * T  # the stacked frames
    if sizes.pooling > 1:
        saved += width * (T + 2 * pooled)  # the frames, their sums, the averages
    # The gradients of a layer's outputs, and of its inputs, in each direction and summed.
    passing = (width * T) if not upper else (2 + directions) * width * pooled
    # f, g, their gradients and temporaries; each candidate has a copy of f.
    vectors = 3 * outputs * (candidates * pooled + columns)
    # On the CPU each thread holds one utterance's lattice; a GPU holds all at once.
    rows = candidates * B
    lattices = min(rows, torch.get_num_threads()) if device == "cpu" else rows
    cells = lattices * (pooled + U + 1) * (U + 1)
    per_cell = DISTILLED_BYTES_PER_CELL[device] if distilled else BYTES_PER_CELL
    mixture = 0
    if sizes.num_components:
        means = sizes.num_components * sizes.num_labels * (pooled + U + 1)
        at_node = MIXTURE_BYTES_PER_LOGIT * (1 + sizes.num_components) + MIXTURE_BYTES_PER_CELL
        mixture = B * (MIXTURE_BYTES_PER_MEAN * means + at_node * pooled * (U + 1))
    return 4 * B * (saved + passing + vectors) + per_cell * cells + mixture


def _num_outputs(sizes: NetworkSizes) -> int:
    """Return the length of f_t and g_u."""
    if not sizes.num_components:
        return sizes.num_labels + 1
    M = sizes.num_components
    return (1 + M) * (1 + sizes.product_rank) + 2 * M * sizes.num_labels
