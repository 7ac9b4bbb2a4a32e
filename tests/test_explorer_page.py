"""Use the page of the explorer in a real browser."""

import json
import re
import threading
from collections import Counter
from itertools import pairwise
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from explored import (
    CHARACTERS,
    CHROMIUM,
    SPACES,
    launched_browser,
    opened_pages,
    serving,
    settled,
    sharp_network,
    sound,
    sound_model,
    sound_pairs,
    text_model,
    text_pairs,
    watch_playback,
    wav_bytes,
    words_of,
)
from playwright.sync_api import expect

from transduce.alphabet import Alphabet
from transduce.analysis import output_bars, sensitivity, view_lattice
from transduce.analysis.colours import DECADES, heat_colours
from transduce.architectures import NetworkConfig
from transduce.decoding import beam_search_steps
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import Signature
from transduce.web import explorer as exploring
from transduce.web.explorer import Explorer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    explorer = Explorer(text_model(), text_pairs(tmp_path_factory.mktemp("text")), "letters")
    with serving(explorer) as address:
        yield explorer, address


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    explorer = Explorer(sound_model(), sound_pairs(tmp_path_factory.mktemp("sound")), "speech")
    with serving(explorer) as address:
        yield explorer, address


@pytest.fixture(scope="module")
def browser():
    with launched_browser() as browser:
        yield browser


@pytest.fixture
def new_page(browser):
    with opened_pages(browser) as make:
        yield make


def pick(page, name):
    page.fill("#find", name)
    # A click while the list is replaced would be lost.
    expect(page.locator("#examples strong").first).to_contain_text(name)
    page.locator("#examples strong", has_text=name).first.click()
    expect(page.locator("body:not(.busy) #input-name")).to_have_text(name)
    settled(page)


def node(page):
    state = page.locator("#figure").evaluate("canvas => ({...canvas.dataset})")
    return int(state["t"]), int(state["u"])


def place(page, explorer, T, U, t, u):
    """Return the position of a node on the screen when the whole lattice is visible."""
    x, y = page.evaluate(
        """async ([T, U, t, u, isText]) => {
            const { layout } = await import("./figure.js");
            const canvas = document.getElementById("figure");
            canvas.scrollIntoView({ block: "start" });
            const { heat } = layout(
                canvas.clientWidth, { rows: U + 1, source: isText ? [] : null },
                window.innerHeight);
            const { left, top } = canvas.getBoundingClientRect();
            const y = heat.y + heat.h * (1 - (u + 0.5) / (U + 1));
            return [left + heat.x + (heat.w * (t + 0.5)) / T, top + y];
        }""",
        [T, U, t, u, explorer.model.signature.sources is not None],
    )
    return x, y


def table(page):
    """Return the three probabilities of each output at the crosshair."""
    rows = page.locator("#number-rows tr").evaluate_all(
        """rows => rows.map(row => [row.querySelector("th").textContent,
            ...[...row.querySelectorAll("td")].map(cell => Number(cell.dataset.value))])"""
    )
    return {symbol: values for symbol, *values in rows}


def assert_bars(page, explorer, view):
    outputs = ["∅", *explorer.model.signature.targets.symbols]
    bars = output_bars(view, *node(page), num=len(outputs))
    shown = table(page)
    assert len(shown) == len(outputs)
    for column, graph in enumerate(bars):
        for label, probability in graph:
            assert shown[outputs[label]][column] == pytest.approx(probability, abs=1e-6)


def drawn(page):
    """Wait until the page has drawn what has happened so far."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def address_of(page):
    """Return the parts of the page's address, once the page has written that of its view."""
    drawn(page)  # Chromium delivers moves with a frame; what they change is unwritten after it
    page.wait_for_function("() => !('unwritten' in document.getElementById('figure').dataset)")
    return parse_qs(page.evaluate("location.hash.slice(1)"), keep_blank_values=True)


def rows_of(words, wanted):
    """Return the wanted words by line, each line from left to right."""
    rows = {}
    for word in words:
        if wanted(word[0]):
            rows.setdefault(word[3], []).append(word)
    return [sorted(row, key=lambda word: word[1]) for row in rows.values()]


def apart(row):
    return all(right <= left for (_, _, right, _), (_, left, _, _) in pairwise(row))


def picture(page):
    return page.locator("#figure").evaluate("canvas => canvas.toDataURL()")


# --- Text ---------------------------------------------------------------------------------------


