"""Explore a continuous transducer: the answers of the server, and its page in a real browser."""

import io
import json
from itertools import pairwise, product
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import soundfile
import torch
from explored import (
    BODIES,
    HERE,
    JSON,
    ODD,
    SPOKEN_RATE,
    launched_browser,
    needs_chromium,
    opened_pages,
    serving,
    settled,
    sound,
    speech_model,
    speech_pairs,
    text_model,
    told,
    watch_playback,
    words_of,
)
from fastapi.testclient import TestClient
from playwright.sync_api import expect

from transduce.analysis.speech import node_mixture, null_sensitivity, view_speech
from transduce.decoding.generation import GenerationOptions
from transduce.model.speech import Speech, speak
from transduce.web import speech as speaking
from transduce.web.server import create_app
from transduce.web.speech import SpeechExplorer
from transduce.web.wire import unpack

LINE = "speaker=ann a b c"
GENERATION = {"temperature": 0.4, "durations": "median", "seed": 0}


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    return SpeechExplorer(speech_model(), speech_pairs(tmp_path_factory.mktemp("said")), "voices")


@pytest.fixture
def client(explorer):
    return TestClient(create_app(explorer), base_url=HERE)


def opened(client, text=LINE):
    return client.post("/api/text", json={"text": text}).json()


def shown(client, name, generation=GENERATION):
    """Return the header and the arrays of a lattice."""
    query = {"input": name, "generation": generation}
    response = client.post("/api/speech", json=query)
    assert response.status_code == 200, response.text
    return unpack(response.content)


def generated(explorer, **options):
    [speech] = speak(explorer.model, [LINE], GenerationOptions(**options))
    return speech


# --- The server ---------------------------------------------------------------------------------


def test_the_model_and_its_inputs_are_described(client):
    model = client.get("/api/model").json()
    assert model["speaks"] and model["kind"] == "text" and not model["streams"]
    assert model["symbols"] == ["a", "b", "c", "speaker=ann", "speaker=bob"]
    assert model["conditions"] == {"speaker": ["ann", "bob"]}
    assert model["frames_per_vector"] == 2 and model["seconds_per_frame"] == 0.01
    assert model["generation"] == GENERATION and model["first"] == {"kind": "example", "index": 0}
    answer = opened(client)
    assert answer["symbols"] == LINE.split() and not answer["has_recording"]
    answer = client.post("/api/example", json={"index": 0}).json()
    assert answer["name"] == "said" and answer["has_recording"]
    assert answer["symbols"] == ["speaker=bob", "a", "b", "c", "a"]
    answer = client.post("/api/example", json={"index": 2}).json()
    assert answer["symbols"] == ["speaker=bob", "a"] and not answer["has_recording"]


@pytest.mark.parametrize(
    "generation",
    [
        GENERATION,
        {"temperature": 0, "durations": "median", "seed": 0},
        {"temperature": 1, "durations": "drawn", "seed": 7},
    ],
)
def test_the_lattice_of_generated_speech_matches_the_library(client, explorer, generation):
    header, arrays = shown(client, opened(client)["input"], generation)
    speech = generated(explorer, **generation)
    ids = explorer.model.signature.example(LINE).frames
    view = view_speech(explorer.model, ids, speech.generated.outputs)
    for name in ("log_null", "log_product", "log_next_output"):
        assert np.array_equal(arrays[name], getattr(view, name).numpy().astype(np.float32)), name
    assert np.array_equal(arrays["picture"], speech.frames.numpy())
    assert header["names"] == header["symbols"] == LINE.split()
    assert header["num_outputs"] == len(speech.generated.outputs) == len(view.best)
    assert header["bits_per_output"] == view.bits_per_output
    emitted = [t for (t, u), (_, after) in pairwise(header["best_path"]) if after > u]
    assert emitted == list(view.best)


