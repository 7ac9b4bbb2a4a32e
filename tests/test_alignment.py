"""Known text in sound: pronunciations, detours, words that do not fit, stretches, forms."""

import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from commands import transduce as command
from melodies import NOTES, RATE, melody, trained_model

import transduce
from transduce import Transducer, transducer_loss
from transduce.alignment import align as align_module
from transduce.alignment import detours
from transduce.alignment.align import Aligner, Task, _assembled, check_aligns
from transduce.alignment.boundaries import Boundaries, Edge, boundaries, hmm_of
from transduce.alignment.detours import CONTEXT, Detour, LabelPath
from transduce.alignment.long import (
    FEW_PHONES,
    Stretch,
    _split_at_other_sound,
    find_stretches,
)
from transduce.alignment.phone_hmm import shipped_hmm
from transduce.alignment.pronunciations import Lexicon, Word, spelling, split_words
from transduce.alignment.result import AlignedPhone, AlignedWord, Alignment
from transduce.alignment.variants import (
    _between,
    _choice,
    _improved,
    _moves,
    _places,
    choose_pronunciations,
)
from transduce.architectures import NetworkConfig, build_network
from transduce.audio import windows
from transduce.audio.sound import read_wave
from transduce.data.dictionaries import PronouncingDictionary
from transduce.data.pairs import Audio, DataError
from transduce.decoding.cpu.prediction import packed_weights
from transduce.model.checkpoint import TrainedModel
from transduce.model.model import Model, load

K = 5


def random_lattice(seed, num_vectors, scale=3.0):
    """Return transcription vectors and a prediction network whose outputs are far from uniform."""
    torch.manual_seed(seed)
    network = Transducer(3, K, 8).prediction_network.eval()
    with torch.no_grad():
        for weights in network.parameters():
            weights.mul_(6.0)
    return scale * torch.randn(num_vectors, K + 1), network


@torch.no_grad()
def log_likelihood(vectors, network, labels):
    y = torch.tensor([labels], dtype=torch.int64)
    lengths = torch.tensor([len(vectors)]), torch.tensor([len(labels)])
    return -float(transducer_loss(vectors[None].double(), network(y).double(), y, *lengths))


# --- Detours ---


@pytest.fixture
def exact(monkeypatch):
    """Let detours keep their own prediction vectors to the end, and take any vectors."""
    monkeypatch.setattr(detours, "CONTEXT", 100)
    monkeypatch.setattr(detours, "MARGIN_VECTORS", 1000)


@pytest.mark.parametrize("seed", range(5))
def test_a_detours_gain_is_the_ratio_of_both_sequences_likelihoods(exact, seed):
    draw = random.Random(seed)
    vectors, network = random_lattice(seed, 9)
    y = tuple(draw.randint(1, K) for _ in range(6))
    path = LabelPath.of(vectors, packed_weights(network), y)
    assert path.log_likelihood == pytest.approx(log_likelihood(vectors, network, y), abs=1e-4)
    ways = [
        (0, 0, (1, 2)),
        (0, 6, (3,)),
        (2, 4, ()),
        (5, 6, (4, 4, 1)),
        (6, 6, (2,)),
        (1, 3, y[1:3]),
    ]
    asked = [Detour(*way) for way in ways]
    wanted = [
        log_likelihood(vectors, network, one.applied_to(y)) - path.log_likelihood for one in asked
    ]
    assert path.gains(asked) == pytest.approx(wanted, abs=1e-4)


def test_a_detour_may_join_y_before_the_network_has_quite_forgotten_it():
    vectors, network = random_lattice(1, 60)
    y = tuple(random.Random(0).randint(1, K) for _ in range(20))
    path = LabelPath.of(vectors, packed_weights(network), y)
    asked = [Detour(i, i + 2, (1 + i % K, 3)) for i in range(0, 15, 3)]
    wanted = [
        log_likelihood(vectors, network, one.applied_to(y)) - path.log_likelihood for one in asked
    ]
    assert path.gains(asked) == pytest.approx(wanted, abs=0.1)


def test_extreme_numbers_do_not_lose_a_likelihood(exact):
    vectors, network = random_lattice(0, 7, scale=300.0)
    path = LabelPath.of(vectors, packed_weights(network), (1, 2, 3))
    assert path.log_likelihood == pytest.approx(
        log_likelihood(vectors, network, (1, 2, 3)), rel=1e-5
    )
    assert np.isfinite(path.gains([Detour(1, 2, (4, 5))])).all()


