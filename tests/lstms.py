"""Shared by the LSTM tests: random problems, the results of a call, the tolerance."""

from copy import deepcopy

import torch

from transduce import PeepholeLSTM

DEVICES = {"cuda": "cuda"}
# The arguments of `problem`.
SHAPES = {
    "one number": (1, 1, 1, 1),
    "one frame": (2, 1, 3, 20),
    "one input": (4, 6, 1, 33),
    "whole vectors": (3, 7, 16, 16),
    "the paper's": (5, 12, 26, 128, 1, True),
    "two layers": (3, 8, 5, 20, 2, False),
    "two layers both ways": (3, 8, 5, 20, 2, True),
    "ragged": (5, 9, 4, 3, 1, False, [3, 9, 0, 1, 9]),
    "ragged both ways": (5, 9, 4, 33, 2, True, [3, 9, 0, 1, 8]),
    "all of length zero": (2, 3, 4, 5, 1, True, [0, 0]),
    "several blocks of steps": (3, 150, 2, 3, 1, True, [150, 43, 129]),
    "a block of rows": (300, 2, 2, 3, 1, False, [b % 3 for b in range(300)]),
    "many inputs": (2, 3, 300, 5),
    "thousands of frames": (20, 200, 26, 33, 1, True),
    "ids": (4, 9, 7, 20, 1, False, [9, 2, 0, 5], True),
    "ids both ways": (4, 9, 7, 20, 2, True, [9, 2, 0, 5], True),
    "one id": (1, 1, 1, 1, 1, False, None, True),
}


def problem(B, N, I, H, layers=1, both=False, lengths=None, ids=False, seed=0):  # noqa: E741
    """Return a float64 model whose gates are half open, and the arguments of one call.

    The states do not grow, and the gradients have the size of those of a mean over the batch, so
    that errors come from rounding, not from chaotic dynamics that amplify them.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = PeepholeLSTM(I, H, layers, both).double()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            inputs = weights.shape[-1] if name.endswith("weights") else 2
            weights.copy_(numbers(*weights.shape) / (2 * inputs**0.5))
    D = 2 if both else 1
    x = torch.randint(0, I + 1, (B, N), generator=generator) if ids else numbers(B, N, I)
    lengths = torch.tensor([N] * B if lengths is None else lengths)
    state = numbers(layers * D, B, H), numbers(layers * D, B, H)
    upstream = [numbers(*shape) / B for shape in ((B, N, D * H), *[state[0].shape] * 2)]
    return model, x, lengths, state, upstream


def results(backend, dtype, model, x, lengths, state, upstream):
    """Return the results of one call and all gradients, by name."""
    device = DEVICES.get(backend, "cpu")
    model = deepcopy(model).to(device, dtype)
    x, h0, s0 = (
        t.detach().to(device, dtype if t.is_floating_point() else None) for t in (x, *state)
    )
    inputs = {"h0": h0, "s0": s0} | ({"x": x} if x.is_floating_point() else {})
    inputs = {name: t.requires_grad_() for name, t in inputs.items()}
    inputs |= dict(model.named_parameters())
    output, (h, s) = model(x, lengths.to(device), (h0, s0), backend=backend)
    incoming = [g.to(device, dtype) for g in upstream]
    grads = torch.autograd.grad((output, h, s), list(inputs.values()), incoming)
    values = {"output": output, "h": h, "s": s}
    values |= {f"grad {name}": grad for name, grad in zip(inputs, grads, strict=True)}
    return {name: t.detach().cpu() for name, t in values.items()}


def errors(found, exact):
    """Return the largest absolute error of each result."""
    return {name: float((found[name].double() - exact[name]).abs().max()) for name in exact}


def relative_errors(found, exact):
    """Return the error of each result, relative to the norm of the exact one."""
    return {
        name: float((found[name].double() - numbers).norm() / numbers.norm().clamp(min=1e-30))
        for name, numbers in exact.items()
    }


def assert_as_exact_as_the_reference(backend, *arguments):
    """Assert that no error exceeds twice that of the float32 reference, plus 1e-6."""
    exact = results("reference", torch.float64, *arguments)
    allowed = errors(results("reference", torch.float32, *arguments), exact)
    made = errors(results(backend, torch.float32, *arguments), exact)
    assert not {n: (made[n], allowed[n]) for n in made if not made[n] <= 2 * allowed[n] + 1e-6}


def assert_same_bits(found, expected):
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
