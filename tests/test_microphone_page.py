"""Record with the explorer's page in a real browser, whose microphone plays a file."""

import json
import time
from contextlib import contextmanager

import numpy as np
import pytest
import soundfile
from explored import (
    PATIENCE,
    RATE,
    launched_browser,
    needs_chromium,
    serving,
    sound,
    sound_model,
    sound_pairs,
)
from playwright.sync_api import expect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from transduce.model.model import Model
from transduce.web import explorer as exploring
from transduce.web import microphone
from transduce.web.explorer import Explorer
from transduce.web.recording import Recording
from transduce.web.wire import unpack

TONES = np.concatenate([sound(0.4, frequency=f)[:, 0] for f in (300, 900, 500, 1500, 700)])
SAMPLES = (32767 * TONES).astype("<i2")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    model = sound_model(bidirectional=False)
    explorer = Explorer(model, sound_pairs(tmp_path_factory.mktemp("sound")), "live")
    with serving(explorer) as address:
        yield explorer, address


# --- The server ---------------------------------------------------------------------------------


def opened(address, **options):
    return connect(f"{address.replace('http', 'ws')}api/recording", **options)


def until(condition, seconds=10):
    """Wait until a condition is met."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def said(stream):
    """Return the next message of the server."""
    return json.loads(stream.recv(20))


def refused(stream):
    """Return the error with which the server ends a recording, and the code."""
    answer = said(stream)
    while answer["type"] != "error":
        answer = said(stream)
    with pytest.raises(ConnectionClosed):
        stream.recv(20)
    return answer["message"], stream.close_code


def test_partial_transcripts_are_those_of_the_library(live):
    explorer, address = live
    stream = Model.of(explorer.model).stream(beam_width=4)
    stable, unstable = [], []
    with opened(address) as socket:
        begin = said(socket)
        assert begin["type"] == "begin"
        content = SAMPLES.tobytes()
        for start in range(0, len(content), 999):  # which cuts samples in two
            socket.send(content[start : start + 999])
        expected = stream.accept(SAMPLES)
        while [*stable, *unstable] != [*expected.stable.symbols, *expected.unstable.symbols]:
            message = said(socket)
            stable += [phone["symbol"] for phone in message["stable"]]
            unstable = [phone["symbol"] for phone in message["unstable"]]
        recording = explorer.inputs[begin["input"]]
        until(lambda: len(recording.wave()) == len(SAMPLES))
        heard = recording.wave()
        assert np.array_equal(heard.numpy() * 32768, SAMPLES)
        symbols = [*stable, *unstable]
        header, arrays = unpack(explorer.lattice(begin["input"], tuple(symbols)))
        assert header["target"] == symbols and len(arrays["transcription"]) == 99
    assert len(symbols) > 3


def test_a_recording_has_no_samples_before_the_first_message(live):
    explorer, _ = live
    assert len(Recording(Model.of(explorer.model), RATE, 1.0).wave()) == 0


def test_a_recording_is_forgotten_when_the_page_goes(live):
    explorer, address = live
    with opened(address) as socket:
        name = said(socket)["input"]
        socket.send(SAMPLES.tobytes())
        socket.socket.close()
    until(lambda: name not in explorer.inputs.things)
    with pytest.raises(exploring.Gone):
        explorer.lattice(name, ())


@pytest.mark.parametrize(
    "message, sentence",
    [
        ("hello", "a recording is binary messages of samples; send those"),
        (bytes(2 * RATE), "the recording is longer than 0.9 seconds; record a shorter one"),
        (None, "nothing came for 0.2 seconds; record again"),
    ],
)
def test_a_bad_recording_is_refused_in_a_sentence(live, monkeypatch, message, sentence):
    _, address = live
    monkeypatch.setattr(exploring, "MAX_SECONDS", 0.9)
    monkeypatch.setattr(microphone, "IDLE_SECONDS", 30 if message else 0.2)
    with opened(address) as socket:
        if message is not None:
            socket.send(message)
        assert refused(socket) == (sentence, 1008)


def test_more_recordings_than_allowed_are_refused(live, monkeypatch):
    _, address = live
    monkeypatch.setattr(exploring, "MAX_RECORDINGS", 1)
    with opened(address) as first:
        said(first)
        with opened(address) as second:
            assert refused(second) == ("1 pages record already; stop one of them", 1008)


def test_a_failure_is_a_sentence_and_the_server_goes_on(live, monkeypatch, capsys):
    _, address = live
    with monkeypatch.context() as patched, opened(address) as socket:
        patched.setattr(Recording, "accept", lambda *_: 1 / 0)
        socket.send(b"\0\0")
        assert refused(socket) == ("the server failed; its terminal shows the error", 1011)
    assert "ZeroDivisionError" in capsys.readouterr().err
    with opened(address) as socket:
        assert said(socket)["type"] == "begin"


def test_pages_of_other_sites_may_not_record(live):
    _, address = live
    with pytest.raises(InvalidStatus) as error:
        opened(address, origin="http://evil.example")
    assert error.value.response.status_code == 403


def test_a_model_that_needs_the_whole_sound_does_not_stream(live, tmp_path):
    assert live[0].description()["streams"] is True
    explorer = Explorer(sound_model(), sound_pairs(tmp_path), "whole")
    assert explorer.description()["streams"] is False
    with serving(explorer) as address, opened(address) as socket:
        message, _ = refused(socket)
        assert "the model is bidirectional and needs the whole input" in message


# --- The page -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    heard = tmp_path_factory.mktemp("microphone") / "tones.wav"
    soundfile.write(heard, TONES, RATE)
    file = f"--use-file-for-fake-audio-capture={heard}"
    with launched_browser("--use-fake-device-for-media-stream", file) as browser:
        yield browser


@contextmanager
def page_at(browser, address, script="", permissions=("microphone",)):
    """Open the page; fail if a script reports an error."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.grant_permissions(list(permissions))
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.add_init_script(script)
    page.goto(address)
    expect(page.locator("#record")).to_be_visible()
    expect(page.locator("body:not(.busy) #input-name")).to_have_text("tone")
    yield page
    context.close()
    assert complaints == []


