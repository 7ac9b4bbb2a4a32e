"""Helpers for tests of the lattice: random batches, brute force over alignments, tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

BACKENDS = ["cpu"]  # compared with the reference here; tests/test_gpu.py compares the GPU's
ALL_BACKENDS = ["reference", *BACKENDS]

# The number of frames and of labels of each utterance, and K.
SHAPES = {
    "one node": ([1], [0], 4),
    "one frame": ([1], [3], 4),
    "no labels": ([5], [0], 4),
    "more labels than frames": ([3], [9], 4),
    "ragged": ([7, 1, 4, 5, 2], [3, 0, 5, 1, 2], 6),
    "one label": ([4, 6], [3, 2], 1),
    "many labels": ([5, 9], [4, 2], 699),
    "a long lattice": ([300], [40], 20),
}
RAGGED = SHAPES["ragged"]
# The arguments of random_batch, drawn by Hypothesis.
ANY_SHAPE = st.integers(1, 4).flatmap(
    lambda B: st.fixed_dictionaries(
        {
            "num_frames": st.lists(st.integers(1, 8), min_size=B, max_size=B),
            "num_labels": st.lists(st.integers(0, 6), min_size=B, max_size=B),
            "K": st.integers(1, 40),
            "scale": st.sampled_from([0.1, 1.0, 10.0]),
            "padding": st.integers(0, 2),
            "seed": st.integers(0, 99),
        }
    )
)


class Batch(NamedTuple):
    """The arguments of transducer_loss."""

    transcription: Tensor
    prediction: Tensor
    labels: Tensor
    num_frames: Tensor
    num_labels: Tensor


class Joint(NamedTuple):
    """The arguments of rnnt_loss."""

    logits: Tensor
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


class Arrows(NamedTuple):
    """The arguments of lattice_loss."""

    log_null: Tensor
    log_label: Tensor
    num_frames: Tensor
    num_labels: Tensor


def random_batch(
    num_frames: list[int],
    num_labels: list[int],
    K: int,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """Draw utterances of these lengths, f and g normal times `scale`, each with at least so much
    padding."""
    draw = torch.Generator().manual_seed(seed)
    B, T, U = len(num_frames), max(num_frames) + padding, max(num_labels) + padding
    f = torch.randn(B, T, K + 1, generator=draw, dtype=torch.float64) * scale
    g = torch.randn(B, U + 1, K + 1, generator=draw, dtype=torch.float64) * scale
    labels = torch.randint(1, K + 1, (B, U), generator=draw)
    return Batch(f.to(dtype), g.to(dtype), labels, *map(torch.tensor, (num_frames, num_labels)))


def twice(
    one: Batch, other: Batch, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """Return two views of the same utterances, one after the other, with the first one's labels."""
    f, g = torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])
    vectors = (x.to(device, dtype).requires_grad_() for x in (f, g))
    return [*vectors, *(torch.cat([x, x]).to(device) for x in one[2:])]


def random_lattice(T: int, U: int, *, impossible: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Draw ln ∅(t,u) [T, U+1] and ln y(t,u) [T, U] out of three outputs, a share of them -inf."""
    draw = torch.Generator().manual_seed(seed)
    log_prob = torch.randn(T, U + 1, 3, generator=draw, dtype=torch.float64).log_softmax(-1)
    log_prob[torch.rand(T, U + 1, 3, generator=draw) < impossible] = -torch.inf
    return [log_prob[:, :, 0], log_prob[:, :-1, 1]]


def random_arrows(
    num_frames: list[int],
    num_labels: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    padding: int = 0,
    seed: int = 0,
    impossible: float = 0.0,
) -> Arrows:
    """Draw the arrows of lattices of these lengths: normal, times `scale`, a share of them -inf."""
    draw = torch.Generator().manual_seed(seed)
    B, T, U = len(num_frames), max(num_frames) + padding, max(num_labels) + padding
    numbers = torch.randn(2, B, T, U + 1, generator=draw, dtype=torch.float64) * scale
    numbers[torch.rand(numbers.shape, generator=draw) < impossible] = -torch.inf
    null, label = numbers.to(dtype)
    return Arrows(null, label[:, :, :-1], *map(torch.tensor, (num_frames, num_labels)))


def alignments(T: int, U: int) -> Iterator[tuple[int, ...]]:
    """Yield every alignment of U labels with T frames: the frame at which each label is emitted."""
    return combinations_with_replacement(range(T), U)


def path_score(times: tuple[int, ...], log_null: Tensor, log_label: Tensor) -> Tensor:
    """Return ln Pr(a|x) of one alignment; each frame ends with a null."""
    labels = [log_label[t, u] for u, t in enumerate(times)]
    nulls = [log_null[t, sum(time <= t for time in times)] for t in range(len(log_null))]
    return torch.stack(labels + nulls).sum()


def diagonals(nodes: Tensor) -> list[Tensor]:
    """Return the nodes [T, U+1] with t + u = n, for every n."""
    T, columns = nodes.shape
    return [nodes.flip(1).diagonal(columns - 1 - n) for n in range(T + columns - 1)]


def cast(batch: Batch | Joint | Arrows, dtype: torch.dtype) -> Batch | Joint | Arrows:
    return type(batch)(*(x.to(dtype) if x.is_floating_point() else x for x in batch))


def changed(tensor: Tensor, *place_and_value: float) -> Tensor:
    """Return a copy with another value in one place."""
    *place, value = place_and_value
    copy = tensor.clone()
    copy[tuple(place)] = value
    return copy


def loss_and_gradients(
    loss_function: Callable[..., Tensor],
    batch: Batch | Joint | Arrows,
    backend: str = "reference",
    *,
    upstream: Tensor | None = None,
    **options: object,
) -> list[Tensor]:
    """Return the loss and its gradients with respect to the batch's floating-point tensors."""
    device = "cuda" if backend == "cuda" else "cpu"
    tensors = [x.detach().to(device) for x in batch]
    leaves = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    loss = loss_function(*tensors, backend=backend, **options)
    weights = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    gradients = torch.autograd.grad(loss, leaves, weights)
    return [x.detach().cpu() for x in (loss, *gradients)]


def assert_as_exact_as_the_reference(
    loss_function: Callable[..., Tensor],
    batch: Batch | Joint | Arrows,
    backend: str,
    **options: object,
) -> None:
    """Assert that a backend's loss and gradients are exact enough in the batch's type."""
    assert_exact_enough(
        loss_and_gradients(loss_function, batch, backend, **options),
        loss_and_gradients(loss_function, batch, **options),
        loss_and_gradients(loss_function, cast(batch, torch.float64), **options),
    )


def assert_exact_enough(
    actual: Sequence[Tensor], reference: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Assert that the errors against float64 are at most twice the reference's, plus 1e-6."""
    for ours, theirs, truth in zip(actual, reference, exact, strict=True):
        assert ours.dtype == theirs.dtype
        possible = truth != -torch.inf
        assert torch.equal(ours != -torch.inf, possible)
        ours, theirs, truth = ours[possible], theirs[possible], truth[possible]
        if possible.any():
            allowed = 2 * (theirs - truth).abs().max() + 1e-6 * truth.abs().max().clamp(min=1)
            assert (ours - truth).abs().max() <= allowed


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
