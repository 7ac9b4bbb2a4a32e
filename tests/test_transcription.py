"""The transcription network in steps, against the network on whole inputs, bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.networks import TranscriptionNetwork
from transduce.transcription import PackedTranscription

NETWORKS = {
    "one layer": dict(),
    "lookahead": dict(lookahead=3, num_layers=2),
    "pooling": dict(pooling=3, num_layers=3),
    "both": dict(pooling=2, lookahead=5, num_layers=2),
    "pooling alone": dict(pooling=4),
    "ids": dict(num_layers=2, pooling=2, embedding_size=4),
}


def network_of(name):
    torch.manual_seed(1)
    return TranscriptionNetwork(7, 40, 37, bidirectional=False, **NETWORKS[name]).eval()


def pieces(cuts, length):
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    return [slice(a, b) for a, b in pairwise(edges)]


def inputs(name, length):
    if name == "ids":
        return torch.randint(0, 8, (length,))
    return torch.randn(length, 7)


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=25, deadline=None)
@given(length=st.integers(0, 60), cuts=st.lists(st.integers(0, 60), max_size=70))
def test_any_pieces_give_the_vectors_of_the_whole(name, length, cuts):
    network = network_of(name)
    frames = inputs(name, length)
    packed = PackedTranscription(network)
    state = packed.start(of_ids=name == "ids")
    parts = pieces(cuts, length)
    found = [
        packed.advance([state], [frames[part]], [i == len(parts) - 1])[0]
        for i, part in enumerate(parts)
    ]
    if length == 0:
        assert sum(map(len, found)) == 0
        return
    [whole] = network.forward_one_by_one(frames[None], torch.tensor([length]))
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("name", NETWORKS)
def test_inputs_side_by_side_are_as_each_is_alone(name):
    network = network_of(name)
    packed = PackedTranscription(network)
    all_frames = [inputs(name, length) for length in (31, 4, 0, 50, 17)]
    states = [packed.start(of_ids=name == "ids") for _ in all_frames]
    found = [[] for _ in all_frames]
    for step in range(10):
        new = [frames[step * (b + 2) : (step + 1) * (b + 2)] for b, frames in enumerate(all_frames)]
        for b, f in enumerate(packed.advance(states, new, [False] * 5)):
            found[b].append(f)
    rest = [frames[10 * (b + 2) :] for b, frames in enumerate(all_frames)]
    for b, f in enumerate(packed.advance(states, rest, [True] * 5)):
        found[b].append(f)
    for frames, parts in zip(all_frames, found, strict=True):
        if len(frames):
            [alone] = network.forward_one_by_one(frames[None], torch.tensor([len(frames)]))
            assert torch.equal(torch.cat(parts), alone)
        else:
            assert sum(map(len, parts)) == 0


def test_a_bidirectional_network_has_no_steps():
    with pytest.raises(ValueError, match="a bidirectional network needs the whole input"):
        PackedTranscription(TranscriptionNetwork(7, 4, 5))