# --- Pronunciations ---


def likelihoods_of_all_ways(vectors, network, words):
    """Return ln Pr(y|x) of every choice of pronunciations."""
    return {
        way: log_likelihood(
            vectors, network, sum((w[v] for w, v in zip(words, way, strict=True)), ())
        )
        for way in itertools.product(*(range(len(word)) for word in words))
    }


def test_the_chosen_pronunciations_are_the_most_probable_ones(exact):
    num_best = 0
    for seed in range(12):
        draw = random.Random(seed)
        vectors, network = random_lattice(seed, 14)
        words = [
            list({tuple(draw.randint(1, K) for _ in range(draw.randint(1, 3))): 0
                  for _ in range(draw.randint(1, 3))})
            for _ in range(4)
        ]  # fmt: skip
        chosen = choose_pronunciations(vectors, packed_weights(network), words)
        labels = chosen.path.labels
        assert [labels[slice(*span)] for span in chosen.spans] == [
            word[v] for word, v in zip(words, chosen.variants, strict=True)
        ]
        ways = likelihoods_of_all_ways(vectors, network, words)
        found = ways[chosen.variants]
        for way, other in ways.items():  # no other pronunciation of one word, or of two, is better
            changed = [i for i in range(4) if way[i] != chosen.variants[i]]
            if len(changed) == 1 or (len(changed) == 2 and changed[1] == changed[0] + 1):
                assert other <= found + 1e-4
        num_best += found >= max(ways.values()) - 1e-4
    assert num_best >= 11  # even in these lattices of noise


class OneChange:
    """A path of ones: a two makes it more probable, the later the more, and several less."""

    def __init__(self, labels=()):
        self.labels = labels
        places = [place for place, label in enumerate(labels) if label == 2]
        self.log_likelihood = 1.0 + places[0] if len(places) == 1 else -float(len(places))

    def with_labels(self, labels):
        return OneChange(labels)

    def gains(self, detours):
        changed = [OneChange(one.applied_to(self.labels)) for one in detours]
        return torch.tensor([one.log_likelihood - self.log_likelihood for one in changed])


def test_of_changes_that_are_worse_together_the_best_is_made():
    ones = (1,) * 3 * CONTEXT
    words = [[ones, (2, *ones)] for _ in range(5)]
    first = _choice(words, [0] * 5, OneChange())
    better = _improved(words, first, _moves(words, first.variants, 1, set(range(5))))
    assert better.variants == (0, 0, 0, 0, 1)
    assert _improved(words, better, _moves(words, better.variants, 1, {0, 1, 2, 3})) is None


# --- Text ---


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "cmudict.dict"
    path.write_text("the DH AH0\nthe(2) DH IY0\nthe(3) DH AH1\ncat K AE1 T # an animal\n")
    return PronouncingDictionary(path)


def test_words_have_all_distinct_pronunciations_without_stress(dictionary):
    the, cat = Lexicon(dictionary).words("The cat.")
    assert (the.text, cat.text) == ("The", "cat")
    assert the.pronunciations == (("DH", "AH"), ("DH", "IY"))
    assert cat.pronunciations == (("K", "AE", "T"),)


def test_a_word_that_the_dictionary_lacks_is_spelt_by_the_model(dictionary):
    _, odd = Lexicon(dictionary).words("the transducer")
    assert ("T", "R", "AE", "N", "S", "D", "UW", "S", "ER") in odd.pronunciations
    assert len(odd.pronunciations) > 1
    assert ("DH", "AH") in Lexicon().words("the")[0].pronunciations


def test_text_is_split_at_spaces_and_dashes_and_loses_its_punctuation():
    words = split_words("“Well,” she said—twenty-two  boys' 'tis goin' 'quoted'!")
    assert words == ["Well", "she", "said", "twenty", "two", "boys'", "'tis", "goin'", "quoted"]
    assert spelling("Café\N{RIGHT SINGLE QUOTATION MARK}s") == "cafe's"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("  ", "the text is empty"),
        ("one 23 four", "'23', word 2 of the text, has a digit; write numbers as words"),
        ("one -- two", "'--', word 2 of the text, has no letters"),
        ("the 3rd", "'3rd', word 2"),
    ],
)
def test_text_that_cannot_be_said_is_refused_with_its_word(text, problem):
    with pytest.raises(DataError, match=problem):
        split_words(text)


