"""Batches of padded sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_padded(sequences: Tensor, lengths: Tensor) -> Tensor:
    """Reverse each sequence [T, ...] of a batch within its own length; leave padding in place."""
    places = torch.arange(sequences.shape[1], device=sequences.device)
    mirrored = lengths[:, None].to(places.device) - 1 - places
    rows = torch.arange(len(sequences), device=places.device)[:, None]
    return sequences[rows, torch.where(mirrored >= 0, mirrored, places)]


def zero_padding(sequences: Tensor, lengths: Tensor) -> Tensor:
    """Replace the vectors [B, N, D] beyond each sequence's length by zeros."""
    inside = torch.arange(sequences.shape[1], device=sequences.device) < lengths[:, None]
    return torch.where(inside[..., None], sequences, 0.0)
