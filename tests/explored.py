"""Small transducers with random weights, a server and a browser, for the tests of the explorer."""

import io
import shutil
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import soundfile
import torch
from playwright.sync_api import expect, sync_playwright

from transduce.alphabet import NULL, Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.audio.outputs import FrameOutputs
from transduce.data.pairs import Audio, Notation, Origin, Pair
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import Signature
from transduce.web.server import ExplorerServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RATE = 16_000
SPOKEN_RATE = 8000
PATIENCE = 120_000  # ms; a busy machine may take most of it to compile a kernel
SPACES = Notation("spaces", None)
CHARACTERS = Notation("characters", None)
HERE = "http://127.0.0.1:8000"  # the server of a test client
JSON = {"Content-Type": "application/json"}
# Values and bodies that no request expects.
ODD = [
    *(None, True, -1, 0, 1.5, 1e308, 10**30, -(10**400), "", "a", "\ud800", "A" * 5000),
    *([], [[]], ["A", 1], ["\ud800"], {}, {"a": 1}),
]
BODIES = [
    *(b"", b"nul", b"{", b"[]", b"0", b'"x"', b"\xff\xfe", b"{" * 9, b"[" * 90_000),
    *(b'{"a":' * 90_000, b"9" * 10_000, b'{"index": NaN}', b'{"index": 1e999}'),
    b'{"t": Infinity, "u": -Infinity, "view": "x"}',
]
WORDS = ["abc", "cab", "bacca", "abba", "cabbac", "a", "bb"]


def needs_chromium(test):
    """Mark a test that drives the browser."""
    reason = "there is no Chromium; apt-get install chromium"
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason=reason)(test))


def sharp_network(config, input_size, num_labels):
    """Return a network of large random weights, whose outputs differ; null is likely."""
    torch.manual_seed(1)
    network = build_network(config, input_size, num_labels).eval()
    with torch.no_grad():
        for part in (network.transcription_network, network.prediction_network):
            for weights in part.parameters():
                weights *= 5
        network.transcription_network.output.bias[NULL] += 2
    return network


def text_model(backwards=False):
    """Return a model of the letters a, b, c to the symbols A, B, C, DD."""
    config = NetworkConfig(hidden_size=8, prediction_size=8, backwards=backwards)
    targets, sources = Alphabet(["A", "B", "C", "DD"]), Alphabet("abc")
    signature = Signature(targets, SPACES, sources, CHARACTERS)
    return TrainedModel(sharp_network(config, 3, 4), config, signature)


def text_pairs(folder):
    origin = Origin(folder / "words.tsv", 1)
    return [Pair(word, tuple(word), tuple(word.upper()), origin) for word in WORDS]


def sound_model(backwards=False, pooling=2, **others):
    """Return a model of sound to the symbols A, B, C, DD that pools every two frames."""
    config = NetworkConfig(
        hidden_size=8,
        num_layers=2,
        prediction_size=8,
        pooling=pooling,
        backwards=backwards,
        **others,
    )
    features = FeatureSettings()
    statistics = Statistics(torch.full((features.size,), 2.0), torch.full((features.size,), 9.0))
    signature = Signature(
        Alphabet(["A", "B", "C", "DD"]), SPACES, features=features, statistics=statistics
    )
    return TrainedModel(sharp_network(config, features.size, 4), config, signature)


def speech_model(**settings):
    """Return a continuous transducer of random weights, from a, b, c and two speakers to sound."""
    config = NetworkConfig(
        "continuous", **{"hidden_size": 8, "prediction_size": 8, "num_components": 3} | settings
    )
    features = FeatureSettings("log_mel", SPOKEN_RATE, 0.04, num_channels=10, num_deltas=0)
    statistics = Statistics(torch.full((10,), -4.0), torch.full((10,), 3.0))
    sources = Alphabet(["a", "b", "c", "speaker=ann", "speaker=bob"])
    signature = Signature(
        Alphabet([]), SPACES, sources, SPACES, outputs=FrameOutputs(features, statistics, 2)
    )
    network = sharp_network(config, len(sources), signature.output_size)
    with torch.no_grad():
        network.transcription_network.output.bias[NULL] -= 4  # null is not likely
    return TrainedModel(network, config, signature)