def test_choosing_an_example_shows_its_outputs_and_lattice(text, new_page):
    explorer, address = text
    page = new_page(address)
    expect(page.locator("#examples strong")).to_have_count(len(explorer.pairs))
    page.fill("#find", "bb")
    expect(page.locator("#examples strong")).to_have_text(["abba", "cabbac", "bb"])
    pick(page, "cabbac")
    found = explorer.open_example(4)["hypotheses"]
    targets = page.locator("#hypotheses button").evaluate_all("all => all.map(b => b.title)")
    assert targets == [" ".join(h["symbols"]) or "(empty)" for h in found]
    assert page.input_value("#target") == " ".join(found[0]["symbols"])
    other = page.locator("#hypotheses button").nth(1)
    other.click()
    expect(other).to_have_attribute("aria-pressed", "true")
    assert page.input_value("#target") == " ".join(found[1]["symbols"])
    page.click("#reference")
    expect(page.locator("#target-note")).to_have_text("(the reference)")
    assert page.input_value("#target") == "C A B B A C"


def test_the_page_opens_on_an_example_and_says_what_it_shows(text, new_page):
    page = new_page(text[1])
    settled(page)
    expect(page.locator("#input-name")).to_have_text("bacca")
    expect(page.locator("#nothing")).to_be_hidden()
    expect(page.locator("#find")).to_have_attribute("placeholder", "Search names and targets")
    target = page.input_value("#target") or "nothing"
    expect(page.locator("#seen")).to_contain_text(
        f"Reading bacca from left to right, the network emits {target} from bottom to top."
    )
    likelihood = re.escape(page.locator("#hypotheses .number").first.text_content())
    expect(page.locator("#seen")).to_contain_text(re.compile(rf"y\|x\) = {likelihood} \(Eq. 17"))
    page.click("text=forward >> nth=0")
    expect(page.locator("#seen")).to_contain_text("Bright nodes are easy to reach.")
    page.click("text=backward")
    expect(page.locator("#seen")).to_contain_text("From bright nodes the end is easy to reach.")
    legend = page.locator("#legend").inner_text()
    for words in ("most probable alignment", "when a label is emitted", "previous labels"):
        assert words in legend
    written = {word for word, *_ in words_of(page)}
    assert {"ln β(t,u), Eq. 18", "Pr(k|t,u), Eq. 13"} <= written


def test_every_panel_says_what_it_is(text, new_page):
    page = new_page(text[1])
    settled(page)
    for name in ("input", "outputs", "lattice", "search"):
        section = page.locator(f"section[aria-labelledby={name}-title]")
        section.locator(".about summary").click()
        expect(section.locator(".about p, .about dl").first).to_be_visible()
        assert "Eq" in (words := section.locator(".about").inner_text()) or "Algorithm 1" in words
    panels = page.locator("#lattice .about dt:visible").all_inner_texts()
    assert panels == [
        "The map",
        "The strips below the map",
        "The input",
        "The sensitivities",
        "The bar graphs",
    ]


def test_a_model_of_letters_without_examples_opens_on_a_word(new_page):
    letters = sorted(set(exploring.FIRST_WORD))
    signature = Signature(Alphabet("AB"), SPACES, Alphabet(letters), CHARACTERS)
    config = NetworkConfig(hidden_size=8, prediction_size=8)
    network = sharp_network(config, len(letters), 2)
    with serving(Explorer(TrainedModel(network, config, signature), (), "word")) as address:
        page = new_page(address)
        settled(page)
        expect(page.locator("#input-name")).to_have_text(exploring.FIRST_WORD)
        assert page.input_value("#text") == exploring.FIRST_WORD


def test_outputs_show_what_differs_from_the_best(text, new_page):
    page = new_page(text[1])
    found = page.evaluate(
        """async () => {
            const { differences, shortened } = await import("./differences.js");
            const between = (one, other) => shortened(differences(one.split(" "), other.split(" ")))
                .map(([kind, symbol]) => ({ in: "+", out: "-", same: "", gap: "" })[kind] + symbol);
            return [
                between("a b c d e f g h", "a b c x e f g h"),
                between("a b c d e f g h", "b c d e f g h i").join(" "),
                between("a", "a b").join(" "),
            ];
        }"""
    )
    assert found[0] == ["…", "b", "c", "-d", "+x", "e", "f", "…"]
    assert found[1:] == ["-a b c … g h +i", "a +b"]
    settled(page)
    hypotheses = text[0].open_example(2)["hypotheses"]
    best = hypotheses[0]["symbols"]
    rows = page.locator("#hypotheses button").all()
    expect(rows[0].locator("ins, del")).to_have_count(0)
    for row, hypothesis in zip(rows[1:], hypotheses[1:], strict=True):
        changed = row.locator("ins").all_inner_texts(), row.locator("del").all_inner_texts()
        symbols = hypothesis["symbols"]
        assert len(symbols) - len(changed[0]) == len(best) - len(changed[1])
        assert changed != ([], [])
        assert Counter(symbols) - Counter(changed[0]) == Counter(best) - Counter(changed[1])


