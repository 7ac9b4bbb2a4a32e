"""Operations on batches of padded sequences."""

import torch
from torch import Tensor


def reverse_padded(sequences: Tensor, lengths: Tensor) -> Tensor:
    """Reverse the first `lengths[b]` elements of each sequence; leave the padding in place.

    `sequences` is [B, N, ...], `lengths` is [B].
    """
    places = torch.arange(sequences.shape[1], device=sequences.device)
    mirrored = lengths[:, None].to(places.device) - 1 - places
    rows = torch.arange(len(sequences), device=places.device)[:, None]
    return sequences[rows, mirrored.where(mirrored >= 0, places)]