# --- Stretches ---


def noisy(labels, draw, share=0.2):
    """Return the labels with errors, and the number of the label that each stands for."""
    heard, origin = [], []
    for i, label in enumerate(labels):
        kind = draw.random()
        if kind < share / 3:
            continue
        heard.append(draw.randint(1, 39) if kind < 2 * share / 3 else label)
        origin.append(i)
        if kind > 1 - share / 3:
            heard.append(draw.randint(1, 39))
            origin.append(i)
    return tuple(heard), origin


def story(seed, number=600):
    draw = random.Random(seed)
    return [tuple(draw.randint(1, 39) for _ in range(draw.randint(2, 6))) for _ in range(number)]


def heard_story(words, seed, step=5):
    """Return what is heard of words that follow each other, its vectors, and where words begin."""
    labels = [label for word in words for label in word]
    heard, origin = noisy(labels, random.Random(seed))
    frames = [step * i + 2 for i in origin]
    starts = [step * s for s in itertools.accumulate(map(len, words), initial=0)]
    return heard, frames, starts


def check_stretches(found):
    for one, two in itertools.pairwise(found):
        assert one.last_word <= two.first_word and one.last_vector <= two.first_vector
    for one in found:
        assert one.first_word < one.last_word and one.first_vector < one.last_vector


@pytest.mark.parametrize("seed", range(3))
def test_all_words_of_a_long_text_are_in_short_stretches_around_them(seed):
    words = story(seed)
    heard, frames, starts = heard_story(words, seed)
    found = find_stretches(words, heard, frames, starts[-1])
    check_stretches(found)
    assert found[0].first_word == found[0].first_vector == 0
    assert (found[-1].last_word, found[-1].last_vector) == (len(words), starts[-1])
    for before, after in itertools.pairwise(found):
        assert before.last_word == after.first_word
        assert abs(after.first_vector - starts[after.first_word]) <= 10
    assert max(one.last_vector - one.first_vector for one in found) <= 1500


def test_words_that_are_not_in_the_sound_are_left_out():
    words = story(0)
    said = words[:200] + words[260:]
    heard, frames, starts = heard_story(said, 0)
    found = find_stretches(words, heard, frames, starts[-1])
    check_stretches(found)
    aligned = {w for one in found for w in range(one.first_word, one.last_word)}
    assert len(aligned & set(range(203, 257))) == 0
    assert len(aligned) >= len(said) - 8


def test_sound_that_is_not_in_the_text_is_left_out():
    said = story(0)
    words = said[:200] + said[260:]
    heard, frames, starts = heard_story(said, 0)
    found = find_stretches(words, heard, frames, starts[-1])
    check_stretches(found)
    assert sum(one.last_word - one.first_word for one in found) >= len(words) - 10
    middle = range(starts[210], starts[250])
    assert not any(set(range(one.first_vector, one.last_vector)) & set(middle) for one in found)


def test_a_text_that_was_not_said_has_few_stretches():
    heard, frames, starts = heard_story(story(1), 0)
    found = find_stretches(story(2), heard, frames, starts[-1])
    assert sum(one.last_word - one.first_word for one in found) < 60


# --- Sounds ---


@pytest.fixture(scope="module")
def singer():
    """Return a model that names the notes of melodies."""
    return trained_model()


