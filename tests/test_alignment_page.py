"""Align a known text with the explorer's page in a real browser."""

import json
import re
from itertools import pairwise

import pytest
import torch
from explored import (
    CHROMIUM,
    launched_browser,
    next_frames,
    opened_pages,
    serving,
    sound,
    sound_model,
    sound_pairs,
    wav_bytes,
)
from playwright.sync_api import expect

from transduce.alignment.align import Aligner, Task
from transduce.alignment.boundaries import Boundaries, Edge
from transduce.alignment.result import AlignedPhone, AlignedWord, Alignment
from transduce.audio.sound import read_wave
from transduce.data.pairs import Audio
from transduce.model.model import load
from transduce.web import explorer as exploring
from transduce.web.explorer import Explorer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium"),
]
SECONDS = 2.0
TEXT = 'two "cats" zebra lost'
MODEL = "english-phone-recogniser"


def word(text, *phones, log_ratio=0.0, heard=()):
    """Return a word of phones (symbol, start, end), each with bounds of 20 ms on both sides."""

    def edge(time):
        return Edge(time, time - 0.02, time + 0.02)

    aligned = (AlignedPhone(s, Boundaries(edge(a), edge(b), 0.9)) for s, a, b in phones)
    return AlignedWord(text, tuple(aligned), log_ratio, heard)


# Two words without a pause between them, one after a pause that does not fit, and one that was not
# found in the sound.
PREPARED = Alignment(
    "tone.wav",
    SECONDS,
    (
        word("two", ("T", 0.2, 0.3), ("UW", 0.3, 0.5)),
        word('"cats', ("K", 0.5, 0.6), ("AE", 0.6, 0.75), ("T", 0.75, 0.85), ("S", 0.85, 1.0)),
        word("zebra", ("Z", 1.3, 1.5), ("IY", 1.5, 1.8), log_ratio=-99.0, heard=("S", "OW")),
        word("lost"),
    ),
)
EDGES = [0.2, 0.3, 0.5, 0.6, 0.75, 0.85, 1.0, 1.3, 1.5, 1.8]


class PreparedAligner(Aligner):
    """An aligner that knows one alignment, and computes others."""

    def align_many(self, tasks):
        for task in tasks:
            yield from [PREPARED] if task.text == TEXT else super().align_many([task])


@pytest.fixture(scope="module")
def model():
    return load(MODEL)


@pytest.fixture(scope="module")
def address(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exploring, "Aligner", PreparedAligner)
        with serving(Explorer(model, (), MODEL)) as address:
            yield address


@pytest.fixture(scope="module")
def browser():
    with launched_browser() as browser:
        yield browser


@pytest.fixture
def new_page(browser):
    with opened_pages(browser) as make:

        def make_and_wait(*arguments, **options):
            page = make(*arguments, **options)
            expect(page.locator("#model")).to_contain_text("symbols")
            return page

        yield make_and_wait


def send(page, samples, name="tone.wav"):
    content = wav_bytes(samples)
    page.set_input_files("#file", {"name": name, "mimeType": "audio/wav", "buffer": content})
    expect(page.locator("#alignment-name")).to_have_text(name)


def align(page, text=TEXT):
    page.fill("#spoken", text)
    page.click("text=Align >> nth=-1")
    expect(page.locator("#aligned")).to_be_visible()


@pytest.fixture
def page(new_page, address):
    """A page that shows the prepared alignment."""
    page = new_page(address)
    send(page, sound(SECONDS))
    align(page)
    return page


def spans(page, kind):
    """Return the words or the phones on the screen, with their start and end in seconds."""
    found = page.locator(f"#tiers .{kind}").evaluate_all(
        """(blocks, seconds) => blocks.map((block) => {
            const box = document.getElementById("tiers-content").getBoundingClientRect();
            const { left, right } = block.getBoundingClientRect();
            const time = (x) => (seconds * (x - box.left)) / box.width;
            return [block.querySelector("span").textContent, time(left), time(right)];
        })""",
        SECONDS,
    )
    return [(text, round(start, 3), round(end, 3)) for text, start, end in found]


def edge(page, time):
    """Return the handle of the boundary that is at a time."""
    return page.locator(f'.edge[aria-valuenow="{time:.3f}"]')


def edges(page):
    times = page.locator(".edge").evaluate_all("all => all.map(e => e.ariaValueNow)")
    return [float(time) for time in times]


def num_bands(page):
    return page.locator(".band:not([hidden])").count()