def speech_pairs(folder):
    """Write a sound file; return its pair, one whose file is missing, and one without sound."""
    path = folder / "said.wav"
    path.write_bytes(wav_bytes(sound(rate=SPOKEN_RATE), SPOKEN_RATE))
    origin, said = Origin(folder / "said.jsonl", 1), ("speaker=bob", "a", "b", "c", "a")
    return [
        Pair("said", Audio(path), said, origin),
        Pair("gone", Audio(folder / "gone.wav"), said[:3], origin),
        Pair("text", said[:2], (), origin),
    ]


def sound(seconds=0.6, rate=RATE, channels=1, frequency=440.0):
    """Return samples [N, channels] of a tone that grows louder."""
    time = np.arange(round(seconds * rate)) / rate
    tone = 0.5 * np.sin(2 * np.pi * frequency * time) * np.linspace(0.1, 1, len(time))
    return np.repeat(tone[:, None], channels, 1).astype(np.float32)


def wav_bytes(samples, rate=RATE, subtype="FLOAT"):
    content = io.BytesIO()
    soundfile.write(content, samples, rate, format="WAV", subtype=subtype)
    return content.getvalue()


def sound_pairs(folder):
    """Write a sound file; return its pair and one whose file is missing."""
    path = folder / "tone.wav"
    path.write_bytes(wav_bytes(sound()))
    origin = Origin(folder / "sounds.jsonl", 1)
    gone = Audio(folder / "gone.wav")
    return [
        Pair("tone", Audio(path), ("A", "DD"), origin),
        Pair("gone", gone, ("B",), origin),
    ]


def told(response, status=400):
    """Return the message of an error response."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["message"] and "Traceback" not in response.text
    return response.json()["message"]


@contextmanager
def serving(explorer):
    """Run a server in this process; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = ExplorerServer(explorer)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def launched_browser(*options):
    """Run a Chromium that plays sound without a click; yield it."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required", *options]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@contextmanager
def opened_pages(browser):
    """Yield a function that opens pages; fail at the end if a script reports an error."""
    contexts, complaints = [], []

    def make(address, width=1200, **options):
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, accept_downloads=True, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.goto(address)
        return page

    yield make
    for context in contexts:
        context.close()
    # A browser reports any answer of 4xx, which the page turns into a sentence.
    assert [c for c in complaints if "Failed to load resource" not in c] == []


def settled(page):
    """Wait until the page shows what the server says of the node at the crosshair."""
    page.wait_for_function(
        "() => { const d = document.getElementById('figure').dataset;"
        " return d.t !== undefined && d.sensitivity === `${d.t},${d.u}`; }"
    )


def next_frames(page):
    """Wait until what was asked for has been drawn: in the next frame, or in the one after it."""
    page.evaluate(
        "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
    )


def watch_playback(page):
    """Play the sound, and check that its cursor moves, and rests at the end."""
    # At a tenth of the speed it lasts until it is looked at.
    page.evaluate(
        """() => {
            const { play } = HTMLMediaElement.prototype;
            HTMLMediaElement.prototype.play = function () {
                this.playbackRate = 0.1;
                window.played = this;
                return play.call(this);
            };
        }"""
    )
    page.click("#play")
    expect(page.locator("#play")).to_have_text("Pause")
    page.wait_for_function("() => Number(document.getElementById('figure').dataset.cursor) > 5")
    expect(page.locator("#play")).to_have_text("Pause")
    page.evaluate("() => { played.playbackRate = 1; }")
    expect(page.locator("#play")).to_have_text("Play")


def words_of(page):
    """Redraw the figure; return every text in it with its left, right and y."""
    return page.evaluate(
        """async () => {
            const words = [];
            const { prototype } = CanvasRenderingContext2D;
            const write = prototype.fillText;
            prototype.fillText = function (text, x, y) {
                const { width } = this.measureText(text);
                const left = x - width * { left: 0, center: 0.5, right: 1 }[this.textAlign];
                words.push([text, left, left + width, y]);
                write.call(this, text, x, y);
            };
            window.dispatchEvent(new Event("resize"));
            await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
            prototype.fillText = write;
            return words;
        }"""
    )