@needs_chromium
def test_the_lattice_grows_while_the_microphone_records(live, browser):
    explorer, address = live
    with page_at(browser, address) as page:
        assert "while you speak, 60 s at most" in page.get_attribute("#record", "title")
        drawn = []
        page.on(
            "response",
            lambda answer: answer.url.endswith("api/lattice") and drawn.append(answer),
        )
        page.click("#record")
        expect(page.locator("#record")).to_have_text("Stop (3 s)")
        expect(page.locator("#input-name")).to_have_text("the recording")
        assert page.locator("#figure").is_visible() and not page.locator("#search").is_visible()
        assert "the recording" in page.inner_text("#seen")
        shown = page.locator("#hypotheses .symbols").inner_text().split()
        assert shown and set(shown) <= {"A", "B", "C", "DD"}
        page.click("#share")
        expect(page.locator("#message p")).to_have_text("Stop the recording to copy its address.")
        page.click("#record")
        expect(page.locator("body:not(.busy) #input-name")).to_have_text("recording.wav")
        expect(page.locator("#record")).to_have_text("Record")
        expect(page.locator("#play")).to_be_visible()
        sizes = [unpack(answer.body())[1]["transcription"].shape[0] for answer in drawn]
        assert len(sizes) >= 3 and sizes == sorted(set(sizes))
        page.wait_for_function("() => location.hash.includes('sound=recording.wav')")
        opened = next(reversed(explorer.inputs.things.values()))
        assert len(opened.wave) > 3 * RATE and float(opened.wave.abs().max()) > 0.05
        [best, *_] = Model.of(explorer.model)(opened.wave, beam_width=20, n_best=8).hypotheses
        symbols = explorer.model.signature.targets.decode(best.labels)
        assert page.locator("#hypotheses .symbols").first.inner_text().split() == symbols