def drag(page, handle, seconds):
    """Drag a boundary with the mouse by so many seconds."""
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    per_second = page.locator("#tiers-content").bounding_box()["width"] / SECONDS
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 0.5 * seconds * per_second, y, steps=3)
    page.mouse.move(x + seconds * per_second, y)
    page.mouse.up()


def saved(page):
    with page.expect_download() as download:
        page.click("#save-textgrid")
    assert download.value.suggested_filename == "tone.TextGrid"
    return download.value.path().read_text("utf-8")


def read_textgrid(text):
    """Return the intervals of each tier of a TextGrid; check that they cover it without gaps."""
    end = float(re.search(r"^xmax = (\S+)$", text, re.M)[1])
    tiers = {}
    for part in re.split(r"item \[\d+\]:", text)[1:]:
        found = re.findall(r'xmin = (\S+)\s+xmax = (\S+)\s+text = "((?:[^"]|"")*)"', part)
        intervals = [(float(a), float(b), mark.replace('""', '"')) for a, b, mark in found]
        assert int(re.search(r"intervals: size = (\d+)", part)[1]) == len(intervals)
        assert all(before[1] == after[0] for before, after in pairwise(intervals))
        assert intervals[0][0] == 0 and intervals[-1][1] == end
        assert all(low < high for low, high, _ in intervals)
        tiers[re.search(r'name = "(\w+)"', part)[1]] = intervals
    return tiers


def test_words_and_phones_are_drawn_where_they_are_said(page):
    words = [("two", 0.2, 0.5), ('"cats', 0.5, 1.0), ("zebra", 1.3, 1.8)]
    assert spans(page, "word") == words
    expected = [
        (phone.symbol, phone.interval.start.time, phone.interval.end.time)
        for phone in PREPARED.phones
    ]
    assert spans(page, "phone") == expected
    assert edges(page) == EDGES
    expect(page.locator(".edge.of-word")).to_have_count(5)  # in both tiers
    assert num_bands(page) == len(EDGES)
    content = page.locator("#tiers-content").bounding_box()
    band = page.locator(".band").first.bounding_box()
    assert band["width"] / content["width"] == pytest.approx(0.04 / SECONDS, rel=0.01)
    assert (band["x"] - content["x"]) / content["width"] == pytest.approx(0.18 / SECONDS, rel=0.01)


def test_a_word_that_does_not_fit_says_what_was_heard(page):
    misfit = page.locator(".misfit")
    expect(misfit).to_have_count(1)
    expect(misfit).to_have_text("zebraheard S OW")
    assert "does not fit: heard S OW" in misfit.get_attribute("title")
    colours = page.locator(".word").evaluate_all("all => all.map(w => getComputedStyle(w).color)")
    assert colours[0] == colours[1] != colours[2]
    expect(page.locator("#fits")).to_have_text(
        "1 of 4 words does not fit: zebra (heard S OW). Not found in the sound: lost."
    )


def columns(page, x):
    """Return the pixels of some columns of the spectrogram on the screen."""
    next_frames(page)
    return page.locator("#tiers canvas").evaluate(
        "(canvas, x) => [...canvas.getContext('2d').getImageData(x, 0, 50, 120).data]", x
    )


def test_the_spectrogram_is_below_the_tiers_and_follows_zoom_and_scroll(page):
    def picture():
        next_frames(page)
        return page.locator("#tiers canvas").evaluate("canvas => canvas.toDataURL()")

    pictures = [picture()]
    for action in ("#closer", "#closer", "#closer", "#farther", "#whole"):
        page.click(action)
        pictures.append(picture())
        assert spans(page, "word")[0] == ("two", 0.2, 0.5)
    assert pictures[0] == pictures[-1]  # two seconds fit
    assert pictures[2] == pictures[-2] and len({*pictures}) == 4
    for _ in range(3):
        page.click("#closer")
    page.locator("#tiers").evaluate("tiers => tiers.scrollLeft = 40")
    before = columns(page, 340)
    page.locator("#tiers").evaluate("tiers => tiers.scrollLeft = 340")
    assert columns(page, 40) == before != columns(page, 340)
    canvas, tiers = (page.locator(one).bounding_box() for one in ("#tiers canvas", "#tiers"))
    assert canvas["x"] == tiers["x"] + 1  # within the border