def test_the_page_says_how_to_start(text, new_page):
    explorer, _ = text
    with serving(Explorer(explorer.model, [], "letters")) as without:
        page = new_page(without)
        expect(page.locator("#nothing")).to_have_text("Type a word.")
        expect(page.locator("#find")).to_be_hidden()
    with serving(Explorer(sound_model(), [], "speech")) as without:
        page = new_page(without)
        expect(page.locator("#nothing")).to_have_text("Choose or record a sound.")


def test_the_crosshair_follows_the_mouse_and_the_bars_match_the_library(text, new_page):
    explorer, address = text
    page = new_page(address)
    pick(page, "cabbac")
    page.click("#reference")
    expect(page.locator("#target-note")).to_have_text("(the reference)")
    settled(page)
    labels = explorer.model.signature.targets.encode("CABBAC")
    view = view_lattice(explorer.model, explorer.model.signature.example("cabbac").frames, labels)
    for t, u in ((0, 0), (5, 6), (2, 3), (4, 1)):
        page.mouse.move(*place(page, explorer, 6, 6, t, u))
        page.wait_for_function(f"() => document.getElementById('figure').dataset.t == {t}")
        assert node(page) == (t, u)
        assert_bars(page, explorer, view)
    assert "Node 4,1 of 0,0 to 5,6, last label C" in page.text_content("#readout")
    settled(page)
    x, y = place(page, explorer, 6, 6, 1, 1)
    page.mouse.click(x, y)  # holds it
    page.mouse.move(*place(page, explorer, 6, 6, 4, 4))
    assert node(page) == (1, 1) and "locked" in page.text_content("#readout")
    page.mouse.click(x, y)
    page.mouse.move(*place(page, explorer, 6, 6, 4, 4))
    assert node(page) == (4, 4)