def song(notes, seconds=0.15, pause=0.08):
    """Return samples of notes, and the interval of each."""
    parts, intervals, time = [torch.zeros(RATE // 5)], [], 0.2
    for note in notes:
        length = torch.arange(round(seconds * RATE)) / RATE
        parts += [0.3 * torch.sin(2 * torch.pi * NOTES[note] * length)]
        parts += [torch.zeros(round(pause * RATE))]
        intervals.append((time, time + seconds))
        time += seconds + pause
    wave = torch.cat(parts)
    return wave + 0.003 * torch.randn(
        len(wave), generator=torch.Generator().manual_seed(0)
    ), intervals


@pytest.mark.slow
def test_a_note_that_was_not_played_is_told_from_what_was_heard(singer):
    wave, _ = song("ABCDE")
    found = transduce.align(singer, wave, phones="A B E D E")
    wrong = min(found.words, key=lambda word: word.log_ratio)
    assert wrong is found.words[2] and wrong in found.misfits
    assert wrong.heard == ("C",)
    assert found.words[0].fits and found.words[4].fits


def test_a_note_that_is_missing_in_the_sound_is_told_from_nothing(singer):
    wave, _ = song("ABDE")
    found = transduce.align(singer, wave, phones="A B C D E")
    assert min(found.words, key=lambda word: word.log_ratio) is found.words[2]
    assert found.words[2].heard == () and found.words[2].log_ratio < -3


def test_notes_are_aligned_where_they_are_played(singer):
    notes = list("ABCDEABDCE")
    wave, intervals = song(notes)
    found = transduce.align(singer, wave, phones=notes)
    assert [phone.symbol for phone in found.phones] == notes
    assert not found.misfits
    for phone, (start, end) in zip(found.phones, intervals, strict=True):
        middle = (phone.interval.start.time + phone.interval.end.time) / 2
        assert start - 0.1 < middle < end + 0.1
        for edge in phone.interval[:2]:
            assert edge.earliest <= edge.time <= edge.latest
    for one, two in itertools.pairwise(found.phones):
        assert one.interval.end.time <= two.interval.start.time


def starts(alignment):
    return np.array([phone.interval.start.time for phone in alignment.phones])


def test_a_passage_that_was_not_played_is_left_out_and_the_rest_unharmed(singer, monkeypatch):
    # The singer has learnt melodies of a second, and misses most notes of a window of 35 seconds.
    monkeypatch.setattr(windows, "LONGEST", 3.0)
    monkeypatch.setattr(windows, "SEARCHED", 2.0)
    monkeypatch.setattr(align_module, "SHORT", 5.0)
    wave = torch.cat([melody(seed)[0] for seed in range(40)])
    notes = singer(wave).symbols
    assert len(notes) > 120  # of 183, beside 60 that were not played
    right = transduce.align(singer, wave, phones=notes)
    wrong = transduce.align(singer, wave, phones=[*notes[:30], *"ABCDE" * 12, *notes[30:]])
    assert sum(not word.phones for word in wrong.words[30:90]) >= 50
    kept = [*wrong.words[:20], *wrong.words[100:]]
    assert sum(bool(word.phones) for word in kept) >= 0.9 * len(kept)
    before = {round(start, 2) for start in starts(right).tolist()}
    same = [round(w.phones[0].interval.start.time, 2) in before for w in kept if w.phones]
    assert np.mean(same) > 0.8


def test_what_cannot_be_aligned_is_refused_in_a_sentence(singer):
    wave, _ = song("ABC")
    for sound, phones, problem in [
        (wave, "", "there are no phones"),
        (wave, "A X", "'X' is no phone that the model knows; it knows A B C D E"),
        (wave, "A B C D E " * 40, "more than can be said in 0.9 seconds"),
        (torch.zeros(RATE), "A B", "nothing in the sound is recognised as speech"),
        ("nowhere.wav", "A B", "nowhere.wav"),
    ]:
        with pytest.raises(DataError, match=problem):
            transduce.align(singer, sound, phones=phones)
    with pytest.raises(DataError, match="can align no text; give phones in its own symbols"):
        transduce.align(singer, wave, text="a word")
    with pytest.raises(DataError, match="either a text or phones"):
        transduce.align(singer, wave)


def test_long_samples_are_refused_by_their_name(singer, monkeypatch):
    monkeypatch.setattr(align_module, "SHORT", 0.5)
    tasks = [Task(torch.zeros(RATE), phones="A B", name="lecture")]
    [error] = Aligner(singer).align_many(tasks)
    assert "lecture: nothing in the sound is recognised as speech" in str(error)


def test_an_alignment_restores_the_mode_of_the_network(singer):
    wave, _ = song("ABC")
    for training in (True, False):
        singer.network.train(training)
        transduce.align(singer, wave, phones="A B C")
        assert singer.network.training is training


def test_phones_of_another_recording_are_refused_with_what_was_heard(singer):
    wave, _ = song("ABCDEABCDE")
    with pytest.raises(DataError, match="does not fit the text; its phones sound like A B C"):
        transduce.align(singer, wave, phones="E E D D C C B B A A")


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"network": "ctc"}, "a CTC network cannot align"),
        ({"backwards": True}, "reads backwards cannot align"),
    ],
)
def test_a_model_that_cannot_align_says_so(singer, change, problem):
    config = NetworkConfig(**{"network": "transducer", "hidden_size": 4, **change})
    signature = singer.signature
    network = build_network(config, signature.input_size, len(signature.targets))
    with pytest.raises(ValueError, match=problem):
        check_aligns(Model.of(TrainedModel(network, config, signature)))
    with pytest.raises(ValueError, match="does not take sound"):
        check_aligns(load("english-pronouncer"))


