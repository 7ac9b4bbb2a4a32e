"""Batches are bounded, deterministic and shuffled; the memory of a step is predicted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce import Alphabet
from transduce.audio.features import Statistics
from transduce.data.batches import (
    BYTES_PER_CELL,
    Batch,
    Batches,
    Example,
    NetworkSizes,
    predicted_bytes,
)
from transduce.data.pairs import DataError, Frames, Notation, Origin, Pair, Symbols
from transduce.model.signature import Signature

ROOT = Path(__file__).parent.parent


def pair_of(source: Symbols, target: Symbols, line=1):
    return Pair("".join(source), tuple(source), tuple(target), Origin(Path("a.tsv"), line))


def example_of(T, U):
    return Example(pair_of("x" * T, "y" * U), torch.zeros(T, 2), torch.ones(U, dtype=torch.int64))


def random_examples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 100, (count, 2), generator=generator).tolist()
    return [example_of(T, U // 4) for T, U in lengths]


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20)), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(60 * 21, 9000), st.integers(0, 3), st.sampled_from([1, 2, 3]))
def test_every_example_comes_once_and_no_batch_exceeds_max_cells(sizes, max_cells, seed, pooling):
    batches = Batches([example_of(*s) for s in sizes], max_cells, seed, pooling=pooling)
    for order in (batches.epoch(0), batches.epoch(1), batches.by_length()):
        assert sorted(i for batch in order for i in batch) == list(range(len(sizes)))
        for batch in order:
            B, T, U = batches.shape(batch)
            assert B * -(-T // pooling) * (U + 1) <= max_cells


def test_an_epochs_batches_depend_on_the_seed_and_its_number_alone():
    examples = random_examples(200)
    first, again = (Batches(examples, 10_000, seed=3) for _ in range(2))
    assert first.epoch(5) == again.epoch(5)
    assert first.epoch(5) != first.epoch(6)
    assert first.epoch(5) != Batches(examples, 10_000, seed=4).epoch(5)
    together = [{frozenset(batch) for batch in first.epoch(n)} for n in (5, 6)]
    assert together[0] != together[1]  # the batches differ, not only their order


def test_an_epochs_batches_have_little_padding():
    batches = Batches(random_examples(500), 10_000, seed=0)
    cells = padded = 0
    for batch in batches.epoch(0):
        B, T, _ = batches.shape(batch)
        padded += B * T
        cells += sum(batches.examples[i].num_frames for i in batch)
    assert cells / padded > 0.75


def test_an_epochs_batches_mix_lengths_and_numbers_of_labels():
    # Batches of words of one length, with one number of phonemes, would bias each gradient.
    words = [example_of(T, U) for T in range(5, 11) for U in range(T - 2, T + 2)] * 50
    batches = Batches(words, 10**6, seed=0, max_sequences=64)
    order = batches.epoch(0)
    different = [
        (len({words[i].num_frames for i in batch}), len({words[i].num_labels for i in batch}))
        for batch in order
    ]
    assert sum(T for T, _ in different) > 3 * len(order)
    assert sum(U for _, U in different) > 4 * len(order)


def target_only(num_labels):
    """Return an example of a target without source."""
    nothing = torch.empty(0, dtype=torch.int64)
    return Example(pair_of("", "y" * num_labels), nothing, torch.ones(num_labels).long())


# T and U are independent here; in random order the shares would be 0.38 and 0.53.
@pytest.mark.parametrize(("kind", "least"), [("pairs", 0.45), ("targets alone", 0.75)])
def test_batches_have_little_padding_in_their_lattices(kind, least):
    examples = random_examples(2000)
    if kind == "targets alone":
        examples = [target_only(example.num_labels) for example in examples]
    batches = Batches(examples, 10_000 if kind == "pairs" else 500, seed=0)
    cells = sum(T * U for T, U in batches.sizes)
    for order, share in ((batches.epoch(0), least), (batches.by_length(), 0.75)):
        shapes = [batches.shape(batch) for batch in order]
        assert cells / sum(B * max(1, T) * (U + 1) for B, T, U in shapes) > share


@pytest.mark.parametrize("wrong", [dict(max_sequences=0), dict(pooling=0)])
def test_bounds_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1"):
        Batches(random_examples(3), 10_000, 0, **wrong)


def test_online_training_takes_one_sequence_a_step_in_random_order():
    batches = Batches(random_examples(50), 10_000, seed=0, max_sequences=1)
    order = [i for (i,) in batches.epoch(0)]
    assert sorted(order) == list(range(50))
    sizes = batches.sizes[order].tolist()
    assert sizes != sorted(sizes)


def test_an_example_above_max_cells_is_named():
    with pytest.raises(DataError, match=r"a\.tsv, line 1: x+ alone has 60 cells .* 50; raise"):
        Batches([example_of(20, 2)], 50, seed=0)


def test_a_batch_is_padded_with_zeros_and_has_the_lengths():
    examples = [
        Example(pair_of("ab", "x"), torch.tensor([1, 2]), torch.tensor([3])),
        Example(pair_of("c", "yz"), torch.tensor([4]), torch.tensor([5, 6])),
    ]
    (batch,) = Batches(examples, 100, seed=0).load([[0, 1]])
    assert batch.frames.tolist() == [[1, 2], [4, 0]]
    assert batch.labels.tolist() == [[3, 0], [5, 6]]
    assert (batch.num_frames.tolist(), batch.num_labels.tolist()) == ([2, 1], [1, 2])
    assert [pair.name for pair in batch.pairs] == ["ab", "c"]
    assert len(batch.to("cpu")) == 2
    frames = Batch.of([example_of(3, 0), example_of(5, 0)])
    assert frames.frames.shape == (2, 5, 2)
    assert frames.labels.shape == (2, 0)


CHARACTERS = Notation("characters", None)


def test_text_becomes_ids_and_unknown_symbols_are_errors_or_null():
    signature = Signature(Alphabet("xy"), CHARACTERS, Alphabet("ab"), CHARACTERS)
    pairs = [pair_of("ab", "xy"), pair_of("ac", "x", 2), pair_of("b", "z", 3), pair_of("", "x", 4)]
    with pytest.raises(DataError, match=r"a\.tsv, line 2: 'c' is no symbol that the model knows"):
        signature.examples(pairs, unknown="refuse")
    skipped = []
    (kept,) = signature.examples(pairs, unknown="refuse", skipped=skipped)
    assert (kept.frames.tolist(), kept.labels.tolist()) == ([1, 2], [1, 2])
    assert len(skipped) == 3
    asked = signature.examples(pairs[:3], with_labels=False)
    assert [example.frames.tolist() for example in asked] == [[1, 2], [1, 0], [2]]
    assert asked[2].num_labels == 0


def test_frames_are_normalised_and_pairs_with_unknown_targets_skipped(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((3, 2), np.float32))
    source, skipped = Frames(tmp_path / "a.npy"), []
    statistics = Statistics(torch.ones(2), torch.ones(2))
    signature = Signature(Alphabet("x"), CHARACTERS, statistics=statistics)
    pairs = [
        replace(pair_of("a", "x"), source=source),
        replace(pair_of("b", "q", 2), source=source),
    ]
    (example,) = signature.examples(pairs, skipped=skipped)
    assert not example.frames.any() and example.labels.tolist() == [1]
    assert "line 2: 'q'" in str(skipped[0])
    with pytest.raises(DataError, match="line 2: 'q'"):
        signature.examples(pairs)


def test_targets_without_sources_are_bounded_too():
    pairs = [pair_of("", "xy" * n) for n in range(1, 20)]
    examples = Signature(Alphabet("xy"), CHARACTERS).examples(pairs)
    batches = Batches(examples, 100, seed=0)
    for batch in batches.load(batches.epoch(0)):
        assert len(batch) * (batch.labels.shape[1] + 1) <= 100
        assert batch.num_frames.tolist() == [0] * len(batch)


STEPS = """
import json, sys
sys.path.insert(0, "benchmarks")
import torch
from measure import extra_megabytes
from transduce import Transducer, distillation_loss, transducer_loss
torch.set_num_threads(2)
def step():
    f, g, num_frames = model(frames, lengths[0], labels)
    if distilled:
        loss = distillation_loss(f, g, labels, num_frames, lengths[1], targets)
    else:
        loss = transducer_loss(f[inputs], g, labels, num_frames[inputs], lengths[1])
    loss.sum().backward()
    model.zero_grad()
