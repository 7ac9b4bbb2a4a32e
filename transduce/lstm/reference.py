"""The peephole LSTM as the paper writes it: a loop over the frames, differentiated by PyTorch.

The tests compare every other backend with this one, so it stays plain.
"""

import torch
from torch import Tensor

from transduce.sequences import reverse_padded


def step(
    i: Tensor,  # [B, 4 H], the inputs' part of the four sums, biases included
    h: Tensor,  # [B, H], h(n-1)
    s: Tensor,  # [B, H], s(n-1)
    hidden_weights: Tensor,  # [4 H, H]
    peepholes: Tensor,  # [3, H], the diagonals of W_sα, W_sβ, W_sγ
) -> tuple[Tensor, Tensor]:
    """Compute h(n) and s(n), each [B, H], of one step (Eqs. 4-8)."""
    to_input, to_forget, to_state, to_output = (i + h @ hidden_weights.T).chunk(4, dim=1)
    input_gate = torch.sigmoid(to_input + peepholes[0] * s)  # Eq. 4
    forget_gate = torch.sigmoid(to_forget + peepholes[1] * s)  # Eq. 5
    s = forget_gate * s + input_gate * torch.tanh(to_state)  # Eq. 6
    output_gate = torch.sigmoid(to_output + peepholes[2] * s)  # Eq. 7
    return output_gate * torch.tanh(s), s  # Eq. 8


def layer(
    x: Tensor,  # [B, N, I], or ids [B, N]
    lengths: Tensor | None,  # [B]; None: all N
    input_weights: Tensor,  # [D, 4 H, I]
    hidden_weights: Tensor,  # [D, 4 H, H]
    peepholes: Tensor,  # [D, 3, H]
    biases: Tensor,  # [D, 4 H]
    h: Tensor | None,  # [D, B, H], the state before the first frame; None: zero
    s: Tensor | None,  # [D, B, H]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of D directions; return its outputs [B, N, D H] and last h and s [D, B, H]."""
    lengths, h, s = fill_defaults(x, lengths, peepholes, h, s)
    outputs, last_h, last_s = [], [], []
    for d in range(len(input_weights)):
        frames = reverse_padded(x, lengths) if d == 1 else x
        weights = input_weights[d], hidden_weights[d], peepholes[d], biases[d]
        output, h_d, s_d = direction(frames, lengths, *weights, h[d], s[d])
        outputs.append(reverse_padded(output, lengths) if d == 1 else output)
        last_h.append(h_d)
        last_s.append(s_d)
    return torch.cat(outputs, dim=2), torch.stack(last_h), torch.stack(last_s)


def fill_defaults(
    x: Tensor, lengths: Tensor | None, peepholes: Tensor, h: Tensor | None, s: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lengths and the first state; replace missing ones by N and by zeros."""
    if lengths is None:
        lengths = torch.full((len(x),), x.shape[1], device=x.device)
    if h is None or s is None:
        h = s = peepholes.new_zeros(len(peepholes), len(x), peepholes.shape[2])
    return lengths, h, s


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the tensor if it has another type; `Tensor.to` takes 2 µs to find that it has not."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def direction(
    x: Tensor,
    lengths: Tensor,
    input_weights: Tensor,
    hidden_weights: Tensor,
    peepholes: Tensor,
    biases: Tensor,
    h: Tensor,
    s: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one direction. Past the end of a sequence the output is zero and h and s stay."""
    mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    x = torch.where(mask if x.ndim == 2 else mask[..., None], x, 0)
    inputs = one_hot(x, input_weights) if x.ndim == 2 else x
    outputs = []
    for n in range(x.shape[1]):
        inside = mask[:, n, None]
        i = inputs[:, n] @ input_weights.T + biases
        new_h, new_s = step(i, h, s, hidden_weights, peepholes)
        h, s = torch.where(inside, new_h, h), torch.where(inside, new_s, s)
        outputs.append(torch.where(inside, new_h, 0.0))
    return torch.stack(outputs, dim=1), h, s


def one_hot(ids: Tensor, input_weights: Tensor) -> Tensor:
    """Turn ids [B, N] into one-hot vectors [B, N, I]: id k has its k-th element set, id 0 none."""
    vectors = torch.nn.functional.one_hot(ids.long(), input_weights.shape[1] + 1)
    return vectors[..., 1:].to(input_weights.dtype)
