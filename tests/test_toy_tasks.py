"""Toy tasks that a small transducer must learn in a few hundred steps."""

import math

import pytest
import torch

from transduce import Transducer, beam_search, greedy_search, transducer_loss

NUM_SYMBOLS = 6
TASKS = {
    "copy": lambda x: x,
    "keep the odd ones": lambda x: [k for k in x if k % 2],
    "say each twice": lambda x: [k for k in x for _ in range(2)],  # longer than the input
}


def pad(sequences):
    """Return the sequences as one padded tensor [B, longest], and their lengths [B]."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True)
    return padded, torch.tensor([len(s) for s in sequences])


def pairs(count, task, seed):
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (count,), generator=source).tolist()
    inputs = [torch.randint(1, NUM_SYMBOLS + 1, (n,), generator=source).tolist() for n in lengths]
    return inputs, [task(x) for x in inputs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:max_labels_per_frame")  # improbable hypotheses
@pytest.mark.parametrize("name", TASKS)
def test_a_small_transducer_learns_to(name):
    torch.manual_seed(0)
    model = Transducer(NUM_SYMBOLS, NUM_SYMBOLS, hidden_size=32)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(250):
        inputs, outputs = pairs(32, TASKS[name], seed=step)
        (frames, num_frames), (labels, num_labels) = pad(inputs), pad(outputs)
        f, g, num_frames = model(frames, num_frames, labels.long())
        loss = transducer_loss(f, g, labels.long(), num_frames, num_labels)
        optimiser.zero_grad()
        loss.mean().backward()
        optimiser.step()
    bits = loss.detach().sum() / num_labels.sum() / math.log(2)
    assert bits < 0.2
    inputs, outputs = pairs(100, TASKS[name], seed=10**6)
    found = greedy_search(model, *pad(inputs))
    right = sum(list(h.labels) == y for h, y in zip(found, outputs, strict=True))
    assert right >= 90
    searched = beam_search(model, *pad(inputs), beam_width=10)
    assert sum(list(best.labels) == y for (best,), y in zip(searched, outputs, strict=True)) >= 90
    for hypothesis, x in zip(found, inputs, strict=True):
        assert len(hypothesis.frames) == len(hypothesis.labels)
        assert list(hypothesis.frames) == sorted(hypothesis.frames)
        assert all(t < len(x) for t in hypothesis.frames)