@needs_chromium
def test_a_model_that_needs_the_whole_sound_records_first(browser, tmp_path):
    explorer = Explorer(sound_model(), sound_pairs(tmp_path), "whole")
    with serving(explorer) as address, page_at(browser, address) as page:
        sockets = []
        page.on("websocket", lambda socket: sockets.append(socket))
        assert "needs the whole sound" in page.get_attribute("#record", "title")
        page.click("#record")
        expect(page.locator("#record")).to_have_text("Stop (1 s)")
        expect(page.locator("#input-name")).to_have_text("tone")
        page.click("#record")
        expect(page.locator("body:not(.busy) #input-name")).to_have_text("recording.wav")
        assert sockets == []


REJECTED = """navigator.mediaDevices.getUserMedia = async () => {
    throw new DOMException("", "NAME");
};"""


@needs_chromium
@pytest.mark.parametrize(
    "script, permissions, sentence",
    [
        ("", (), "The browser does not allow the microphone; allow it, and record again."),
        (
            REJECTED.replace("NAME", "NotFoundError"),
            ("microphone",),
            "There is no microphone; connect one, or choose a sound file.",
        ),
        (
            REJECTED.replace("NAME", "AbortError"),
            ("microphone",),
            "The microphone cannot be used (AbortError).",
        ),
        (
            "Object.defineProperty(navigator, 'mediaDevices', { value: undefined });",
            ("microphone",),
            "The microphone works only on localhost or over https; open the page there.",
        ),
    ],
    ids=["permission", "none", "other", "insecure"],
)
def test_a_missing_microphone_is_one_sentence(live, browser, script, permissions, sentence):
    with page_at(browser, live[1], script, permissions) as page:
        page.click("#record")
        shown = f"{sentence} The page still shows tone."
        expect(page.locator("#message.problem p")).to_have_text(shown)
        expect(page.locator("#record")).to_have_text("Record")
        expect(page.locator("#input-name")).to_have_text("tone")


@needs_chromium
def test_a_stream_that_the_server_ends_is_told_and_its_sound_is_kept(live, browser, monkeypatch):
    accept = Recording.accept

    def failing(self, content):
        if self.utterances.stream.seconds > 1.5:
            raise ValueError("the recording must end here; record again")
        return accept(self, content)

    monkeypatch.setattr(Recording, "accept", failing)
    with page_at(browser, live[1]) as page:
        page.click("#record")
        problem = page.locator("#message.problem p")
        expect(problem).to_have_text("The recording must end here; record again.")
        expect(page.locator("body:not(.busy) #input-name")).to_have_text("recording.wav")
        expect(page.locator("#record")).to_have_text("Record")


@needs_chromium
def test_a_recording_that_cannot_begin_leaves_the_page_as_it_is(live, browser, monkeypatch):
    monkeypatch.setattr(exploring, "MAX_RECORDINGS", 0)
    with page_at(browser, live[1]) as page:
        page.click("#record")
        problem = page.locator("#message.problem p")
        expect(problem).to_have_text(
            "0 pages record already; stop one of them. The page still shows tone."
        )
        expect(page.locator("#record")).to_have_text("Record")


@needs_chromium
def test_the_longest_recording_stops_by_itself(live, browser, monkeypatch):
    explorer, address = live
    monkeypatch.setattr(exploring, "MAX_SECONDS", 2)
    with page_at(browser, address) as page:
        page.click("#record")
        expect(page.locator("body:not(.busy) #input-name")).to_have_text("recording.wav")
        opened = next(reversed(explorer.inputs.things.values()))
        assert len(opened.wave) == 2 * RATE


@needs_chromium
def test_another_input_ends_a_recording(live, browser):
    with page_at(browser, live[1]) as page:
        page.click("#record")
        expect(page.locator("#input-name")).to_have_text("the recording")
        page.locator("#examples strong", has_text="tone").first.click()
        expect(page.locator("body:not(.busy) #input-name")).to_have_text("tone")
        expect(page.locator("#record")).to_have_text("Record")
        page.wait_for_timeout(1500)
        expect(page.locator("#input-name")).to_have_text("tone")