def test_the_arrow_keys_move_the_crosshair_within_the_lattice(text, new_page):
    explorer, address = text
    page = new_page(address + "#text=abccba&target=A+B+C&node=2,1")
    settled(page)
    page.focus("#figure")
    for key, expected in [
        ("ArrowRight", (3, 1)), ("ArrowUp", (3, 2)), ("ArrowLeft", (2, 2)), ("ArrowDown", (2, 1)),
        ("Shift+ArrowRight", (5, 1)), ("ArrowRight", (5, 1)), ("Shift+ArrowUp", (5, 3)),
        ("Home", (0, 3)), ("ArrowLeft", (0, 3)), ("End", (5, 3)), ("Shift+ArrowDown", (5, 0)),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert node(page) == expected, key
    settled(page)
    view = view_lattice(
        explorer.model, explorer.model.signature.example("abccba").frames, [1, 2, 3]
    )
    assert_bars(page, explorer, view)


def test_the_sensitivities_belong_to_the_node_at_the_crosshair(text, new_page):
    explorer, address = text
    page = new_page(address + "#text=abccba&target=A+B+C&node=2,2")
    settled(page)
    view = view_lattice(
        explorer.model, explorer.model.signature.example("abccba").frames, [1, 2, 3]
    )
    expected = sensitivity(explorer.model, view, 2, 2)
    # The brightest column of the map is that of the frame that matters most.
    light = page.evaluate(
        """async () => {
            const { layout } = await import("./figure.js");
            const canvas = document.getElementById("figure");
            const scale = canvas.width / canvas.clientWidth;
            const { alongTime } = layout(
                canvas.clientWidth, { rows: 4, source: [] }, window.innerHeight);
            const context = canvas.getContext("2d");
            return [0, 1, 2, 3, 4, 5].map((t) => {
                const x = scale * (alongTime.x + ((t + 0.25) * alongTime.w) / 6);
                const { data } = context.getImageData(
                    x, scale * alongTime.y, 1, scale * alongTime.h);
                return Math.max(...data.filter((_, i) => i % 4 === 1));
            });
        }"""
    )
    strongest = expected.inputs.abs().amax(1)
    assert torch.tensor(light).argmax() == strongest.argmax()


def test_nodes_count_from_0_as_in_the_plot_command(text, new_page):
    page = new_page(text[1] + "#text=abccba&target=A+B+C&node=2,3")
    settled(page)
    expect(page.locator("#readout")).to_contain_text("Node 2,3 of 0,0 to 5,3, last label C:")
    timing = view_lattice(
        text[0].model, text[0].model.signature.example("abccba").frames, [1, 2, 3]
    ).timings[2]
    expect(page.locator("#readout")).to_contain_text(
        f"C is emitted at frame {timing.frame} ({timing.start} to {timing.end})"
    )
    words = words_of(page)
    [axis] = [y - 15 for word, _, _, y in words if word == "frame t"]
    assert [word for word, _, _, y in words if y == axis] == [str(t) for t in range(6)]


def test_a_typed_word_is_opened_and_its_unknown_letters_are_named(text, new_page):
    page = new_page(text[1])
    page.fill("#text", "axb")
    page.press("#text", "Enter")
    settled(page)
    expect(page.locator("#input-name")).to_have_text("axb")
    expect(page.locator("#message p")).to_have_text(
        "x was not in the training data, and counts as nothing."
    )
    page.click("#message button")
    expect(page.locator("#message")).to_be_hidden()


def test_a_problem_shows_a_message_and_the_page_still_works(text, new_page):
    page = new_page(text[1])
    pick(page, "cabbac")
    page.fill("#target", "A Q B")
    page.press("#target", "Enter")
    expect(page.locator("#message p")).to_have_text(
        "'Q' is not a symbol of the model; it has A B C DD. "
        "The page still shows the previous target."
    )
    page.fill("#text", "a" * 400)
    page.press("#text", "Enter")
    expect(page.locator("#message p")).to_contain_text("400 symbols; at most 300 can be shown")
    page.fill("#text", "")
    page.press("#text", "Enter")
    expect(page.locator("#message p")).to_have_text(
        "The text is empty; type a word. The page still shows cabbac."
    )
    for name in ("#input-name", "#outputs-name"):
        expect(page.locator(name)).to_have_text("cabbac")
    page.fill("#target", "A DD B")
    page.press("#target", "Enter")
    settled(page)
    expect(page.locator("#message")).to_be_hidden()
    page.wait_for_function(
        "() => new URLSearchParams(location.hash.slice(1)).get('target') === 'A DD B'"
    )
    assert address_of(page)["target"] == ["A DD B"]
    page.goto(text[1] + "#example=999")
    page.reload()
    expect(page.locator("#message p")).to_have_text(
        "There is no example 999; there are 7 examples."
    )
    pick(page, "abc")


def test_the_lattice_always_belongs_to_the_input_whose_outputs_are_shown(
    text, new_page, monkeypatch
):
    page = new_page(text[1])
    pick(page, "abc")
    page.fill("#find", "")
    monkeypatch.setattr(exploring, "MAX_CELLS", 2)
    page.click("#examples strong:text-is('cabbac')")
    expect(page.locator("#message p")).to_contain_text("is too large to be shown")
    expect(page.locator("#outputs-name")).to_have_text("cabbac")
    expect(page.locator("#lattice")).to_be_hidden()
    monkeypatch.undo()
    page.click("#hypotheses button >> nth=0")
    expect(page.locator("#input-name")).to_have_text("cabbac")
    expect(page.locator("#lattice")).to_be_visible()


def test_the_next_action_hides_a_problem(text, new_page):
    page = new_page(text[1])
    pick(page, "cabbac")
    for action in (
        lambda: page.click("#maps span:text-is('forward')"),
        lambda: page.click("#search-form button"),
        lambda: page.click("#figure"),
        lambda: page.fill("#find", "b"),
        lambda: page.fill("#text", "ab"),
    ):
        page.fill("#target", "Q")
        page.press("#target", "Enter")
        expect(page.locator("#message")).to_be_visible()
        page.click("#message p")
        expect(page.locator("#message")).to_be_visible()
        action()
        expect(page.locator("#message")).to_be_hidden()


def test_the_mouse_and_the_keys_choose_maps_and_scales(text, new_page):
    page = new_page(text[1] + "#text=abccba&target=A+B+C&node=2,1")
    settled(page)
    pictures = {picture(page)}
    for name in ("forward", "backward"):
        page.click(f"#maps span:text-is('{name}')")
        drawn(page)
        pictures.add(picture(page))
        assert address_of(page)["map"] == [name]
    page.focus("#scales input:checked")
    page.keyboard.press("ArrowRight")
    drawn(page)
    pictures.add(picture(page))
    assert address_of(page)["scale"] == ["linear"]
    assert len(pictures) == 4


def test_the_view_zooms_and_scrolls(text, new_page):
    explorer, address = text
    page = new_page(address + "#text=abccbaabccba&target=A+B+C+A+B+C&node=6,3")
    settled(page)
    assert "seen" not in address_of(page)

    def seen():
        return [float(x) for x in address_of(page)["seen"][0].split(",")]

    page.mouse.move(*place(page, explorer, 12, 6, 6, 3))
    page.mouse.wheel(0, -300)
    t0, t1, u0, u1 = seen()
    assert 0 < t0 < 6.5 < t1 < 12 and 0 < u0 < 3.5 < u1 < 7
    page.mouse.down()
    page.mouse.move(*place(page, explorer, 12, 6, 8, 3), steps=4)
    page.mouse.up()
    moved = seen()
    assert moved[0] < t0 and moved[1] - moved[0] == pytest.approx(t1 - t0, abs=0.05)
    assert node(page) == (6, 3)
    page.click("#zoom-fit")
    assert "seen" not in address_of(page)
    page.click("#zoom-in")
    assert seen()[1] - seen()[0] == pytest.approx(8, abs=0.05)
    page.focus("#figure")
    page.keyboard.press("0")
    assert "seen" not in address_of(page)
    page.keyboard.press("+")
    page.keyboard.press("Home")
    assert seen()[0] == 0, "the crosshair stays in view"


def test_two_fingers_zoom(text, new_page):
    explorer, address = text
    page = new_page(address + "#text=abccba&target=A+B+C&node=2,1", has_touch=True)
    settled(page)
    x, y = place(page, explorer, 6, 3, 3, 1)
    touch = page.context.new_cdp_session(page)
    for apart in (20, 30, 45, 60):
        points = [{"x": x - apart, "y": y, "id": 1}, {"x": x + apart, "y": y, "id": 2}]
        kind = "touchStart" if apart == 20 else "touchMove"
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    t0, t1, *_ = (float(x) for x in address_of(page)["seen"][0].split(","))
    assert t1 - t0 == pytest.approx(3, abs=0.3)  # it is the least that is shown


def test_an_address_restores_the_view(text, new_page):
    _, address = text
    page = new_page(address)
    pick(page, "cabbac")
    page.fill("#target", "A DD B A")
    page.press("#target", "Enter")
    settled(page)
    page.click("#maps span:text-is('backward')")
    page.click("#scales span:text-is('linear')")
    page.focus("#figure")
    for key in ("Home", "ArrowRight", "ArrowUp", "ArrowUp", "+"):
        page.keyboard.press(key)
    page.mouse.move(5, 5)
    settled(page)
    address_of(page)
    again = new_page(page.evaluate("location.href"))
    settled(again)
    assert address_of(again) == address_of(page) and node(again) == node(page)
    for name in ("map", "scale"):
        script = f"document.querySelector('input[name={name}]:checked').value"
        assert again.evaluate(script) == page.evaluate(script)
    assert again.input_value("#target") == "A DD B A"
    assert again.get_attribute("#examples [aria-current]", "data-index") == "4"


def test_a_malformed_address_is_ignored(text, new_page):
    page = new_page(text[1] + "#example=2&map=x&scale=&node=99,-5&seen=7,a&target=++")
    settled(page)
    assert node(page) == (4, 0)
    page.goto(text[1] + "#example=2&seen=1e9,-3,5,5&node=1e99,2")
    page.reload()
    settled(page)


def test_the_search_is_shown_frame_by_frame(text, new_page):
    explorer, address = text
    page = new_page(address)
    pick(page, "bacca")
    page.fill("#beam-width", "4")
    page.press("#beam-width", "Enter")
    frames = explorer.model.signature.example("bacca").frames
    steps = list(beam_search_steps(explorer.model.network, frames, 4))
    expect(page.locator("#step-name")).to_have_text("frame 0 of 0 to 4")
    for n in range(1, 6):
        rows = page.locator("#flows .after li").evaluate_all(
            "rows => rows.map(row => [row.dataset.labels, Number(row.dataset.logProb)])"
        )
        assert [labels for labels, _ in rows] == [" ".join(map(str, y.labels)) for y in steps[n]]
        for (_, log_prob), y in zip(rows, steps[n], strict=True):
            assert log_prob == pytest.approx(y.log_prob)
        num_flows = sum(len(y.flows) for y in steps[n])
        assert page.locator("#flows path").count() == num_flows
        assert page.get_attribute("#figure", "data-cursor") == str(n - 0.5)
        if n < 5:
            page.click("#step-on")
    assert page.is_disabled("#step-on")
    first = page.locator("#flows .after li").first
    emitted = steps[5][0].flows[0].emitted
    words = " ".join(explorer.model.signature.targets.decode(emitted)) or "null"
    expect(first).to_contain_text(f"by {words}")
    page.focus("#step")
    page.keyboard.press("Home")
    expect(page.locator("#step-name")).to_have_text("before the first frame")
    expect(page.locator("#flows .after .symbols")).to_have_text("(empty)")


def test_a_transducer_that_reads_backwards_is_shown_in_forward_time(tmp_path, new_page):
    explorer = Explorer(text_model(backwards=True), text_pairs(tmp_path), "back")
    frames = explorer.model.signature.example("cabbac").frames
    view = view_lattice(explorer.model, frames, [1, 2, 3])
    with serving(explorer) as address:
        page = new_page(address + "#text=cabbac&target=A+B+C&node=4,1")
        settled(page)
        expect(page.locator("#seen")).to_contain_text(
            "Reading cabbac from right to left, the network emits A B C from top to bottom."
        )
        expect(page.locator("#readout")).to_contain_text("Node 4,1 of 0,0 to 5,3, last label B:")
        expect(page.locator("#readout")).to_contain_text("next label A")
        timing = view.timings[1]
        expect(page.locator("#readout")).to_contain_text(
            f"B is emitted at frame {timing.frame} ({timing.start} to {timing.end})"
        )
        assert_bars(page, explorer, view)
        rows = rows_of(words_of(page), lambda word: word in ("A", "B", "C", "∅"))
        axis = {word: y for row in rows for word, _, right, y in row if right == rows[0][0][2]}
        assert sorted(axis, key=axis.get) == ["∅", "C", "B", "A"]
        page.fill("#beam-width", "4")
        page.press("#beam-width", "Enter")
        steps = list(beam_search_steps(explorer.model.network, frames, 4))
        for n in range(1, 7):
            expect(page.locator("#step-name")).to_have_text(f"frame {6 - n} of 0 to 5")
            labels = page.locator("#flows .after li").evaluate_all(
                "r => r.map(x => x.dataset.labels)"
            )
            assert labels == [" ".join(map(str, y.labels[::-1])) for y in steps[n]]
            assert page.get_attribute("#figure", "data-cursor") == str(6 - n + 0.5)
            if n < 6:
                page.click("#step-on")


def test_a_search_shows_its_progress_and_can_be_stopped(text, new_page, monkeypatch):
    explorer, _ = text
    monkeypatch.setattr(exploring, "STEPS_SECONDS", 0.0)  # one frame at a time
    go_on = threading.Semaphore(7)

    class Held(type(explorer)):
        def steps(self, name):
            go_on.acquire()
            return super().steps(name)

    with serving(Held(explorer.model, (), "held")) as address:
        page = new_page(address + "#text=" + "abc" * 20)
        settled(page)
        page.click("#search-form button")
        expect(page.locator("#progress-text")).to_have_text("6 of 60 frames searched")
        assert page.get_attribute("#progress", "value") == "0.1"
        expect(page.locator("#step-name")).to_have_text("frame 0 of 0 to 59")
        page.click("#stop")
        stopped = "The search was stopped after 6 of 60 frames."
        expect(page.locator("#progress-text")).to_have_text(stopped)
        go_on.release(60)
        expect(page.locator("#progress")).to_be_hidden()
        go_on.release(1)
        page.focus("#step")
        page.keyboard.press("End")
        expect(page.locator("#step-name")).to_have_text("frame 5 of 0 to 59")
        assert page.is_disabled("#step-on")
        go_on.release(200)
        page.click("#search-form button")
        expect(page.locator("#progress-text")).to_have_text("")
        page.focus("#step")
        page.keyboard.press("End")
        expect(page.locator("#step-name")).to_have_text("frame 59 of 0 to 59")


def test_the_view_is_saved_as_a_picture(text, new_page, tmp_path):
    page = new_page(text[1])
    pick(page, "cabbac")
    with page.expect_download() as waiting:
        page.click("#save")
    assert waiting.value.suggested_filename == "lattice-cabbac.png"
    waiting.value.save_as(tmp_path / "saved.png")
    content = (tmp_path / "saved.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[i : i + 4]) for i in (16, 20))
    shown = page.locator("#figure").evaluate("c => [c.clientWidth, c.clientHeight]")
    assert width == 2 * (shown[0] + 40) and height > 2 * shown[1]


def test_the_address_is_copied(text, new_page):
    page = new_page(text[1], permissions=["clipboard-read", "clipboard-write"])
    pick(page, "abba")
    page.click("#share")
    expect(page.locator("#message p")).to_have_text("The address of this view is copied.")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_the_page_reopens_an_input_that_the_server_no_longer_keeps(text, new_page):
    explorer, address = text
    page = new_page(address)
    pick(page, "abba")
    explorer.views.things.clear()
    explorer.inputs.things.clear()
    page.focus("#figure")
    page.keyboard.press("Home")
    settled(page)
    page.keyboard.press("End")
    settled(page)
    assert node(page)[0] == 3
    explorer.inputs.things.clear()
    page.click("#search-form button")  # opens the input again
    while not explorer.inputs.things:
        page.wait_for_timeout(20)
    expect(page.locator("body")).not_to_have_class(re.compile(r"\bbusy\b"))
    page.click("#search-form button")
    expect(page.locator("#step-name")).to_have_text("frame 0 of 0 to 3")


def test_the_page_reports_a_server_that_does_not_answer(text, new_page):
    explorer, _ = text
    with serving(explorer) as address:
        page = new_page(address)
        pick(page, "abba")
        page.context.set_offline(True)
        page.click("#examples button >> nth=0")
        expect(page.locator("#message p")).to_contain_text("The server does not answer")


def test_on_a_phone_the_figure_is_first_and_there_are_no_keys(text, new_page):
    page = new_page(text[1], 390, has_touch=True, is_mobile=True)
    settled(page)
    tops = [
        page.locator(f"section[aria-labelledby={name}-title]").bounding_box()["y"]
        for name in ("lattice", "input", "outputs", "search")
    ]
    assert tops == sorted(tops)
    expect(page.locator("#keys")).to_be_hidden()
    page = new_page(text[1], 1200)
    settled(page)
    expect(page.locator("#keys")).to_be_visible()


def test_the_figure_is_drawn_in_windows_of_all_widths(text, new_page):
    page = new_page(text[1])
    settled(page)
    radii = page.evaluate(
        """async () => {
            const radii = [];
            const { prototype } = CanvasRenderingContext2D;
            const arc = prototype.arc;
            prototype.arc = function (x, y, radius, ...rest) {
                radii.push(radius);
                arc.call(this, x, y, radius, ...rest);
            };
            const drawn = () =>
                new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            for (const width of [0, 1, 20, 43, 60, 200, 719, 720, 800]) {
                document.getElementById("lattice").style.width = `${width}px`;
                window.dispatchEvent(new Event("resize"));
                await drawn();
            }
            document.getElementById("lattice").hidden = true;
            window.dispatchEvent(new Event("resize"));
            await drawn();
            return radii;
        }"""
    )
    assert len(radii) > 8 and min(radii) > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_fits_narrow_and_wide_windows(width, scheme, heard, new_page):
    page = new_page(heard[1], width, color_scheme=scheme)
    pick(page, "tone")
    page.click("#search-form button")
    expect(page.locator("#steps")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figure = page.locator("#figure").bounding_box()
    assert figure["x"] >= 0 and figure["x"] + figure["width"] <= width
    for button in page.locator("button:visible").all():
        box = button.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(json.loads(dark[3:].replace("(", "[").replace(")", "]"))) < 100) == (
        scheme == "dark"
    )


def test_sensitivities_have_the_colours_of_the_plot_command(text, new_page):
    page = new_page(text[1] + "#text=abccba&target=A+B+C&node=2,2")
    settled(page)
    table = page.evaluate("async () => [...(await import('./colours.js')).HEAT]")
    assert table == heat_colours().flatten().tolist()
    view = view_lattice(text[0].model, text[0].model.signature.example("abccba").frames, [1, 2, 3])
    derivatives = sensitivity(text[0].model, view, 2, 2).inputs.abs().numpy()  # [T, D]
    shares = 1 + np.log10(derivatives / derivatives.max()).clip(-DECADES) / DECADES
    expected = heat_colours()[np.rint(255 * shares).astype(int)]
    colours = page.evaluate(
        """async () => {
            const { layout } = await import("./figure.js");
            const canvas = document.getElementById("figure");
            const { alongTime } = layout(
                canvas.clientWidth, { rows: 4, source: [] }, window.innerHeight);
            const context = canvas.getContext("2d");
            return [0, 1, 2, 3, 4, 5].map((t) => [0, 1, 2].map((row) => {
                const x = alongTime.x + ((t + 0.25) * alongTime.w) / 6;
                const y = alongTime.y + alongTime.h * (1 - (row + 0.5) / 3);
                return [...context.getImageData(x, y, 1, 1).data.slice(0, 3)];
            }));
        }"""
    )
    # Rounding may move a value to the next colour.
    assert np.abs(np.array(colours) - expected).max() <= 6
    assert {"0.001", "1"} <= {word for word, *_ in words_of(page)}


@pytest.mark.parametrize("width", [400, 1200])
def test_a_long_text_shows_only_the_letters_that_fit(width, text, new_page):
    letters = "abc" * 66 + "ab"
    page = new_page(text[1] + f"#text={letters}&target=A+B&node=101,1", width)
    settled(page)
    strip = rows_of(words_of(page), lambda word: word in "abc")[0]
    assert 10 < len(strip) < 200 and apart(strip)
    dots = rows_of(words_of(page), lambda word: word == "·")
    assert sum(len(row) for row in dots) >= 200 - len(strip), "each that is left out has a mark"
    notes = [word for word, *_ in words_of(page) if word.startswith("Named: every ")]
    assert len(notes) == 1 and notes[0].endswith("letter. Zoom in for all.")
    crosshair = (
        place(page, text[0], 200, 2, 101, 1)[0] - page.locator("#figure").bounding_box()["x"]
    )
    [here] = [word for word, left, right, _ in strip if left <= crosshair <= right]
    assert here == letters[101]
    page.goto(text[1] + "#text=abccba&target=A+B&node=1,1")
    page.reload()
    settled(page)
    strip = rows_of(words_of(page), lambda word: word in "abc")[0]
    assert "".join(word for word, *_ in strip) == "abccba"
    assert not [word for word, *_ in words_of(page) if word == "·" or word.startswith("Named")]


def test_the_figure_uses_all_pixels_of_a_high_resolution_screen(text, new_page):
    page = new_page(text[1], device_scale_factor=2)
    pick(page, "abba")
    width, shown = page.locator("#figure").evaluate("c => [c.width, c.clientWidth]")
    assert width == 2 * shown


# --- Sound --------------------------------------------------------------------------------------


def drop(page, name, content):
    """Drop a file on the page; `content` is its bytes, or a number of zeros."""
    page.evaluate(
        """([name, content]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(content)], name));
            const drop = new DragEvent("drop", { dataTransfer: transfer, bubbles: true });
            document.getElementById("drop").dispatchEvent(drop);
        }""",
        [name, content if isinstance(content, int) else list(content)],
    )


def test_a_dropped_sound_is_recognised_and_played(heard, new_page):
    explorer, address = heard
    page = new_page(address)
    drop(page, "mine.wav", wav_bytes(sound(1.0), subtype="PCM_16"))
    settled(page)
    expect(page.locator("#input-name")).to_have_text("mine.wav")
    expect(page.locator("#message")).to_be_hidden()
    page.click("#share")
    expect(page.locator("#message p")).to_contain_text("does not contain it")
    frames = explorer.model.signature.example(torch.from_numpy(sound(1.0)[:, 0])).frames
    symbols = page.input_value("#target").split()
    labels = explorer.model.signature.targets.encode(symbols)
    view = view_lattice(explorer.model, frames, labels)
    outputs = ["∅", *explorer.model.signature.targets.symbols]
    for label, probability in output_bars(view, *node(page), num=5).output:
        assert table(page)[outputs[label]][0] == pytest.approx(probability, abs=2e-3)
    watch_playback(page)
    assert 40 < float(page.get_attribute("#figure", "data-cursor")) < 51
    page.focus("#figure")
    page.keyboard.press(" ")
    expect(page.locator("#play")).to_have_text("Pause")
    page.keyboard.press(" ")
    expect(page.locator("#play")).to_have_text("Play")
    assert address_of(page)["sound"] == ["mine.wav"]
    again = new_page(page.url)
    expect(again.locator("#message p")).to_contain_text(
        "mine.wav, but does not contain it; choose the file again"
    )


def test_labels_that_do_not_fit_are_thinned_evenly(heard, new_page):
    every, named = new_page(heard[1]).evaluate(
        """async () => {
            const { labelsThatFit } = await import("./figure.js");
            const context = new OffscreenCanvas(1, 1).getContext("2d");
            const target = Array.from({ length: 100 }, (_, i) => ["ih", "w", "DD"][i % 3]);
            const timings = target.map((_, i) => ({ frame: 3 * i }));
            const place = { x: (t) => 1.1 * t };
            const { every, named } = labelsThatFit(context, { target, timings }, 52, place);
            return [every, [...named].map((i) => {
                const [x, { width }] = [place.x(3 * i + 0.5), context.measureText(target[i])];
                return [i, x - width / 2, x + width / 2, Math.floor(i / every) % 3];
            })];
        }"""
    )
    assert every == 3
    assert 52 in [i for i, *_ in named], "the crosshair's own is named"
    others = {i for i, *_ in named} - {52}
    assert others < set(range(0, 100, 3)) and len(others) == 33, "it replaces one that it touches"
    lanes = rows_of(named, lambda i: True)
    assert len(lanes) == 3 and all(apart(lane) for lane in lanes)


def test_a_file_that_is_not_sound_shows_a_message(heard, new_page):
    page = new_page(heard[1])
    pick(page, "tone")
    drop(page, "bad.wav", b"no sound at all")
    expect(page.locator("#message p")).to_contain_text(
        "The file bad.wav is not sound that can be read"
    )
    drop(page, "large.wav", 20_000_001)
    expect(page.locator("#message p")).to_contain_text("larger than 20 MB")
    expect(page.locator("#message p")).to_contain_text("The page still shows tone.")
    expect(page.locator("#input-name")).to_have_text("tone")
    good = {"name": "good.wav", "mimeType": "audio/wav", "buffer": wav_bytes(sound())}
    page.set_input_files("#file", good)
    expect(page.locator("#input-name")).to_have_text("good.wav")
    settled(page)


def test_an_example_whose_file_is_missing_shows_a_message(heard, new_page):
    page = new_page(heard[1])
    page.click("#examples strong:text-is('gone')")
    expect(page.locator("#message p")).to_contain_text("check the path")
    path = str(heard[0].pairs[1].source.path)
    expect(page.locator("#message p")).to_contain_text(path)
    pick(page, "tone")
    expect(page.locator("#message")).to_be_hidden()