def test_a_click_plays_a_word_or_a_phone(page):
    # The stretches last a hundred times as long, so that none ends before it is looked at.
    page.evaluate(
        """() => {
            window.played = [];
            const { prototype } = AudioBufferSourceNode;
            const start = prototype.start;
            prototype.start = function (...times) {
                played.push([this.buffer.duration, ...times]);
                this.playbackRate.value = 0.01;
                window.node = this;
                start.apply(this, times);
            };
        }"""
    )

    def started(number):
        page.wait_for_function("number => played.length === number", arg=number)

    cats = page.locator(".word").nth(1)
    cats.evaluate("word => { word.click(); word.click(); }")  # the second before the first begins
    started(1)
    cats.click()  # starts again
    started(2)
    page.evaluate("new Promise((ended) => setTimeout(ended, 100))")  # the end of the first is told
    expect(cats).to_have_class("word playing")
    page.locator(".phone").nth(7).click()  # stops the word
    started(3)
    expect(cats).to_have_class("word")
    expect(page.locator(".playing")).to_have_count(1)
    page.evaluate("() => { node.playbackRate.value = 1; }")
    expect(page.locator(".playing")).to_have_count(0)  # at the end
    edge(page, 0.3).focus()
    page.keyboard.press("Space")
    started(4)
    assert page.evaluate("played") == [
        *2 * [pytest.approx([SECONDS, 0, 0.5, 0.5])],
        pytest.approx([SECONDS, 0, 1.5, 0.3]),
        pytest.approx([SECONDS, 0, 0.2, 0.3]),
    ]


def test_a_boundary_of_two_words_is_dragged_on_both_tiers(page):
    drag(page, edge(page, 0.5), -0.1)
    [moved] = [time for time in edges(page) if time not in EDGES]
    assert moved == pytest.approx(0.4, abs=0.005)
    assert spans(page, "word")[:2] == [("two", 0.2, moved), ('"cats', moved, 1.0)]
    assert spans(page, "phone")[1:3] == [("UW", 0.3, moved), ("K", moved, 0.6)]
    assert num_bands(page) == len(EDGES) - 1
    expect(page.locator(".edge.moved")).to_have_count(1)
    expect(page.locator("#boundary")).to_have_text(f"UW | K at {moved:.3f} s (moved from 0.500 s)")


def test_a_boundary_between_phones_does_not_move_the_word(page):
    drag(page, edge(page, 0.75), 0.05)
    [moved] = [time for time in edges(page) if time not in EDGES]
    assert moved == pytest.approx(0.8, abs=0.005)
    assert spans(page, "word")[1] == ('"cats', 0.5, 1.0)
    assert spans(page, "phone")[3:5] == [("AE", 0.6, moved), ("T", moved, 0.85)]


def test_a_boundary_stops_at_its_neighbours_and_at_the_ends(page):
    drag(page, edge(page, 0.3), 1.5)  # a phone keeps 5 ms
    assert edges(page)[:3] == [0.2, 0.495, 0.5]
    drag(page, edge(page, 1.0), 0.9)  # a pause may go
    assert edges(page)[6:8] == [1.3, 1.3]
    drag(page, edge(page, 0.2), -0.6)
    assert edges(page)[0] == 0
    drag(page, edge(page, 1.8), 0.6)
    assert edges(page)[-1] == SECONDS
    tiers = read_textgrid(saved(page))
    words = [(0, 0.5, "two"), (0.5, 1.3, '"cats'), (1.3, 2.0, "zebra")]
    assert tiers["words"] == words
    assert [mark for *_, mark in tiers["phones"]] == [phone.symbol for phone in PREPARED.phones]


def test_the_keyboard_moves_a_boundary_and_escape_restores_it(page):
    page.locator("#save-textgrid").focus()
    page.keyboard.press("Tab")  # to the first boundary
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    handle = page.locator(".edge").nth(2)
    expect(handle).to_be_focused()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert edges(page)[2] == 0.515 and spans(page, "word")[0] == ("two", 0.2, 0.515)
    page.keyboard.press("ArrowLeft")
    assert edges(page)[2] == 0.51 and num_bands(page) == len(EDGES) - 1
    page.keyboard.press("Escape")
    assert edges(page) == EDGES and num_bands(page) == len(EDGES)
    expect(page.locator("#boundary")).to_have_text("UW | K at 0.500 s (90 %: 0.480 to 0.520 s)")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".edge").nth(1)).to_be_focused()
    page.keyboard.press("Tab")  # leaves the tiers: one boundary is in the order of Tab
    assert page.locator(".edge:focus").count() == 0


