"""The peephole LSTM in plain PyTorch operations: any device, nothing compiled (Eqs. 4-8).

One product computes the inputs' part of all sums before the loop. The loop treats the directions
as a batch dimension and needs ten operations a frame. Autograd differentiates it.
"""

import torch
from torch import Tensor

from transduce.lstm.reference import fill_defaults
from transduce.sequences import reverse_padded


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
    padded = lengths is not None
    lengths, h, s = fill_defaults(x, lengths, peepholes, h, s)
    mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    if padded:
        x = torch.where(mask if x.ndim == 2 else mask[..., None], x, 0)
    inputs = project(x, lengths, input_weights, biases)
    weights = hidden_weights.mT
    to_input_gate, to_forget_gate, to_output_gate = peepholes[:, :, None].unbind(1)
    all_h, all_s = [h], [s]
    for i in inputs.unbind(1):
        to_input, to_forget, to_state, to_output = torch.baddbmm(i, h, weights).chunk(4, dim=2)
        # Autograd needs only the result of a sigmoid, so it may replace its argument.
        input_gate = torch.addcmul(to_input, to_input_gate, s).sigmoid_()  # Eq. 4
        forget_gate = torch.addcmul(to_forget, to_forget_gate, s).sigmoid_()  # Eq. 5
        s = torch.addcmul(forget_gate * s, input_gate, to_state.tanh())  # Eq. 6
        output_gate = torch.addcmul(to_output, to_output_gate, s).sigmoid_()  # Eq. 7
        h = output_gate * s.tanh()  # Eq. 8
        all_h.append(h)
        all_s.append(s)
    output, *second = torch.stack(all_h[1:], dim=2)  # [B, N, H]
    if second:
        output = torch.cat([output, reverse_padded(second[0], lengths)], dim=2)
    if not padded:
        return output, h, s
    # The loop runs on past the end of a sequence: discard its outputs there, and take each last
    # state from the sequence's own last step.
    items = torch.arange(len(x), device=x.device)
    last_h, last_s = (
        torch.stack(every)[lengths, :, items].transpose(0, 1) for every in (all_h, all_s)
    )
    return torch.where(mask[..., None], output, 0.0), last_h, last_s


def project(x: Tensor, lengths: Tensor, input_weights: Tensor, biases: Tensor) -> Tensor:
    """Return the inputs' part of the four sums, biases included: [D, N, B, 4 H]."""
    directions = [x, reverse_padded(x, lengths)][: len(biases)]
    turned = torch.stack([frames.transpose(0, 1) for frames in directions])  # [D, N, B, ...]
    D, N, B = turned.shape[:3]
    if x.ndim == 3:
        sums = torch.baddbmm(biases[:, None], turned.flatten(1, 2), input_weights.mT)
        return sums.view(D, N, B, -1)
    # One table of all directions; id 0 is the vector of zeros, so its row holds the biases alone.
    tables = torch.nn.functional.pad(input_weights.mT, (0, 0, 1, 0)) + biases[:, None]
    first_rows = torch.arange(D, device=x.device)[:, None, None] * tables.shape[1]
    return torch.nn.functional.embedding(turned + first_rows, tables.flatten(0, 1))