def test_the_boundary_function_gets_the_sound_of_its_stretch(singer, monkeypatch):
    wave, _ = song("ABCDE" * 8)
    asked = []

    def noted(model, heard, labels, word_starts):
        asked.append((heard.read(), heard.seconds, len(heard.vectors)))
        return boundaries(model, heard, labels, word_starts)

    monkeypatch.setattr(align_module, "boundaries", noted)
    transduce.align(singer, wave, phones=list("ABCDE" * 8))
    [(samples, seconds, _)] = asked
    assert torch.equal(samples, wave) and seconds == len(wave) / RATE
    asked.clear()
    # The singer has learnt melodies of a second, and misses notes of long windows.
    monkeypatch.setattr(windows, "LONGEST", 3.0)
    monkeypatch.setattr(windows, "SEARCHED", 2.0)
    monkeypatch.setattr(align_module, "SHORT", 1.0)
    transduce.align(singer, wave, phones=list("ABCDE" * 8))
    assert sum(len(samples) for samples, _, _ in asked) == pytest.approx(len(wave), rel=0.01)
    assert all(len(samples) == round(seconds * RATE) for samples, seconds, _ in asked)


# --- Forms ---


def phone(symbol, start, end, confidence=0.9):
    edges = (Edge(t, t - 0.01, t + 0.02) for t in (start, end))
    return AlignedPhone(symbol, Boundaries(*edges, confidence))


@pytest.fixture
def alignment():
    words = (
        AlignedWord("a", (phone("AH", 0.5, 0.6),), 0.0, ("AH",)),
        AlignedWord("cat", (phone("K", 0.6, 0.7), phone("AE", 0.7, 0.9, 0.4)), -40.0, ("B", "AE")),
        AlignedWord("lost", (), 0.0, ()),
    )
    return Alignment("a sound", 1.5, words)


def test_a_textgrid_has_words_and_phones_and_covers_the_sound(alignment):
    lines = [line.strip() for line in alignment.as_textgrid().splitlines()]
    assert [line for line in lines if line.startswith("name")] == [
        'name = "words"',
        'name = "phones"',
    ]
    texts = [line.removeprefix("text = ") for line in lines if line.startswith("text")]
    assert texts == ['""', '"a"', '"cat"', '""', '""', '"AH"', '"K"', '"AE"', '""']
    assert lines.count("xmax = 1.500000") == 5


def test_other_forms_have_a_line_for_each_word_that_was_found(alignment):
    assert alignment.as_ctm().splitlines() == [
        "a_sound 1 0.500 0.100 a 0.900",
        "a_sound 1 0.600 0.300 cat 0.600",
    ]
    assert alignment.as_srt().splitlines()[:3] == ["1", "00:00:00,500 --> 00:00:00,600", "a"]
    assert alignment.as_vtt().splitlines()[2] == "00:00:00.500 --> 00:00:00.600"
    assert alignment.as_text().splitlines() == [
        "0.500\t0.600\t0.900\t0.0\ta",
        "0.600\t0.900\t0.600\t-40.0\tcat\t? B AE",
        "-\t-\t0.000\t0.0\tlost\t? (nothing)",
    ]


def test_json_has_bounds_and_what_does_not_fit(alignment):
    found = json.loads(json.dumps(alignment.as_json()))
    a, cat, lost = found["words"]
    assert (a["fits"], cat["fits"], lost["fits"], found["fits"]) == (True, False, False, False)
    assert cat["heard"] == ["B", "AE"] and cat["log_ratio"] == -40.0
    assert cat["start_bounds"] == [0.59, 0.62] and cat["end_bounds"] == [0.89, 0.92]
    assert cat["phones"][1] == {
        "symbol": "AE",
        "start": 0.7,
        "end": 0.9,
        "start_bounds": [0.69, 0.72],
        "end_bounds": [0.89, 0.92],
        "confidence": 0.4,
    }
    assert lost["start"] is lost["end"] is lost["log_ratio"] is None and lost["phones"] == []


# --- The command ---