def test_a_click_on_a_boundary_does_not_move_it(page):
    handle = edge(page, 0.5)
    box = handle.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] + 51)
    page.mouse.up()
    expect(handle).to_be_focused()
    assert edges(page) == EDGES and num_bands(page) == len(EDGES)
    page.keyboard.press("ArrowLeft")
    assert edges(page)[2] == 0.495


def test_escape_ends_a_drag(page):
    handle = edge(page, 1.5)
    box = handle.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 30, box["y"] + 50, steps=3)
    assert edges(page) != EDGES
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + 60, box["y"] + 50, steps=3)
    page.mouse.up()
    assert edges(page) == EDGES and num_bands(page) == len(EDGES)


def test_the_textgrid_is_that_of_the_library_and_has_the_edits(page):
    assert saved(page) == PREPARED.as_textgrid() + "\n"
    edge(page, 0.5).focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    tiers = read_textgrid(saved(page))
    assert tiers["words"] == [
        (0, 0.2, ""),
        (0.2, 0.52, "two"),
        (0.52, 1.0, '"cats'),
        (1.0, 1.3, ""),
        (1.3, 1.8, "zebra"),
        (1.8, 2.0, ""),
    ]
    assert tiers["phones"][1:4] == [(0.2, 0.3, "T"), (0.3, 0.52, "UW"), (0.52, 0.6, "K")]


def test_a_text_that_cannot_be_aligned_is_refused_in_a_sentence(page):
    message = page.locator("#message.problem p")
    for text, words in (
        ("", "The text is empty; write the words that are said."),
        ("two -- cats", "'--', word 2 of the text, has no letters; write it as it is said, or"),
        ("cats " * 30, "The text has 120 phones, more than can be said in 2.0 seconds; give the"),
        ("x" * 3001, "The text has 3001 characters; at most 3000 can be aligned."),
        ("elephants", "tone.wav: the sound does not fit the text; its phones sound like"),
    ):
        page.fill("#spoken", text)
        page.press("#spoken", "Enter")
        expect(message).to_contain_text(words)
        expect(page.locator("#alignment-state")).to_have_text("")
        page.click("#message button")
    assert edges(page) == EDGES  # the page still shows the last alignment


def test_another_sound_clears_the_alignment_and_another_target_keeps_it(page):
    page.fill("#target", "T UW")
    page.click("text=Show the lattice")
    expect(page.locator("#seen")).to_contain_text("emits T UW")
    expect(page.locator("#aligned")).to_be_visible()
    send(page, sound(1.0, frequency=300.0), "other.wav")
    expect(page.locator("#aligned")).to_be_hidden()
    assert page.input_value("#spoken") == TEXT


def test_a_model_that_writes_other_symbols_has_no_alignment(new_page, tmp_path):
    with serving(Explorer(sound_model(), sound_pairs(tmp_path), "speech")) as address:
        page = new_page(address)
        expect(page.locator("#input-name")).to_have_text("tone")
        expect(page.locator("#alignment")).to_be_hidden()


@pytest.mark.parametrize("width", [400, 700, 1000, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_panel_fits_the_window(new_page, address, width, scheme):
    page = new_page(address, width, color_scheme=scheme)
    send(page, sound(SECONDS))
    align(page)
    page.locator("#alignment .about summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for one in page.locator("#alignment :is(button:not(#tiers button), p, li, textarea)").all():
        box = one.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= width)
    canvas = page.locator("#tiers canvas").bounding_box()
    tiers = page.locator("#tiers").bounding_box()
    assert canvas["width"] == pytest.approx(tiers["width"], abs=2)


def test_real_speech_is_aligned_as_by_the_library(new_page, address, model, corpora):
    folder = corpora / "librispeech-10s"
    with (folder / "dev.jsonl").open() as lines:
        spoken = json.loads(next(lines))
    wave = read_wave(Audio(folder / spoken["audio_filepath"]), 16_000, convert=True)
    page = new_page(address)
    send(page, wave[:, None].numpy(), "speech.wav")
    align(page, spoken["text"])
    [expected] = Aligner(model).align_many([Task(torch.as_tensor(wave), spoken["text"])])
    starts = [round(phone.interval.start.time, 3) for phone in expected.phones]
    assert {*starts} <= {*edges(page)} and len(starts) > 40
    words = page.locator(".word span").all_inner_texts()
    assert words == spoken["text"].split()
    expect(page.locator("#fits")).to_have_text(f"All {len(words)} words fit the sound.")
