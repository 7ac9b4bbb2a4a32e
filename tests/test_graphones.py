"""Joint n-gram models: graphones, their n-grams, and the probability of a pair."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from commands import transduce
from toys import sound_recipe, toy_recipe, write_sounds, write_toy

from transduce.alphabet import Alphabet
from transduce.data.pairs import DataError, Notation
from transduce.graphones import model as module
from transduce.graphones import reference
from transduce.graphones.model import LEAST_LOG_JOINT, JointNGram, _add, _advance
from transduce.graphones.ngram import estimate_ngrams
from transduce.graphones.segmentation import Sequences, segment_pairs
from transduce.model.checkpoint import load_model
from transduce.model.joint_ngram import JointNGramModel, load_joint_ngram, save_joint_ngram
from transduce.model.signature import Signature
from transduce.model.tensors import (
    JOINT_NGRAM,
    CheckpointError,
    is_joint_ngram,
    read_tensors,
    write_tensors,
)
from transduce.training.joint_ngram import learn_joint_ngram

SIZES = NUM_SYMBOLS, NUM_LABELS = 3, 4
SIGNATURE = Signature(
    *(Alphabet("wxyz"), Notation("characters", None)),
    *(Alphabet("abc"), Notation("characters", None)),
)


def pairs_of(seed=0, count=40, longest=5):
    """Return pairs: 1 becomes 1 or nothing, 2 becomes 2 and 3, and 3 becomes 4."""
    draw, pairs = np.random.default_rng(seed), []
    for _ in range(count):
        source = draw.integers(1, NUM_SYMBOLS + 1, draw.integers(1, longest + 1)).tolist()
        silent = draw.random(len(source)) < 0.3
        outputs = {1: (1,), 2: (2, 3), 3: (4,)}
        each = [
            () if one == 1 and is_silent else outputs[one]
            for one, is_silent in zip(source, silent, strict=True)
        ]
        pairs.append((tuple(source), sum(each, ())))
    return pairs


def random_pairs(seed=0, count=12):
    """Return pairs that can be cut in many ways, of different probabilities."""
    draw = np.random.default_rng(seed)
    sources = [draw.integers(1, NUM_SYMBOLS + 1, length) for length in draw.integers(2, 6, count)]
    labels = [
        draw.integers(1, NUM_LABELS + 1, draw.integers(0, 2 * len(source))) for source in sources
    ]
    return [
        tuple(tuple(side.tolist()) for side in pair) for pair in zip(sources, labels, strict=True)
    ]


def arrays(pairs):
    return [tuple(np.array(side, np.int64) for side in pair) for pair in pairs]


def cut(pairs):
    """Return the keys, their log-probabilities, and the graphones of each pair, by the package."""
    sides = (Sequences.of(pair[side] for pair in arrays(pairs)) for side in (0, 1))
    keys, log_probs, (ids, starts) = segment_pairs(*sides, NUM_LABELS)
    graphones = [graphone(key) for key in keys.tolist()]
    found = [tuple(graphones[i] for i in ids[first:last]) for first, last in pairwise(starts)]
    return dict(zip(graphones, log_probs.tolist(), strict=True)), found


def graphone(key):
    rest, second = divmod(key, NUM_LABELS + 1)
    symbol, first = divmod(rest, NUM_LABELS + 1)
    return symbol, tuple(label for label in (first, second) if label)


# --- Graphones ----------------------------------------------------------------------------------

UNCUT = [((1,), (1, 1, 1)), ((), (2,))]  # more than two labels a symbol


@pytest.mark.parametrize("seed", range(3))
def test_graphones_have_the_reference_probabilities(seed):
    pairs = pairs_of(seed) + UNCUT + random_pairs(seed)
    expected, (found, _) = reference.learn_graphones(pairs), cut(pairs)
    assert len(found) > 4 and found.keys() <= expected.keys()
    for one, log_prob in found.items():
        assert log_prob == pytest.approx(expected[one], abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_is_cut_in_the_most_probable_way(seed):
    pairs = pairs_of(seed) + UNCUT + random_pairs(seed)
    log_probs, (_, found) = reference.learn_graphones(pairs), cut(pairs)
    for (source, labels), way in zip(pairs, found, strict=True):
        best = reference.best_segmentation(source, labels, log_probs)
        if best is None:
            assert (source, labels) in UNCUT and way == ()
            continue
        assert tuple(symbol for symbol, _ in way) == source
        assert sum((part for _, part in way), ()) == labels
        score, most = (sum(log_probs[one] for one in each) for each in (way, best))
        assert score == pytest.approx(most, abs=1e-9)  # equally probable ways may be cut otherwise


def test_of_equally_probable_ways_the_first_symbols_become_the_fewest_labels():
    _, found = cut([((1, 1), (1,))])
    assert found == [((1, ()), (1, (1,)))]


def test_the_true_graphones_are_found():
    log_probs, _ = cut(pairs_of(count=200))
    assert set(log_probs) == {(1, (1,)), (1, ()), (2, (2, 3)), (3, (4,))}


def test_pairs_that_cannot_be_cut_change_nothing():
    pairs, more = arrays(pairs_of()), arrays(pairs_of() + UNCUT)
    one, other = (JointNGram.learn(some, NUM_SYMBOLS, NUM_LABELS) for some in (pairs, more))
    assert (one.keys == other.keys).all()
    for table, same in zip(one.automaton, other.automaton, strict=True):
        np.testing.assert_array_equal(table, same)
    with pytest.raises(ValueError, match=r"^all pairs have more than two labels for each source"):
        JointNGram.learn(arrays(UNCUT), NUM_SYMBOLS, NUM_LABELS)


# --- N-grams ------------------------------------------------------------------------------------


def sequences_of(longest, seed=1, count=60, num_symbols=4):
    """Return sequences in which some symbols follow others more often than by chance."""
    draw, sequences = np.random.default_rng(seed), [list(range(num_symbols))[:longest]]
    for symbol in range(num_symbols):
        sequences.append([symbol])
    for _ in range(count):
        sequence = [int(draw.integers(num_symbols))]
        while len(sequence) < longest and draw.random() < 0.8:
            often = (sequence[-1] + 1) % num_symbols
            sequence.append(often if draw.random() < 0.6 else int(draw.integers(num_symbols)))
        sequences.append(sequence)
    return sequences


def automaton_of(sequences, order, num_symbols=4):
    joined = Sequences.of(np.array(sequence) for sequence in sequences)
    return estimate_ngrams(joined, num_symbols, order)


def state_after(context, automaton, num_symbols=4):
    state = 0
    for symbol in context:
        _, state = _advance(
            state, num_symbols + 1 if symbol == reference.START else symbol, *automaton
        )
    return state


@pytest.mark.parametrize("order, longest", [(1, 5), (2, 5), (3, 5), (5, 6), (8, 1), (8, 4)])
def test_ngrams_have_the_reference_probabilities(order, longest):
    """After contexts that were seen and that were not, for all symbols, the end, and unknown."""
    sequences, end = sequences_of(longest), 4
    automaton, expected = automaton_of(sequences, order), reference.KneserNey(sequences, order)
    inner = [context for n in range(4) for context in product(range(4), repeat=n)]
    inner += [tuple(sequence) for sequence in sequences]
    for context in (*inner, *((reference.START, *context) for context in inner)):
        state, total = state_after(context, automaton), 0.0
        for symbol in range(end + 1):
            log_prob, _ = _advance(state, symbol, *automaton)
            name = reference.END if symbol == end else symbol
            assert math.exp(log_prob) == pytest.approx(expected.prob(context, name), rel=1e-5)
            total += math.exp(log_prob)
        log_prob, following = _advance(state, end + 2, *automaton)
        assert math.exp(log_prob) == pytest.approx(expected.prob(context, "unknown"), rel=1e-5)
        assert following == 0
        assert total + math.exp(log_prob) == pytest.approx(1, abs=1e-5)


def test_discounts_are_those_of_chen_and_goodman():
    """Y = n1 / (n1 + 2 n2), and the discount of c is c - (c + 1) Y n(c+1) / n(c)."""
    found = reference.discounts({1: 9, 2: 3, 3: 2, 4: 1})  # Y = 3/5
    assert found == pytest.approx((0, 1 - 6 / 5 * 3 / 9, 2 - 9 / 5 * 2 / 3, 3 - 12 / 5 * 1 / 2))
    found = reference.discounts({1: 2, 2: 4, 3: 1, 4: 1})  # Y = 1/5
    assert found == pytest.approx((0, 1 - 2 / 5 * 4 / 2, 2 - 3 / 5 * 1 / 4, 3 - 4 / 5 * 1 / 1))
    # It is half of the count without n1 or n2, and where an estimate leaves its range.
    for some in ({1: 6}, {2: 3}, {}):
        assert reference.discounts(some | {3: 2, 4: 1}) == (0, 0.5, 1, 1.5)
    found = reference.discounts({1: 9, 2: 3, 3: 5})  # 2 - 9/5 5/3 < 0, and n4 = 0 gives 3
    assert found == pytest.approx((0, 3 / 5, 1, 1.5))
    assert reference.discounts({1: 9, 2: 3})[2:] == (1, 1.5)  # n3 = 0


# --- Pairs --------------------------------------------------------------------------------------


def joint_of(pairs, order=3):
    return JointNGram.learn(arrays(pairs), NUM_SYMBOLS, NUM_LABELS, order)


def ids(*numbers):
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_probability_of_a_pair_is_the_sum_over_all_ways_to_cut_it(order):
    pairs = [*pairs_of(), ((1, 1), (1,)), ((3, 3), (4, 4)), ((3, 3), (1, 4))]
    joint, (_, found) = joint_of(pairs, order), cut(pairs)
    expected = reference.KneserNey(found, order)
    some_ways = 0
    for source, labels in [*pairs_of(seed=5, count=15), ((1, 1, 1), (1,)), ((1, 1, 3), (1, 4))]:
        log_joint = reference.log_joint(source, labels, expected, *SIZES)
        some_ways += len(list(reference.segmentations(source, labels))) > 1
        assert joint.log_joint(ids(*source), ids(*labels)) == pytest.approx(log_joint, abs=1e-5)
    assert some_ways > 10


def test_pruning_hardly_changes_the_probability(monkeypatch):
    """Each place of a pair keeps some contexts; here more labels than symbols make many."""
    draw = np.random.default_rng(0)
    pairs = [
        (draw.integers(1, 3, length), draw.integers(1, 3, length + int(draw.integers(-2, 3))))
        for length in draw.integers(4, 9, 300)
    ]
    joint = JointNGram.learn(pairs, 2, 2, 8)
    found = [joint.log_joint(*pair) for pair in pairs[:40]]
    monkeypatch.setattr(module, "CONTEXTS_KEPT", 5000)
    exact = [joint.log_joint(*pair) for pair in pairs[:40]]
    assert max(abs(np.subtract(found, exact))) < 1e-3
    monkeypatch.setattr(module, "CONTEXTS_KEPT", 2)
    few = [joint.log_joint(*pair) for pair in pairs[:40]]
    assert max(np.subtract(exact, few)) > 1e-2 and min(np.subtract(exact, few)) > -1e-9


@pytest.mark.parametrize(
    "source, labels",
    [((3,), (1,)), ((3,), ()), ((1,), (1, 1, 1)), ((2, 3), (3, 2, 4)), ((1, 2, 1), (4,) * 6)],
)
def test_a_pair_of_no_known_graphones_has_unknown_ones_of_any_size(source, labels):
    model = reference.KneserNey(cut(pairs_of())[1], 3)
    expected = reference.log_joint(source, labels, model, *SIZES)
    known = {ngram[0] for ngram in model.counts[1]}
    assert not any(known >= set(way) for way in reference.segmentations(source, labels))
    found = joint_of(pairs_of()).log_joint(ids(*source), ids(*labels))
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_unknown_graphone_is_taken_only_where_nothing_else_is_possible():
    joint, model = joint_of(pairs_of()), reference.KneserNey(cut(pairs_of())[1], 3)
    known = joint.log_joint(ids(2, 3), ids(2, 3, 4))
    ways = [model.log_prob(((2, (2, 3)), (3, (4,))))]
    assert known == pytest.approx(ways[0], abs=1e-5)
    unknown = math.log(model.prob((reference.START,), reference.UNKNOWN) / NUM_SYMBOLS)
    ended = math.log(model.prob((reference.UNKNOWN,), reference.END))
    for count in range(4):
        share = -math.log(2) - count * math.log(2 * NUM_LABELS)
        found = joint.log_joint(ids(3), ids(*[1] * count))
        assert found == pytest.approx(unknown + share + ended, abs=1e-5) and found < known
    # A symbol that no alphabet has is null.
    assert LEAST_LOG_JOINT < joint.log_joint(ids(0, 3), ids(4)) < known


def test_unknown_graphones_of_all_sizes_share_the_probability_of_one():
    each = [
        NUM_SYMBOLS * NUM_LABELS**count * math.exp(reference.unknown_share(count, *SIZES))
        for count in range(60)
    ]
    assert each[:3] == pytest.approx([1 / 2, 1 / 4, 1 / 8]) and sum(each) == pytest.approx(1)


def test_labels_without_a_source_symbol_have_the_least_probability():
    joint = joint_of(pairs_of())
    assert joint.log_joint(ids(), ids(1)) == LEAST_LOG_JOINT
    # No other pair is as improbable, however long it is.
    assert LEAST_LOG_JOINT < joint.log_joint(ids(*[3] * 300), ids(*[1] * 600)) < -1000
    assert LEAST_LOG_JOINT < joint.log_joint(ids(3), ids(*[1] * 300)) < -600
    assert joint.log_joint(ids(), ids()) > LEAST_LOG_JOINT


@pytest.mark.parametrize("log_prob, kept", [(-3.0, [-1.0, -2.0, -1.5]), (-1.2, [-1.0, -1.2, -1.5])])
def test_a_full_place_drops_the_least_probable_context(log_prob, kept):
    states, log_probs = np.array([[[5, 6, 7]]]), np.array([[[-1.0, -2.0, -1.5]]])
    assert _add(states, log_probs, 0, 0, 3, 8, log_prob) == 3
    assert log_probs[0, 0].tolist() == kept
    assert (8 in states[0, 0]) == (log_prob > -2)


def test_the_constants_are_those_of_the_derivation():
    assert (reference.MOST_LABELS, reference.ROUNDS, reference.LEAST_COUNT) == (2, 8, 1e-3)
    assert reference.FIRST_WEIGHTS == (1 / 4, 1, 1 / 4)
    assert (module.ORDER, module.CONTEXTS_KEPT, LEAST_LOG_JOINT) == (8, 64, -1e5)


def test_padding_counts_for_nothing():
    joint = joint_of(pairs_of())
    frames, num_frames = torch.tensor([[2, 3, 1], [3, 2, 2]]), torch.tensor([2, 1])
    rows, labels = torch.tensor([1, 0, 0]), torch.tensor([[4, 3, 3], [2, 3, 4], [2, 3, 4]])
    found = joint.log_joints(frames, num_frames, rows, labels, torch.tensor([1, 3, 2]))
    expected = [
        joint.log_joint(ids(3), ids(4)),
        joint.log_joint(ids(2, 3), ids(2, 3, 4)),
        joint.log_joint(ids(2, 3), ids(2, 3)),
    ]
    assert found.tolist() == expected and found.dtype == torch.float64
    nothing = torch.empty(0, dtype=torch.int64)
    assert joint.log_joints(frames, num_frames, nothing, labels[:0], nothing).tolist() == []


# --- Files --------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    save_joint_ngram(
        JointNGramModel(joint_of(pairs_of(longest=8), 8), SIGNATURE), tmp_path / "n.safetensors"
    )
    return tmp_path / "n.safetensors"


def test_a_file_keeps_the_model(path):
    before, found = joint_of(pairs_of(longest=8), 8), load_joint_ngram(path)
    assert is_joint_ngram(path) and found.signature.difference(SIGNATURE) is None
    assert (found.ngram.keys == before.keys).all()
    assert (found.ngram.num_symbols, found.ngram.num_labels) == (NUM_SYMBOLS, NUM_LABELS)
    for table, same in zip(found.ngram.automaton, before.automaton, strict=True):
        np.testing.assert_array_equal(table, same)
    for source, labels in arrays(pairs_of(seed=7)):
        assert found.ngram.log_joint(source, labels) == before.log_joint(source, labels)


@pytest.mark.parametrize("order, longest", [(1, 5), (2, 5), (8, 1), (8, 12)])
def test_models_of_every_order_are_read_again(tmp_path, order, longest):
    model = JointNGramModel(joint_of(pairs_of(longest=longest), order), SIGNATURE)
    save_joint_ngram(model, tmp_path / "n.safetensors")
    found = load_joint_ngram(tmp_path / "n.safetensors").ngram
    assert found.log_joint(ids(3), ids(4)) == model.ngram.log_joint(ids(3), ids(4))


def changed(path, **tables):
    """Write a file again with other tables; None leaves one out."""
    tensors, header = read_tensors(path, JOINT_NGRAM)
    del header["kind"], header["version"]
    tensors = {name: table for name, table in (tensors | tables).items() if table is not None}
    write_tensors(path, tensors, header, JOINT_NGRAM)


def tables_of(path):
    return read_tensors(path, JOINT_NGRAM)[0]


def refused(path, said):
    with pytest.raises(CheckpointError, match=said) as error:
        load_joint_ngram(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message and message.endswith("; learn it again")


TABLES = ["keys", "first_arcs", "symbols", "log_probs", "suffixes", "back_off"]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_cut_short_or_of_another_type_is_refused(path, name):
    table = tables_of(path)[name]
    for length in (0, 1, len(table) // 2, len(table) - 1):
        changed(path, **{name: table[:length].clone()})
        refused(path, "is damaged")
    changed(path, **{name: torch.cat((table, table[-1:]))})
    refused(path, "is damaged")
    for dtype in (torch.int16, torch.float64, torch.bfloat16, torch.bool):
        changed(path, **{name: table.to(dtype)})
        refused(path, rf"{name} is not one row of|unsupported")
    changed(path, **{name: table[None]})
    refused(path, f"{name} is not one row of")
    changed(path, **{name: table.sum()})
    refused(path, f"{name} is not one row of")
    changed(path, **{name: None})
    refused(path, "its tables are not keys, first_arcs, ")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("place", [0, 1, 3, -1])
def test_a_number_that_leads_out_of_a_table_is_refused(path, name, place):
    table = tables_of(path)[name]
    bad = (math.nan, math.inf, 5.0) if table.is_floating_point() else (-1, -(2**31), 2**31 - 1)
    for value in bad:
        other = table.clone()
        other[place] = value
        changed(path, **{name: other})
        refused(path, f"{name} (has a number that no such table has|is not sorted)")


def test_a_suffix_that_leads_round_in_a_circle_is_refused(path):
    suffixes = tables_of(path)["suffixes"]
    for state in (1, 4, 9):
        other = suffixes.clone()
        other[state - 1] = state
        changed(path, suffixes=other)
        refused(path, "suffixes has a number")


def test_unsorted_tables_are_refused(path):
    tables = tables_of(path)
    changed(path, keys=tables["keys"].flip(0))
    refused(path, "keys has a number")
    changed(path, **tables)
    first, last = next(
        (first, last)
        for first, last in zip(tables["first_arcs"][1:], tables["first_arcs"][2:], strict=False)
        if last - first > 1
    )
    symbols = tables["symbols"].clone()
    symbols[first:last] = symbols[first:last].flip(0)
    changed(path, symbols=symbols)
    refused(path, "symbols is not sorted")
    first_arcs = tables["first_arcs"].clone()
    first_arcs[2] = first_arcs[-1]
    changed(path, symbols=tables["symbols"], first_arcs=first_arcs)
    refused(path, "first_arcs has a number")


def test_random_damage_never_ends_the_process(path):
    """What is not refused is read without a check, and must stay inside the tables."""
    tables, draw = tables_of(path), np.random.default_rng(0)
    for _ in range(150):
        name = TABLES[draw.integers(len(TABLES))]
        other = tables[name].clone()
        for _ in range(draw.integers(1, 4)):
            place, source = draw.integers(len(other), size=2)
            other[place] = other[source] + int(draw.integers(-1, 2))
        changed(path, **tables | {name: other})
        try:
            ngram = load_joint_ngram(path).ngram
        except CheckpointError:
            continue
        for source, labels in arrays(pairs_of(count=5)):
            assert ngram.log_joint(source, labels) >= LEAST_LOG_JOINT


def test_a_damaged_header_is_refused(path):
    tensors, header = read_tensors(path, JOINT_NGRAM)
    del header["kind"], header["version"]
    for name, value in [("sources", None), ("targets", [1, 2]), ("sources", "aa")]:
        write_tensors(path, tensors, header | {name: value}, JOINT_NGRAM)
        refused(path, "is damaged")
    write_tensors(path, tensors, {k: v for k, v in header.items() if k != "targets"}, JOINT_NGRAM)
    refused(path, "is damaged")


def test_another_kind_of_file_is_named(path, tmp_path):
    assert not is_joint_ngram(tmp_path) and not is_joint_ngram(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"n.safetensors is a joint n-gram model, not a mod"):
        load_model(path)
    write_tensors(path, tables_of(path), {}, "a model")
    assert not is_joint_ngram(path)
    with pytest.raises(CheckpointError, match=r"is a model, not a joint n-gram model; give"):
        load_joint_ngram(path)
    path.write_bytes(b"words")
    assert not is_joint_ngram(path)
    with pytest.raises(CheckpointError, match=r"is not a joint n-gram model, because it is not"):
        load_joint_ngram(path)


# --- The command --------------------------------------------------------------------------------


def test_the_command_writes_a_model_of_the_training_pairs(tmp_path):
    recipe = toy_recipe(tmp_path)
    settings = ("--data.training", "toy.tsv", "--data.num_validation", "20")
    settings += ("--data.target_notation.split", "characters", "--output", "n.safetensors")
    done = transduce("graphones", "pairs-transducer", *settings, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found, expected = load_joint_ngram(tmp_path / "n.safetensors"), learn_joint_ngram(recipe.data)
    grams = len(expected.ngram.automaton.symbols)
    said = f"4 graphones and {grams:,} n-grams of them are in n.safetensors\n"
    assert done.stdout == said
    assert found.signature.difference(expected.signature) is None
    for table, same in zip(found.ngram.automaton, expected.ngram.automaton, strict=True):
        np.testing.assert_array_equal(table, same)


def test_the_command_replaces_its_own_file_and_names_pairs_that_it_leaves_out(tmp_path):
    toy_recipe(tmp_path)
    with open(tmp_path / "toy.tsv", "a") as file:
        file.write("a\tABCD\n")
    settings = ["graphones", "pairs-transducer", "--data.training", "toy.tsv"]
    settings += ["--data.target_notation.split", "characters", "--output", "n.safetensors"]
    for _ in range(2):
        done = transduce(*settings, folder=tmp_path)
        assert done.returncode == 0 and done.stderr.startswith("pairs left out: 1; the first: ")
        assert "toy.tsv, line 121: 4 labels are too many for 1 source symbols" in done.stderr
    write_tensors(tmp_path / "n.safetensors", {}, {}, "a model")
    before = (tmp_path / "n.safetensors").read_bytes()
    done = transduce(*settings, folder=tmp_path)
    assert done.returncode == 1 and "is there and is not a joint n-gram model" in done.stderr
    assert (tmp_path / "n.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--output", "no/n.safetensors"], 1, "--output no/n.safetensors: there is no folder no"),
        (["--output", "model.bin"], 1, "--output model.bin: give a name that ends in .safetensors"),
        (["--data.corpus", "nothing"], 2, "data.corpus"),
        (["--data.trianing", "toy.tsv"], 2, "--data.training"),
        (["--data.training", "nowhere.tsv"], 1, "nowhere.tsv"),
        (
            ["--data.corpus", "manifest", "--data.training", "sounds.jsonl"],
            1,
            "has no texts as",
        ),
        (["--data.training"], 2, "--data.training needs a value after it"),
    ],
)
def test_the_command_says_in_one_sentence_what_is_wrong(tmp_path, arguments, code, said):
    write_toy(tmp_path / "toy.tsv")
    write_sounds(tmp_path, count=6)
    settings = ["--data.num_validation", "2", "--data.features.sample_rate", "8000"]
    settings += ["--data.target_notation.split", "characters"]
    if "--data.training" not in arguments:
        settings += ["--data.training", "toy.tsv"]
    done = transduce("graphones", "pairs-transducer", *settings, *arguments, folder=tmp_path)
    assert done.returncode == code, done
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert not (tmp_path / "graphones.safetensors").exists()


def test_no_validation_set_is_needed_and_one_that_is_held_out_is_not_learnt(tmp_path):
    data = replace(toy_recipe(tmp_path).data, num_validation=0)
    everything = learn_joint_ngram(data)
    (tmp_path / "dev.tsv").write_text("ab\t?\n")  # a label that the training set lacks
    same = learn_joint_ngram(replace(data, validation=tmp_path / "dev.tsv"))
    without = learn_joint_ngram(replace(data, num_validation=60))
    first, *others = (len(model.ngram.automaton.symbols) for model in (everything, same, without))
    assert first == others[0] > others[1]


def test_graphones_of_sound_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"^the training set has no texts as inputs; give text"):
        learn_joint_ngram(sound_recipe(tmp_path).data)