@pytest.fixture(scope="module")
def run(singer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("align")
    singer.save_pretrained(folder / "model")
    for name in ("one", "two"):
        soundfile.write(folder / f"{name}.wav", song("ABCDE")[0].numpy(), RATE)
    return folder


def test_the_command_prints_a_line_for_each_phone(run):
    done = command("align", "one.wav", "--phones", "A B C D E", "--model", "model", folder=run)
    assert done.returncode == 0, done.stderr
    assert [line.split("\t")[4] for line in done.stdout.splitlines()] == list("ABCDE")


def test_a_bad_line_of_a_manifest_is_reported_and_the_others_are_aligned(run):
    lines = [
        {"audio_filepath": "one.wav", "phones": "A B C D E"},
        {"audio_filepath": "two.wav", "phones": "A B X"},
        {"audio_filepath": "three.wav", "phones": "A"},
        {"audio_filepath": "two.wav"},
        {"audio_filepath": "two.wav", "phones": ["A", "B", "C", "D", "E"]},
    ]
    (run / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("align", "m.jsonl", "--model", "model", "--output", "out", "--format", "textgrid")
    done = command(*arguments, folder=run)
    assert done.returncode == 1 and done.stdout == ""
    assert sorted(path.name for path in (run / "out").iterdir()) == [
        "one.TextGrid",
        "two-2.TextGrid",
    ]
    *messages, last = done.stderr.splitlines()
    assert len(messages) == 3 and last == "transduce: wrote 2 files into out"
    messages.sort()
    assert messages[0].startswith("transduce: m.jsonl, line 2: 'X' is no phone")
    assert "line 3: there is no file" in messages[1]
    assert "line 4: there is neither text nor phones" in messages[2]
    again = command(*arguments, folder=run)
    assert "exists already" in again.stderr
    (run / "out" / "one.TextGrid").write_text("kept")
    (run / "out" / "two-2.TextGrid").unlink()
    assert command(*arguments, "--resume", folder=run).returncode == 1
    assert (run / "out" / "one.TextGrid").read_text() == "kept"
    assert (run / "out" / "two-2.TextGrid").read_text().startswith("File type")


def test_the_command_says_what_is_missing(run):
    for arguments, problem in [
        (("one.wav",), "give one of --text, --text-file and --phones"),
        (("one.wav", "--text", "a", "--phones", "A"), "give one of"),
        (("m.jsonl", "--text", "a"), "a manifest has its own texts"),
        (("one.wav", "--text-file", "nowhere.txt"), "there is no file nowhere.txt; check --text"),
        (("sounds", "--text", "a"), "sounds is a folder; give a sound, or a manifest"),
        (("one.wav", "--phones", "A", "--resume"), "go with --output"),
    ]:
        (run / "m.jsonl").touch()
        (run / "sounds").mkdir(exist_ok=True)
        done = command("align", *arguments, "--model", "model", folder=run)
        assert done.returncode == 1 and problem in done.stderr


def test_the_recogniser_aligns_a_sentence_and_flags_a_word_that_was_not_said(corpora):
    folder = corpora / "librispeech-10s"
    row = json.loads((folder / "dev.jsonl").read_text().splitlines()[0])
    sound = folder / row["audio_filepath"]
    aligner = Aligner(load("english-phone-recogniser"))
    tasks = [Task(sound, row["text"]), Task(sound, row["text"].replace("glad", "boat"))]
    right, wrong = aligner.align_many(tasks)
    assert [word.text for word in right.words] == row["text"].split()
    assert not right.misfits
    [boat] = wrong.misfits
    assert boat.text == "boat" and boat.heard == ("G", "L", "AE", "D")


def test_each_word_of_a_long_recording_is_found_in_its_own_sentence(corpora):
    folder = corpora / "librispeech-10s"
    rows = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()[:12]]
    waves = [read_wave(Audio(folder / row["audio_filepath"]), RATE, convert=True) for row in rows]
    ends = list(itertools.accumulate(len(wave) / RATE for wave in waves))
    text = " ".join(row["text"] for row in rows)
    found = transduce.align(load("english-phone-recogniser"), torch.cat(waves), text=text)
    assert ends[-1] > 60 and [word.text for word in found.words] == text.split()
    words = iter(found.words)
    for start, end, row in zip([0.0, *ends], ends, rows, strict=False):
        for word in itertools.islice(words, len(row["text"].split())):
            assert start - 0.05 <= word.phones[0].interval.start.time
            assert word.phones[-1].interval.end.time <= end + 0.05
    for one, two in itertools.pairwise(found.phones):
        assert one.interval.end.time <= two.interval.start.time + 1e-9
    assert len(found.misfits) <= 3


def test_the_hidden_markov_model_is_for_its_own_phones_and_sample_rate():
    signature = load("english-phone-recogniser").signature
    assert hmm_of(SimpleNamespace(signature=signature)) is shipped_hmm()
    for other in (
        {"targets": transduce.Alphabet(NOTES)},
        {"features": replace(signature.features, sample_rate=8000)},
        {"features": None},
    ):
        fields = {"targets": signature.targets, "features": signature.features} | other
        assert hmm_of(SimpleNamespace(signature=SimpleNamespace(**fields))) is None


def test_a_detour_is_scored_from_some_labels_before_it_to_some_after():
    margin = detours.MARGIN_LABELS
    frames = np.arange(20, 420, 20)  # of 20 labels, further apart than MARGIN_VECTORS
    path = SimpleNamespace(vectors=range(500), labels=range(20), frames=frames)
    [first], [last] = LabelPath._windows(path, np.array([9]), np.array([11]))
    assert first == frames[9 - margin] and last == frames[10 + margin] + 1
    [first], [last] = LabelPath._windows(path, np.array([1]), np.array([19]))
    assert first == 0 and last == 500  # from the start to the end


@pytest.mark.parametrize(
    "y, heard, places",
    [
        ((1, 2, 3), (1, 2, 3), [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ((1, 3), (1, 2, 3), [(0, 0), (1, 2), (3, 3)]),
        ((1, 2, 3), (1, 3), [(0, 0), (1, 1), (1, 1), (2, 2)]),
        ((1, 2, 3), (1, 4, 3), [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ((), (1, 2), [(0, 2)]),
    ],
)
def test_a_place_between_labels_has_a_first_and_a_last_place_in_what_was_heard(y, heard, places):
    assert _places(y, heard) == places


def test_cuts_with_a_margin_lie_on_both_sides_of_those_without():
    heard, places = (1, 2, 3, 4), [(place, place) for place in range(5)]
    assert list(_between(heard, places, (1, 3))) == [(2, 3)]
    cuts = {heard[start:end] for start in (0, 1, 2) for end in (2, 3, 4)}
    assert set(_between(heard, places, (1, 3), margin=1)) == cuts


def test_a_long_sound_in_which_few_words_are_found_is_refused(singer, monkeypatch):
    wave, _ = song("ABCDEABCDE")
    monkeypatch.setattr(align_module, "SHORT", 0.5)
    last = SimpleNamespace(first_word=9, last_word=10)
    monkeypatch.setattr(align_module, "find_stretches", lambda *_: [last])
    with pytest.raises(DataError, match="the sound does not fit the text"):
        transduce.align(singer, wave, phones=list("ABCDEABCDE"))


@pytest.mark.parametrize(
    "first_vector, gap, end",
    [(10, 0.05, 0.55), (10, 0.2, 0.5), (11, 0.05, 0.5)],
    ids=["no pause between them", "a pause", "vectors between them"],
)
def test_a_stretch_ends_where_the_next_one_starts(first_vector, gap, end):
    def one(text, start, end):
        edges = (Edge(time, time, time) for time in (start, end))
        return AlignedWord(text, (AlignedPhone("A", Boundaries(*edges, 1.0)),), 0.0, ())

    words = [Word("a", ()), Word("b", ())]
    stretches = [Stretch(0, 1, 0, 10), Stretch(1, 2, first_vector, 20)]
    aligned = [[one("a", 0.2, 0.5)], [one("b", 0.5 + gap, 0.9)]]
    first, second = _assembled(words, stretches, aligned)
    assert first.phones[0].interval.end.time == end
    assert second == aligned[1][0]


@pytest.mark.parametrize(
    "number, islands", [(FEW_PHONES, [(0, 2)]), (FEW_PHONES + 1, [(0, 1), (1, 2)])]
)
def test_words_with_more_than_a_few_other_phones_between_them_are_cut_apart(number, islands):
    heard = {0: (0, 2), 1: (3 + number, 5 + number)}  # the first and last phone of each word
    match = SimpleNamespace(starts=[0, 3, 6], heard_in=lambda first, last: heard[first])
    assert list(_split_at_other_sound(match, (0, 2))) == islands