for (B, T, U), options, distilled, candidates in json.loads(sys.argv[1]):
    model = Transducer(26, 39, **options)
    inputs = torch.arange(B).repeat_interleave(candidates) if candidates > 1 else slice(None)
    frames, labels = torch.randn(B, T, 26), torch.randint(1, 40, (candidates * B, U))
    lengths = torch.full((B,), T), torch.full((candidates * B,), U)
    targets = torch.rand(B, U + 1, 40)
    print(extra_megabytes(step))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads the process's memory from /proc")
def test_a_step_uses_the_predicted_memory(set_num_threads):
    set_num_threads(2)
    steps = [
        ((16, 200, 40), {}, False, 1),
        ((16, 200, 40), {}, True, 1),
        ((8, 300, 40), dict(num_layers=3, dropout=0.2), False, 1),
        ((8, 300, 40), dict(num_layers=3, pooling=2), False, 1),
        ((8, 300, 40), dict(num_layers=3, bidirectional=False, lookahead=9), True, 1),
        ((16, 150, 20), {}, False, 5),
        ((128, 8, 7), dict(num_layers=2), False, 5),
    ]
    command = [sys.executable, "-c", STEPS, json.dumps(steps)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for (shape, options, *rest), measured in zip(steps, done.stdout.split(), strict=True):
        sizes = NetworkSizes(39, input_size=26, **options)
        predicted = predicted_bytes(shape, sizes, "cpu", *rest) / 2**20
        assert 0.75 < predicted / float(measured) < 1.25


MIXTURES = """
import json, sys
sys.path.insert(0, "benchmarks")
import torch
from measure import extra_megabytes
from transduce.architectures import ContinuousTransducer
from transduce.data.batches import Batch
torch.set_num_threads(1)
def step():
    model.losses(batch).sum().backward()
    model.zero_grad()
for (B, T, U), D, options in json.loads(sys.argv[1]):
    model = ContinuousTransducer(26, D, **options)
    lengths = torch.full((B,), T), torch.full((B,), U)
    batch = Batch((), torch.ones(B, T).long(), lengths[0], torch.randn(B, U, D), lengths[1])
    print(extra_megabytes(step))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads the process's memory from /proc")
def test_a_step_of_a_mixture_uses_the_predicted_memory(set_num_threads):
    set_num_threads(1)
    steps = [
        ((32, 6, 60), 80, dict(num_components=8, product_rank=8, hidden_size=64)),
        ((32, 60, 60), 80, dict(num_components=4, product_rank=8, hidden_size=128)),
        ((8, 200, 200), 2, dict(num_components=16, product_rank=1, hidden_size=8)),
    ]
    command = [sys.executable, "-c", MIXTURES, json.dumps(steps)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for (shape, D, options), measured in zip(steps, done.stdout.split(), strict=True):
        predicted = predicted_bytes(shape, NetworkSizes(D, **options)) / 1e6
        assert 0.75 < predicted / float(measured) < 1.25


def test_a_candidate_takes_the_memory_of_a_sequence_but_its_transcription_network():
    B, T, U, prediction, outputs = 4, 100, 20, 8, 40
    sizes = NetworkSizes(39, hidden_size=16, num_layers=2, prediction_size=prediction)
    more = predicted_bytes((B, T, U), sizes, "cuda", candidates=5)
    more -= predicted_bytes((B, T, U), sizes, "cuda")
    numbers = 6 * prediction * (U + 1) + 3 * outputs * (T + U + 1)
    assert more == 4 * B * (4 * numbers + BYTES_PER_CELL * (T + U + 1) * (U + 1))


def test_stacked_frames_take_memory_for_each_frame_that_they_hold():
    B, T, U, D, lookahead = 4, 100, 20, 26, 9
    plain = NetworkSizes(39, input_size=D, bidirectional=False)
    stacked = replace(plain, lookahead=lookahead)
    more = predicted_bytes((B, T, U), stacked) - predicted_bytes((B, T, U), plain)
    assert more == 4 * B * (1 + lookahead) * D * T


def test_pooling_takes_memory_for_sums_and_averages_and_saves_it_after_them(set_num_threads):
    set_num_threads(1)
    B, T, U, hidden, outputs = 4, 101, 20, 16, 40
    plain = NetworkSizes(39, input_size=26, hidden_size=hidden)
    more = predicted_bytes((B, T, U), replace(plain, pooling=2))
    more -= predicted_bytes((B, T, U), plain)
    width, pooled = 2 * hidden, 51
    kept = width * (T + 2 * pooled) - 3 * outputs * (T - pooled)
    assert more == 4 * B * kept - BYTES_PER_CELL * (T - pooled) * (U + 1)


def test_a_gpu_holds_all_lattices_at_once_and_the_cpu_one_per_thread(set_num_threads):
    set_num_threads(1)
    shape, sizes = (64, 1000, 200), NetworkSizes(39)
    more = predicted_bytes(shape, sizes, "cuda") - predicted_bytes(shape, sizes)
    assert more == 63 * 40 * 1201 * 201