def test_the_lattice_of_a_recording_is_that_of_its_frames(client, explorer):
    name = client.post("/api/example", json={"index": 0}).json()["input"]
    header, arrays = shown(client, name, None)
    example = explorer.model.signature.example(explorer.pairs[0], with_labels=True)
    view = view_speech(explorer.model, example.frames, example.labels)
    assert header["log_density"] == view.log_density
    assert np.array_equal(arrays["log_product"], view.log_product.numpy().astype(np.float32))
    assert np.allclose(arrays["picture"], view.format.to_frames(example.labels))
    played = client.get(f"/api/sound/{header['view']}")
    assert played.headers["content-type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(played.content))
    assert rate == SPOKEN_RATE
    assert np.abs(samples - sound(rate=SPOKEN_RATE)[:, 0]).max() < 1e-4


def test_the_sound_of_generated_speech_is_that_of_the_command(client, explorer):
    header, _ = shown(client, opened(client)["input"])
    played = client.get(f"/api/sound/{header['view']}").content
    assert played == generated(explorer).wav()


def test_a_node_has_the_mixture_and_the_sensitivities_of_the_library(client, explorer):
    shift, channels = explorer.format, explorer.format.features.size
    header, _ = shown(client, opened(client)["input"])
    speech = generated(explorer)
    ids = explorer.model.signature.example(LINE).frames
    view = view_speech(explorer.model, ids, speech.generated.outputs)
    U = len(speech.generated.outputs)
    for t, u in ((0, 0), (2, 5), (3, U)):
        query = {"view": header["view"], "t": t, "u": u}
        node, arrays = unpack(client.post("/api/node", json=query).content)
        expected = node_mixture(view, t, u)
        assert node["null"] == expected.null
        assert node["weights"] == expected.weights.tolist()
        assert node["log_densities"] == expected.log_densities.tolist()
        means = shift.statistics.normalise(torch.tensor(arrays["means"]).reshape(-1, channels))
        assert np.allclose(means.reshape(expected.means.shape), expected.means, atol=1e-5)
        assert np.allclose(arrays["deviations"], 3 * expected.deviations, rtol=1e-6)
        assert np.array_equal(arrays["output"], speech.frames[2 * u : 2 * u + 2].flatten())
        derivatives = null_sensitivity(explorer.model, view, t, u)
        for what, array in derivatives._asdict().items():
            found = node["largest"][what] * arrays[what].astype(float)
            assert np.allclose(found.reshape(array.shape), array, rtol=1e-5, atol=1e-12)


def test_a_bad_input_is_refused_in_a_sentence(client, explorer, monkeypatch):
    def refused(text):
        return told(client.post("/api/text", json={"text": text}))

    voices = "write one of speaker=ann, speaker=bob before it"
    assert refused("a b") == f"the text names no speaker; {voices}"
    assert refused("speaker=eve a") == "there is no speaker 'eve'; the model has ann, bob"
    assert refused(" ") == refused("speaker=ann") == "the text is empty; write the words to say"
    strange = "the model cannot say AA, in 'speaker=ann bob'; it can say a b c"
    assert refused("speaker=ann bob") == strange
    assert refused("a" * 301) == "the text has 301 characters; at most 300 can be shown"
    assert client.post("/api/text", json={"text": "speaker=ann " + "a " * 29}).status_code == 200
    many = "speaker=ann " + "a " * 30
    assert refused(many) == "the input has 31 symbols; at most 30 can be shown"
    assert "no example 3" in told(client.post("/api/example", json={"index": 3}))
    name = opened(client)["input"]

    def unsaid(generation, status=400, name=name):
        query = {"input": name, "generation": generation}
        return told(client.post("/api/speech", json=query), status)

    assert unsaid(None) == "a text has no recording; generate its sound"
    for temperature, words in ((3, "temperature must be at most 2, not 3"), (-1, "at least 0")):
        assert words in unsaid({**GENERATION, "temperature": temperature})
    assert "seed must be between 0 and 4294967295, not -1" in unsaid({**GENERATION, "seed": -1})
    assert "generation.durations cannot be read" in unsaid({**GENERATION, "durations": "x"}, 422)
    assert "temperature cannot be read" in unsaid({**GENERATION, "temperature": None}, 422)
    assert "forgotten" in unsaid(None, 410, name="x")
    gone = client.post("/api/example", json={"index": 1}).json()["input"]
    assert "gone.wav" in unsaid(None, name=gone)
    view = shown(client, name)[0]["view"]
    for t, u in ((4, 0), (0, 10_000), (-1, 0)):
        query = {"view": view, "t": t, "u": u}
        assert f"no node {t},{u}" in told(client.post("/api/node", json=query))
    assert "forgotten" in told(client.get("/api/sound/x"), 410)
    monkeypatch.setattr(speaking, "MAX_SECONDS", 0.5)
    said = client.post("/api/example", json={"index": 0}).json()["input"]
    assert "said is longer than 0.5 seconds; choose another" in unsaid(None, name=said)
    monkeypatch.setattr(speaking, "MAX_CELLS", 9)
    assert "too large to be shown" in unsaid(GENERATION)


def test_what_needs_labels_is_not_there(client, explorer):
    for path in ("sound", "lattice", "sensitivity", "search", "steps", "alignment"):
        answer = client.post(f"/api/{path}", json={})
        assert told(answer, answer.status_code) == f"there is nothing at /api/{path}"
        assert answer.status_code in (404, 405)
    with pytest.raises(ValueError, match="outputs labels; give a continuous transducer"):
        SpeechExplorer(text_model(), (), "labels")


def test_a_network_that_says_nothing_is_reported(explorer, monkeypatch):
    name = explorer.open_text(LINE)["input"]
    silent = generated(explorer)
    empty = type(silent.generated)(torch.zeros(0, 20), ())
    monkeypatch.setattr(
        speaking, "speak", lambda *_: [Speech(silent.symbols, empty, silent.format)]
    )
    with pytest.raises(ValueError, match=f"nothing is said for '{LINE}' with these options"):
        explorer.speech(name, GenerationOptions())


@pytest.mark.slow
def test_no_request_makes_the_server_fail(client, capsys):
    name = opened(client)["input"]
    view = shown(client, name)[0]["view"]
    queries = {
        "example": {"index": 0},
        "text": {"text": "a"},
        "speech": {"input": name, "generation": GENERATION},
        "node": {"view": view, "t": 0, "u": 0},
    }
    answers = []
    for path, query in queries.items():
        wrong = [{**query, field: odd} for field, odd in product(query, ODD)]
        if path == "speech":
            odd = product(GENERATION, ODD)
            wrong += [{**query, "generation": {**GENERATION, name: one}} for name, one in odd]
        for body in [*BODIES, *(json.dumps(one).encode() for one in wrong)]:
            answers.append(client.post(f"/api/{path}", content=body, headers=JSON))
    assert {answer.status_code for answer in answers} <= {200, 400, 410, 422}
    assert all(answer.status_code == 200 or told(answer, answer.status_code) for answer in answers)
    assert capsys.readouterr().err == ""


# --- The page -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(explorer):
    with serving(explorer) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with launched_browser() as browser:
        yield browser


@pytest.fixture
def new_page(browser):
    with opened_pages(browser) as make:
        yield make


def view_of(explorer, **options):
    ids = explorer.model.signature.example(LINE).frames
    return view_speech(explorer.model, ids, generated(explorer, **options).generated.outputs)


def text(page, where):
    return page.locator(where).inner_text()


@needs_chromium
def test_the_page_opens_on_a_recording_and_says_what_it_shows(address, new_page):
    page = new_page(address)
    settled(page)
    assert text(page, "#model") == "voices: 5 symbols to sound"
    assert text(page, "#input-name") == text(page, "#said-name") == "said"
    seen = text(page, "#seen")
    assert "Reading speaker=bob a b c a from bottom to top" in seen
    assert "emits the recording from left to right, in 29 outputs of 20 ms." in seen
    assert page.locator("#maps label").all_inner_texts() == ["product", "null", "fit"]
    expect(page.locator("#recording")).to_have_attribute("aria-pressed", "true")
    for words in ("no list of best outputs", "no target to type", "no beam search"):
        assert words in " ".join(text(page, "#absent").split())
    for hidden in ("#outputs", "#search", "#alignment", "#numbers", "#drop"):
        expect(page.locator(hidden)).to_be_hidden()
    assert "when a symbol is said" in text(page, "#legend")
    assert "label" not in text(page, "#legend")
    for name in ("input", "said", "lattice"):
        section = page.locator(f"section[aria-labelledby={name}-title]")
        section.locator(".about summary").click()
        expect(section.locator(":is(.about p, .about dl):visible")).to_have_count(1)
    terms = page.locator("#lattice .about dt:visible").all_inner_texts()
    assert terms[-2:] == ["The sensitivities", "The mixture"]


@needs_chromium
def test_speech_is_generated_as_the_form_asks_and_the_numbers_are_the_librarys(
    address, explorer, new_page
):
    page = new_page(address)
    settled(page)
    page.fill("#text", LINE)
    page.press("#text", "Enter")
    expect(page.locator("#seen")).to_contain_text("emits generated sound")
    expect(page.locator("#recording")).to_be_hidden()
    page.fill("#temperature", "1")
    page.select_option("#durations", "drawn")
    page.fill("#seed", "7")
    page.click("#said-form button >> nth=0")
    view = view_of(explorer, temperature=1, durations="drawn", seed=7)
    count = f"in {len(view.outputs)} outputs of 20 ms"
    expect(page.locator("#seen")).to_contain_text(count)
    bits = f"{view.bits_per_output:.1f}".replace("-", "−")
    assert f"An output takes {bits} bits." in text(page, "#seen")
    page.focus("#figure")
    page.keyboard.press("Home")
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    settled(page)
    node = node_mixture(view, 1, 3)
    readout = text(page, "#readout")
    assert f"Node 1,3 (0.06 s) of 0,0 to 3,{len(view.outputs)}, symbol a:" in readout
    assert f"null {node.null:.3f}." in readout
    bits = f"{-node.log_density / np.log(2):.1f}".replace("-", "−")
    assert f"The next output takes {bits} bits here." in readout
    page.click("#mixture summary")
    rows = [row.split("\t") for row in page.locator("#component-rows tr").all_inner_texts()]
    order = node.weights.argsort(descending=True).tolist()
    assert [row[0] for row in rows] == [str(m + 1) for m in order]
    shares = (node.weights.log() + node.log_densities).softmax(0)
    for row, m in zip(rows, order, strict=True):
        assert float(row[1]) == pytest.approx(float(node.weights[m]), rel=0.01)
        expected = -float(node.log_densities[m]) / np.log(2)
        assert float(row[2].replace("−", "-")) == pytest.approx(expected, abs=0.06)
        if float(shares[m]) > 1e-3:
            assert float(row[3]) == pytest.approx(float(shares[m]), rel=0.01)
    page.keyboard.press("Tab")
    page.focus("#figure")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_contain_text("No output follows.")
    settled(page)


@needs_chromium
def test_an_address_restores_the_speech_the_node_and_the_map(address, new_page):
    page = new_page(
        f"{address}#text=speaker%3Dann+a+b&temperature=1&durations=drawn&seed=5&map=null&node=1,3"
    )
    settled(page)
    assert page.input_value("#seed") == "5" and page.input_value("#durations") == "drawn"
    assert "Node 1,3 " in text(page, "#readout")
    assert page.is_checked("input[value=null]")
    page.click("#maps span:text-is('fit')")
    expect(page.locator("#seen")).to_contain_text("the next output is likely at bright symbols")
    page.wait_for_function("() => location.hash.includes('map=fit')")
    found = parse_qs(urlsplit(page.url).fragment)
    assert (found["seed"], found["node"]) == (["5"], ["1,3"])
    again = new_page(page.url)
    settled(again)
    assert text(again, "#readout") == text(page, "#readout")
    assert text(again, "#seen") == text(page, "#seen")
    recorded = new_page(f"{address}#example=0&recording=&map=forward&node=0,2")
    settled(recorded)
    assert recorded.is_checked("input[value=product]")
    assert "emits the recording" in text(recorded, "#seen")


@needs_chromium
def test_the_best_alignment_and_the_names_are_drawn(address, explorer, new_page):
    page = new_page(f"{address}#text={LINE}&temperature=0.4&durations=median&seed=0")
    settled(page)
    view = view_of(explorer)
    path = page.evaluate(
        """async () => {
            const { SpeechLattice } = await import("./speech.js");
            const { fetchSpeech, openSource, describeModel } = await import("./api.js");
            const { input } = await openSource({ kind: "text", text: "speaker=ann a b c" });
            const generation = { temperature: 0.4, durations: "median", seed: 0 };
            const packed = await fetchSpeech(input, generation);
            const { path, timings, target } = new SpeechLattice(
                packed, await describeModel(), generation);
            return { path, timings, target };
        }"""
    )
    nodes = path["path"]
    ups = [row for (column, row), (after, _) in pairwise(nodes) if after > column]
    assert ups == list(view.best)
    for name, timing in zip(path["target"], path["timings"], strict=True):
        t = ["ann", "a", "b", "c"].index(name)
        said = [u for u, where in enumerate(view.best) if where == t]
        assert [timing["start"], timing["end"]] == [said[0], said[-1]]


@needs_chromium
def test_a_strip_that_is_partly_in_view_has_its_name_there(address, explorer, new_page):
    best = view_of(explorer).best
    first = best.index(1) - 1  # the last output of the first symbol, whose strip is much longer
    assert first > 4
    page = new_page(f"{address}#text={LINE}&seen={first},{first + 6},0,4", 390)
    settled(page)
    words = words_of(page)
    [axis] = [right for word, _, right, _ in words if word == "x"]
    width = page.evaluate("document.getElementById('figure').clientWidth")
    rows = [y for word, _, right, y in words if word == "ann" and axis < right < width]
    named = [word for word, left, right, y in words if y in rows and axis < left and right < width]
    assert named == ["ann"]


@needs_chromium
def test_the_sound_is_played_with_a_cursor(address, new_page):
    page = new_page(f"{address}#text={LINE}")
    settled(page)
    watch_playback(page)


@needs_chromium
def test_a_problem_is_one_sentence_and_the_page_still_works(address, explorer, new_page):
    page = new_page(address)
    settled(page)
    page.fill("#text", "a b")
    page.press("#text", "Enter")
    expect(page.locator("#message p")).to_have_text(
        "The text names no speaker; write one of speaker=ann, speaker=bob before it. "
        "The page still shows said."
    )
    page.fill("#seed", "")
    page.click("#said-form button >> nth=0")
    expect(page.locator("#message p")).to_contain_text("generation.seed cannot be read")
    expect(page.locator("#message p")).to_contain_text("still shows the previous sound.")
    page.fill("#seed", "3")
    page.click("#said-form button >> nth=0")
    expect(page.locator("#seen")).to_contain_text("emits generated sound")
    expect(page.locator("#message")).to_be_hidden()
    explorer.said.things.clear()
    explorer.inputs.things.clear()
    page.focus("#figure")
    page.keyboard.press("Home")
    settled(page)
    page.keyboard.press("End")
    settled(page)
    expect(page.locator("#seen")).to_contain_text("emits generated sound")
    page.click("#examples strong:text-is('gone')")
    expect(page.locator("#message p")).to_contain_text("check the path")


@needs_chromium
def test_the_view_is_saved_as_a_picture(address, new_page):
    page = new_page(address)
    settled(page)
    with page.expect_download() as waiting:
        page.click("#save")
    assert waiting.value.suggested_filename == "lattice-said.png"


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 760, 1600])
def test_the_page_fits_narrow_and_wide_windows(width, scheme, address, new_page):
    page = new_page(address, width, color_scheme=scheme)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for part in page.locator("button:visible, input:visible, select:visible").all():
        box = part.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
