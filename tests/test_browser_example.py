"""Use the example page, which runs exported models in the browser, in a real one."""

import json
import threading
from dataclasses import asdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import soundfile
import torch
from explored import CHROMIUM, PATIENCE, launched_browser
from melodies import RATE, melody
from playwright.sync_api import expect
from torch.testing import assert_close

from transduce.audio.features import Features, FeatureSettings
from transduce.export import export_onnx
from transduce.model.model import load

pytest.importorskip("onnx")
PAGE = Path(__file__).parent.parent / "examples" / "browser"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium"),
    pytest.mark.skipif(
        not (PAGE / "node_modules").is_dir(),
        reason="onnxruntime-web is missing; npm install in examples/browser",
    ),
]
WORDS = ["transducer", "sequence", "café", "O'Neill", "rhythm", "Worcester", "x"]


class Handler(SimpleHTTPRequestHandler):
    """A static server of the page, with the models in a folder of their own."""

    def __init__(self, *arguments, models, **options):
        self.models = models
        super().__init__(*arguments, directory=str(PAGE), **options)

    def translate_path(self, path):
        name = path.removeprefix("/models/")
        return super().translate_path(path) if name == path else str(self.models / name)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of the page, with both models exported."""
    models = tmp_path_factory.mktemp("models")
    for name in ("english-pronouncer", "english-phone-recogniser"):
        export_onnx(load(name), models / name, int8=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, models=models))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def page(address, tmp_path_factory):
    """The page, in a browser whose microphone plays melodies."""
    heard = tmp_path_factory.mktemp("microphone") / "melody.wav"
    soundfile.write(heard, torch.cat([melody(seed)[0] for seed in range(4)]).numpy(), RATE)
    microphone = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")
    file = f"--use-file-for-fake-audio-capture={heard}"
    with launched_browser(*microphone, file) as browser:
        page = browser.new_page(viewport={"width": 900, "height": 620})
        page.set_default_timeout(PATIENCE)
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        yield page
    assert complaints == []


def test_words_are_pronounced_as_in_python(page):
    pronounce = load("english-pronouncer")
    expected = "  ·  ".join(str(pronounce(word)) for word in WORDS)
    page.fill("#word", ", ".join(WORDS) + "!")
    expect(page.locator("#phonemes")).to_have_text(expected)


def test_a_letter_that_the_model_lacks_is_named(page):
    page.fill("#word", "ж")
    expect(page.locator("#word-status.error")).to_have_text(
        "the model does not know ж; write a word"
    )
    page.fill("#word", "fine")
    expect(page.locator("#phonemes")).to_have_text("F AY N")
    expect(page.locator("#word-status.error")).to_have_count(0)


@pytest.mark.parametrize(
    "settings",
    [
        FeatureSettings(num_deltas=2),
        FeatureSettings(kind="log_mel", num_channels=40, num_deltas=0),
        FeatureSettings(kind="sherpa", num_channels=80, num_deltas=0),
        FeatureSettings(kind="sherpa_streaming", num_channels=80, num_deltas=0),
    ],
    ids=lambda settings: settings.kind,
)
def test_frames_are_ours_to_a_thousandth(page, settings):
    wave, _ = melody(3)
    described = asdict(settings) | {"convention": asdict(settings.convention)}
    script = """async ([features, samples]) => {
        const { frameComputer } = await import("./features.js");
        const { data, T, size } = frameComputer(JSON.parse(features))(Float32Array.from(samples));
        return [[...data], T, size];
    }"""
    data, T, size = page.evaluate(script, [json.dumps(described), wave.tolist()])
    ours = Features(settings)(wave[None])[0][0]
    assert list(ours.shape) == [T, size]
    assert_close(torch.tensor(data).view(T, size), ours, atol=1e-3, rtol=0)


def test_the_microphone_is_recognised_as_in_python(page):
    page.click("#record")
    expect(page.locator("#record")).to_have_text("Stop")
    page.wait_for_function("document.getElementById('level').value > 0.02")
    page.wait_for_timeout(2500)
    page.click("#record")
    expect(page.locator("#sound-status")).to_contain_text("phones in")
    samples = torch.tensor(page.evaluate("[...window.heard]"))
    assert len(samples) > 2 * RATE and float(samples.abs().max()) > 0.05
    expected = load("english-phone-recogniser")(samples)
    assert len(expected.symbols) > 0
    assert page.locator("#phones span").all_text_contents() == list(expected.symbols)


def test_a_file_is_recognised_as_in_python_and_a_bad_one_is_named(page, tmp_path):
    wave = melody(7, 6)[0]
    soundfile.write(tmp_path / "a.wav", wave.numpy(), RATE, subtype="FLOAT")
    page.set_input_files("#file", tmp_path / "a.wav")
    expect(page.locator("#sound-status")).to_contain_text("phones in 1.")
    expected = load("english-phone-recogniser")(wave)
    assert page.locator("#phones span").all_text_contents() == list(expected.symbols)
    (tmp_path / "bad.wav").write_bytes(b"nothing")
    page.set_input_files("#file", tmp_path / "bad.wav")
    expect(page.locator("#sound-status.error")).to_have_text(
        "bad.wav is no sound that this browser reads"
    )


def test_a_model_that_was_not_exported_is_named(page):
    script = """async () => {
        const { load } = await import("./transducer.js");
        return load("models/none").catch((error) => error.message);
    }"""
    assert page.evaluate(script) == (
        "there is no models/none/model.json; export a model to models/none"
    )
