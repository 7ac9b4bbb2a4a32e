"""The server of the explorer: its answers match the library, and its errors are one sentence."""

import dataclasses
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile
import torch
from explored import (
    BODIES,
    HERE,
    JSON,
    ODD,
    RATE,
    serving,
    sound,
    sound_model,
    sound_pairs,
    text_model,
    text_pairs,
    told,
    wav_bytes,
)
from fastapi.testclient import TestClient
from melodies import melody

from transduce import cli
from transduce.alignment.align import Aligner, Task
from transduce.analysis import sensitivity, view_lattice
from transduce.architectures import NetworkConfig, build_network
from transduce.data.pairs import Frames, Origin, Pair
from transduce.decoding import beam_search_steps
from transduce.decoding.options import SearchOptions
from transduce.http import connections
from transduce.http.connections import listen
from transduce.http.hosts import names_this_server
from transduce.http.sounds import decode_sound
from transduce.model.checkpoint import TrainedModel, save_model
from transduce.model.model import load, search_examples
from transduce.web import explorer as exploring
from transduce.web import server as http_server
from transduce.web.explorer import Explorer
from transduce.web.server import create_app
from transduce.web.wire import pack, unpack

ROOT = Path(__file__).parent.parent


def client_of(explorer, **options):
    return TestClient(create_app(explorer, **options), base_url=HERE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Explorer(text_model(), text_pairs(tmp_path_factory.mktemp("text")), "letters")


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    return Explorer(sound_model(), sound_pairs(tmp_path_factory.mktemp("sound")), "speech")


@pytest.fixture(scope="module")
def phones():
    return Explorer(load("english-phone-recogniser"), (), "phones")


MELODY = melody(2)[0]  # the recogniser hears nearly "fall of" in it


def opened(client, text="cab"):
    return client.post("/api/text", json={"text": text}).json()


def sent(client, content, name="a.wav"):
    return client.post("/api/sound", params={"name": name}, content=content)


# --- Answers ------------------------------------------------------------------------------------


def test_the_server_serves_the_page_and_its_files_and_nothing_else(text):
    client = client_of(text)
    page = client.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    files = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    scripts = {path.name for path in (ROOT / "transduce/web").glob("*.js")}
    assert {"main.js", "style.css", "icon.svg"} == files and len(scripts) > 5
    for name in files | scripts:
        assert client.get(f"/{name}").status_code == 200
    for path in ("/server.py", "/__init__.py", "/..%2fcli.py", "/%2fetc%2fpasswd", "/docs"):
        assert "nothing at" in told(client.get(path), 404)


def test_the_page_loads_nothing_from_other_servers():
    for path in (ROOT / "transduce/web").iterdir():
        if path.suffix in (".html", ".js", ".css"):
            addresses = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text()))
            assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


def test_the_model_and_its_examples_are_described(text):
    client = client_of(text)
    model = client.get("/api/model").json()
    assert model["kind"] == "text" and model["symbols"] == ["A", "B", "C", "DD"]
    listed = client.get("/api/examples").json()
    assert listed["count"] == model["num_examples"] == len(text.pairs)
    found = client.get("/api/examples", params={"search": "BB a"}).json()
    assert [e["name"] for e in found["examples"]] == ["abba", "cabbac"]
    assert [e["index"] for e in found["examples"]] == [3, 4]
    assert found["examples"][0]["target"] == ["A", "B", "B", "A"]
    later = client.get("/api/examples", params={"first": 5}).json()
    assert [e["index"] for e in later["examples"]] == [5, 6]


def test_the_outputs_of_an_example_match_the_library(text):
    answer = client_of(text).post("/api/example", json={"index": 2}).json()
    assert answer["name"] == "bacca" and answer["target"] == list("BACCA")
    [example] = text.model.signature.examples([text.pairs[2]], with_labels=False)
    options = SearchOptions(beam_width=20, n_best=8, with_timings=False)
    [expected] = search_examples(text.model, [example], options)
    decode = text.model.signature.targets.decode
    assert [h["symbols"] for h in answer["hypotheses"]] == [decode(h.labels) for h in expected]
    for h, e in zip(answer["hypotheses"], expected, strict=True):
        assert h["log_prob"] == pytest.approx(e.log_prob)


def test_the_packed_lattice_matches_the_library(text):
    client = client_of(text)
    query = {"input": opened(client)["input"], "target": ["C", "DD"]}
    header, arrays = unpack(client.post("/api/lattice", json=query).content)
    frames = text.model.signature.example("cab").frames
    view = view_lattice(text.model, frames, [3, 4])
    for name in ("transcription", "prediction", "log_alpha", "log_beta", "log_product"):
        expected = getattr(view, name).numpy().astype(np.float32)
        assert np.array_equal(arrays[name], expected), name
    assert header["log_likelihood"] == view.log_likelihood
    assert [tuple(node) for node in header["best_path"]] == list(view.best_path)
    assert [t["frame"] for t in header["timings"]] == [t.frame for t in view.timings]
    assert header["source"] == list("cab") and arrays["picture"].shape == (3, 0)
    query = {"view": header["view"], "t": 1, "u": 1}
    header, arrays = unpack(client.post("/api/sensitivity", json=query).content)
    for what, expected in sensitivity(text.model, view, 1, 1)._asdict().items():
        assert np.abs(arrays[what]).max() == 1
        found = header["largest"][what] * arrays[what].astype(float)
        assert np.allclose(found, expected.numpy(), rtol=1e-6, atol=0)


def test_the_empty_target_has_a_lattice_too(text):
    client = client_of(text)
    query = {"input": opened(client)["input"], "target": []}
    header, arrays = unpack(client.post("/api/lattice", json=query).content)
    assert arrays["log_alpha"].shape == (3, 1) and header["timings"] == []
    query = {"view": header["view"], "t": 0, "u": 0}
    _, arrays = unpack(client.post("/api/sensitivity", json=query).content)
    assert arrays["outputs"].shape == (0, 4)


def searched(client, name, beam_width):
    """Return all steps of a search, as the page asks for them."""
    query = {"input": name, "beam_width": beam_width}
    begun = client.post("/api/search", json=query).json()
    steps = []
    while len(steps) <= begun["num_vectors"]:
        more = client.post("/api/steps", json={"search": begun["search"]}).json()["steps"]
        assert more
        steps += more
    assert client.post("/api/steps", json={"search": begun["search"]}).json() == {"steps": []}
    return steps


@pytest.mark.parametrize("seconds", [0.0, 9.0], ids=["in parts", "at once"])
def test_the_search_frame_by_frame_matches_the_library(text, monkeypatch, seconds):
    monkeypatch.setattr(exploring, "STEPS_SECONDS", seconds)
    client = client_of(text)
    found_steps = searched(client, opened(client)["input"], 3)
    frames = text.model.signature.example("cab").frames
    steps = list(beam_search_steps(text.model.network, frames, 3))
    assert len(found_steps) == len(steps) == 4
    for found, expected in zip(found_steps, steps, strict=True):
        assert [h[0] for h in found] == [list(y.labels) for y in expected]
        assert [h[1] for h in found] == [y.log_prob for y in expected]
        assert [len(h[2]) for h in found] == [len(y.flows) for y in expected]


def test_a_transducer_that_reads_backwards_is_shown_in_forward_time(tmp_path):
    explorer = Explorer(sound_model(backwards=True, pooling=3), sound_pairs(tmp_path), "back")
    client = client_of(explorer)
    assert client.get("/api/model").json()["backwards"]
    answer = client.post("/api/example", json={"index": 0}).json()
    query = {"input": answer["input"], "target": ["A", "DD"]}
    header, arrays = unpack(client.post("/api/lattice", json=query).content)
    frames = explorer.model.signature.example(torch.from_numpy(sound()[:, 0])).frames
    view = view_lattice(explorer.model, frames, [1, 4])
    assert header["backwards"] and header["first_frame"] == view.first_frame(0) == 58 - 60
    assert np.allclose(arrays["log_product"], view.log_product, atol=1e-5)
    query = {"view": header["view"], "t": 3, "u": 1}
    _, arrays = unpack(client.post("/api/sensitivity", json=query).content)
    assert (arrays["outputs"][0] == 0).all() and (arrays["outputs"][1] != 0).all()
    found_steps = searched(client, answer["input"], 3)
    steps = list(beam_search_steps(explorer.model.network, frames, 3))
    for found, expected in zip(found_steps, steps, strict=True):
        assert [h[0] for h in found] == [list(y.labels[::-1]) for y in expected]
        emitted = [[flow[1] for flow in h[2]] for h in found]
        assert emitted == [[list(flow.emitted[::-1]) for flow in y.flows] for y in expected]


def test_a_sound_that_was_sent_is_decoded_shown_and_played(heard):
    client = client_of(heard)
    answer = sent(client, wav_bytes(sound()), "../tone.wav").json()
    assert answer["name"] == "../tone.wav" and answer["has_sound"]
    played = client.get(f"/api/sound/{answer['input']}")
    assert played.headers["content-type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(played.content))
    assert rate == RATE and np.abs(samples - sound()[:, 0]).max() < 1e-4
    query = {"input": answer["input"], "target": ["A"]}
    header, arrays = unpack(client.post("/api/lattice", json=query).content)
    frames = heard.model.signature.example(torch.from_numpy(sound()[:, 0])).frames
    view = view_lattice(heard.model, frames, [1])
    assert np.allclose(arrays["log_alpha"], view.log_alpha, atol=1e-5)
    assert len(arrays["picture"]) == len(frames) == 58 and len(arrays["transcription"]) == 29
    # The tone is in the spectrogram where a mel filter of its frequency is.
    assert arrays["picture"].mean(0).argmax() == pytest.approx(64 * 549 / 2840, abs=2)
    assert header["source"] is None


def test_an_example_of_sound_is_read_from_its_file(heard):
    client = client_of(heard)
    answer = client.post("/api/example", json={"index": 0}).json()
    again = sent(client, wav_bytes(sound())).json()
    assert answer["hypotheses"] == again["hypotheses"] and answer["target"] == ["A", "DD"]
    message = told(client.post("/api/example", json={"index": 1}))
    assert "gone.wav" in message and "check the path" in message


def test_frames_that_were_computed_elsewhere_are_shown_as_they_are(tmp_path):
    model = sound_model()
    model = TrainedModel(
        model.network, model.config, dataclasses.replace(model.signature, features=None)
    )
    frames = np.random.default_rng(0).normal(size=(9, 26)).astype(np.float32)
    np.save(tmp_path / "frames.npy", frames)
    pair = Pair("nine", Frames(tmp_path / "frames.npy"), ("A",), Origin(tmp_path / "m.jsonl", 1))
    client = client_of(Explorer(model, [pair], "frames"))
    assert client.get("/api/model").json()["kind"] == "frames"
    name = client.post("/api/example", json={"index": 0}).json()["input"]
    answer = client.post("/api/lattice", json={"input": name, "target": ["A"]})
    picture = unpack(answer.content)[1]["picture"]
    assert np.allclose(picture, (frames - 2) / 9, atol=1e-6)
    assert "does not take sound" in told(sent(client, wav_bytes(sound())))


def test_the_alignment_of_a_text_matches_the_library(phones):
    client = client_of(phones)
    assert client.get("/api/model").json()["aligns"]
    name = sent(client, wav_bytes(MELODY[:, None].numpy()), "fall.wav").json()["input"]
    answer = client.post("/api/alignment", json={"input": name, "text": "Fall of, uh"}).json()
    [expected] = Aligner(phones.model).align_many([Task(MELODY, "Fall of, uh", name="fall.wav")])
    assert answer == json.loads(json.dumps(expected.as_json()))
    assert [word["word"] for word in answer["words"]] == ["Fall", "of", "uh"]
    assert answer["input"] == "fall.wav" and answer["path"] is None


def test_other_rates_and_channels_are_converted(heard):
    limits = {"max_bytes": exploring.MAX_BYTES, "max_seconds": exploring.MAX_SECONDS}
    for rate in (8_000, 44_100, 48_000):
        content = wav_bytes(sound(0.5, rate, channels=2, frequency=300.0), rate)
        wave = decode_sound(content, "a.wav", RATE, **limits).numpy()
        expected = sound(0.5, RATE, frequency=300.0)[:, 0]
        assert len(wave) == len(expected)
        middle = slice(800, -800)  # resampling rings at the ends
        assert np.abs(wave - expected)[middle].max() < 0.01


def test_a_sound_may_have_eight_channels():
    content = wav_bytes(sound(0.1, channels=8))
    wave = decode_sound(content, "a.wav", RATE, max_bytes=10**6, max_seconds=1)
    assert len(wave) == 0.1 * RATE


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "a.wav is not sound that can be read; send a WAV"),
        (b"RIFF\0\0\0\0WAVEfmt no more", "not sound that can be read"),
        (bytes(range(256)) * 400, "not sound that can be read"),
        (b"<html>hello</html>", "not sound that can be read"),
        (wav_bytes(sound(0.02)), "a.wav is shorter than one window of 25 ms"),
        (wav_bytes(sound(0.0)), "a.wav is shorter than one window of 25 ms"),
        (wav_bytes(np.full((RATE, 1), np.nan, np.float32)), "samples that are not finite"),
        (wav_bytes(np.zeros((61 * 1000, 1)), 1000), "longer than 60 seconds"),
        (wav_bytes(np.zeros((100, 9), np.float32)), "9 channels; mix them into one"),
        (wav_bytes(np.zeros((100, 1), np.float32), 100), "100 samples a second; convert it"),
        (wav_bytes(np.zeros((9000, 1), np.float32), 44_101), "too little in common; convert it to"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_a_bad_sound_file_is_refused_in_a_sentence(heard, content, words):
    assert words in told(sent(client_of(heard), content))


def test_a_truncated_wav_file_is_read_to_its_end(heard):
    whole = wav_bytes(sound())
    assert sent(client_of(heard), whole[: len(whole) // 2]).status_code == 200


def test_a_body_that_is_too_large_is_not_read(heard, monkeypatch):
    client = client_of(heard)
    large = b"\0" * (exploring.MAX_BYTES + 1)
    assert "larger than 20 MB" in told(sent(client, large), 413)
    stream = (b"part" for _ in range(3))  # sent without Content-Length
    assert "no Content-Length" in told(client.post("/api/sound", content=stream), 411)


def test_a_target_with_an_unknown_symbol_is_refused_by_its_name(text):
    client = client_of(text)
    query = {"input": opened(client)["input"], "target": ["A", "Q"]}
    message = told(client.post("/api/lattice", json=query))
    assert message == "'Q' is not a symbol of the model; it has A B C DD"


def test_unknown_source_symbols_are_named_in_a_note(text):
    assert opened(client_of(text), "cxb")["notes"] == [
        "x was not in the training data, and counts as nothing."
    ]
    assert opened(client_of(text), "xcyzb")["notes"] == [
        "x, y and z were not in the training data, and count as nothing."
    ]
    assert opened(client_of(text))["notes"] == []


def test_inputs_and_targets_that_are_too_long_are_refused(text, heard, monkeypatch):
    client = client_of(text)
    assert "at most 300 can be shown" in told(client.post("/api/text", json={"text": "a" * 301}))
    name = opened(client)["input"]
    monkeypatch.setattr(exploring, "MAX_CELLS", 30)
    query = {"input": name, "target": ["A"] * 10}
    assert "3 by 11 is too large" in told(client.post("/api/lattice", json=query))
    query = {"input": name, "target": ["A"] * (exploring.MAX_LABELS + 1)}
    message = told(client.post("/api/lattice", json=query))
    assert message == "the target has 1001 labels; at most 1000 can be shown"
    monkeypatch.setattr(exploring, "MAX_FRAMES", 2)
    assert "cab has 3 frames; at most 2 can be shown" in told(
        client.post("/api/text", json={"text": "cab"})
    )
    monkeypatch.setattr(exploring, "MAX_STEPS", 2)
    query = {"input": name, "beam_width": 3}
    assert "3 frames; at most 2 can be shown" in told(client.post("/api/search", json=query))


def test_invalid_requests_are_refused_in_a_sentence(text, heard):
    client, name = client_of(text), opened(client_of(text))["input"]
    post = client.post
    assert "no example 99" in told(post("/api/example", json={"index": 99}))
    assert "no example -1" in told(post("/api/example", json={"index": -1}))
    assert "index cannot be read" in told(post("/api/example", json={"index": "../x"}), 422)
    message = told(post("/api/text", content=b"{not json", headers=JSON), 422)
    assert message == "the body is not JSON; send an object"
    assert "text cannot be read" in told(post("/api/text", json={}), 422)
    assert "the text is empty" in told(post("/api/text", json={"text": "  "}))
    for width in (0, 21):
        query = {"input": name, "beam_width": width}
        assert "between 1 and 20" in told(post("/api/search", json=query))
    view = unpack(post("/api/lattice", json={"input": name, "target": ["A"]}).content)[0]["view"]
    for t, u in ((3, 0), (0, 2), (-1, 0)):
        query = {"view": view, "t": t, "u": u}
        assert f"no node {t},{u}" in told(post("/api/sensitivity", json=query))
    assert "no sound" in told(client.get(f"/api/sound/{name}"))
    assert "does not take sound" in told(sent(client, wav_bytes(sound())))
    assert "takes sound" in told(client_of(heard).post("/api/text", json={"text": "a"}))
    assert "nothing at /api/nothing" in told(client.get("/api/nothing"), 404)
    assert "nothing at" in told(client.get("/api/text"), 405)


def test_a_text_that_cannot_be_aligned_is_refused_in_a_sentence(phones, text, heard):
    client = client_of(phones)
    name = sent(client, wav_bytes(MELODY[:, None].numpy()), "../fall.wav").json()["input"]

    def refused(text, status=400, **others):
        query = {"input": name, "text": text, **others}
        return told(client.post("/api/alignment", json=query), status)

    assert refused(" \n") == "the text is empty; write the words that are said"
    assert "'--', word 2 of the text, has no letters" in refused("fall -- of")
    assert "'2', word 1 of the text, has a digit" in refused("2 falls")
    assert "more than can be said in 1.2 seconds" in refused("fall " * 30)
    other = refused("elephants")
    assert "../fall.wav: the sound does not fit the text; its phones sound like F" in other
    long = "a" * (exploring.MAX_LETTERS + 1)
    assert refused(long) == "the text has 3001 characters; at most 3000 can be aligned"
    assert "forgotten" in refused("fall", 410, input="/etc/passwd")
    for odd in ODD:
        query = {"input": name, "text": odd}
        answer = client.post("/api/alignment", content=json.dumps(query), headers=JSON)
        assert odd == "a" or 400 <= answer.status_code < 500  # "a" is a word, and may fit
    for explorer in (text, heard, Explorer(sound_model(backwards=True), heard.pairs, "back")):
        client = client_of(explorer)
        assert client.get("/api/model").json()["aligns"] is False
        name = client.post("/api/example", json={"index": 0}).json()["input"]
        assert "does not write the phones of English" in refused("a")


def test_frames_have_no_sound_to_align(phones, tmp_path):
    frames = np.zeros((50, phones.model.signature.input_size), np.float32)
    np.save(tmp_path / "frames.npy", frames)
    pair = Pair("nine", Frames(tmp_path / "frames.npy"), (), Origin(tmp_path / "m.jsonl", 1))
    client = client_of(Explorer(phones.model, [pair], "frames"))
    name = client.post("/api/example", json={"index": 0}).json()["input"]
    query = {"input": name, "text": "fall"}
    message = told(client.post("/api/alignment", json=query))
    assert message == "this input has no sound to align; choose a sound"


def test_a_request_for_an_input_that_is_no_longer_kept_says_so(text):
    client = client_of(text)
    first = opened(client)["input"]
    for _ in range(text.inputs.number):
        opened(client)
    query = {"input": first, "target": []}
    assert "forgotten" in told(client.post("/api/lattice", json=query), 410)
    assert len(text.inputs.things) == text.inputs.number


@pytest.mark.parametrize(
    "asked, host, answered",
    [
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("LOCALHOST:80", "127.0.0.1", True),
        ("[::1]:8000", "127.0.0.1", True),
        ("evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example:8000", "127.0.0.1", False),
        ("192.168.0.7:8000", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("[", "127.0.0.1", False),
        ("evil@127.0.0.1", "127.0.0.1", False),
        ("evil@127.0.0.1:8000", "127.0.0.1", False),
        ("127.0.0.1/evil", "127.0.0.1", False),
        ("127.0.0.1:80:80", "127.0.0.1", False),
        ("127.0.0.1:", "127.0.0.1", False),
        ("127.0.0.1:x", "127.0.0.1", False),
        ("127.0.0.1 ", "127.0.0.1", False),
        ("[127.0.0.1]", "127.0.0.1", False),
        ("[localhost]", "127.0.0.1", False),
        ("::1", "::1", False),
        ("[::1]", "::1", True),
        ("192.168.0.7:8000", "192.168.0.7", True),
        ("192.168.0.7:8000", "0.0.0.0", True),
        ("evil.example", "0.0.0.0", False),
    ],
)
def test_the_server_answers_only_for_its_own_names(asked, host, answered):
    assert names_this_server(asked, host) is answered


def test_pages_of_other_sites_get_no_answers(text):
    client = client_of(text)
    for path in ("/", "/api/model"):
        assert "evil.example" in told(client.get(path, headers={"Host": "evil.example"}), 403)
    others = ("http://evil.example", "http://127.0.0.1:9000", "null", "http://[", "", "http://")
    others += (f"http://evil@{HERE[7:]}", f"{HERE}/", f"ftp{HERE[4:]}", b"\xff")
    for origin in others:
        answer = client.post("/api/text", json={"text": "a"}, headers={"Origin": origin})
        assert "may not use this server" in told(answer, 403)
    own = client.post("/api/text", json={"text": "a"}, headers={"Origin": HERE})
    assert own.status_code == 200
    assert "default-src 'none'" in own.headers["content-security-policy"]


def test_an_internal_error_is_a_sentence_too(text, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(exploring, "view_lattice", broken)
    client = client_of(text)
    query = {"input": opened(client)["input"], "target": []}
    message = told(client.post("/api/lattice", json=query), 500)
    assert "secret" not in message and "terminal" in message
    said = capsys.readouterr().err
    assert "/api/lattice" in said and "secret detail" in said and "Traceback" not in said


def test_the_server_answers_while_the_model_computes(text):
    client = client_of(text)
    answers = []
    with text.lock:
        working = threading.Thread(target=lambda: answers.append(opened(client)))
        working.start()
        assert client.get("/").status_code == 200
        assert client.get("/api/examples").status_code == 200
        assert not answers
    working.join(20)
    assert answers[0]["name"] == "cab"


@pytest.mark.slow
def test_no_request_makes_the_server_fail(text, heard, capsys):
    for explorer in (text, heard):
        client = client_of(explorer)
        name = client.post("/api/example", json={"index": 0}).json()["input"]
        query = {"input": name, "target": ["A"]}
        view = unpack(client.post("/api/lattice", json=query).content)[0]["view"]
        searching = {"input": name, "beam_width": 2}
        search = client.post("/api/search", json=searching).json()["search"]
        queries = {
            "example": {"index": 0},
            "text": {"text": "a"},
            "lattice": query,
            "sensitivity": {"view": view, "t": 0, "u": 0},
            "search": searching,
            "steps": {"search": search},
            "alignment": {"input": name, "text": "a"},
            "sound": {},
        }
        answers = []
        if explorer is heard:  # the rest is the same for all models
            queries = {path: queries[path] for path in ("example", "text", "alignment", "sound")}
        for path, query in queries.items():
            wrong = [{**query, field: odd} for field, odd in product(query, ODD)]
            for body in [*BODIES, *(json.dumps(one).encode() for one in wrong)]:
                answers.append(client.post(f"/api/{path}", content=body, headers=JSON))
        for odd in ("", "x", "-1", "9" * 30, "9" * 5000, "NaN", "%ff", "%00"):
            answers.append(client.get("/api/examples", params={"first": odd, "search": odd}))
            answers.append(client.get(f"/api/sound/{odd}"))
            answers.append(client.get(f"/{odd}"))
            answers.append(sent(client, b"x", odd))
        for header, odd in product(
            ("Host", "Origin", "Content-Length", "Content-Type", "Cookie", "Expect", "Range"),
            ("", "[", "http://[", "http://[::1", "@", "\xff", "-1", "1e9", "9" * 30, "é\xb2"),
        ):
            value = {**JSON, header: odd.encode("latin-1")}
            answers.append(client.post("/api/text", content=b'{"text": "a"}', headers=value))
            answers.append(client.get("/main.js", headers=value))
        for answer in answers:
            if answer.status_code >= 400:
                assert list(answer.json()) == ["message"]
            assert answer.status_code < 500, (answer.request.url, answer.request.content[:99])
        assert len(answers) > 200
    assert capsys.readouterr().err == ""


# --- Connections --------------------------------------------------------------------------------


def connected(address):
    found = urlsplit(address)
    return socket.create_connection((found.hostname, found.port), timeout=10)


def received(connection):
    """Return all bytes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


HEAD = (
    "POST /api/text HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)


def test_a_client_reads_that_its_large_body_is_refused(heard):
    large = b"\0" * (exploring.MAX_BYTES + 100_000)
    with serving(heard) as address, connected(address) as connection:
        head = HEAD.replace("text", "sound").format(len(large))
        connection.sendall(head.encode() + large)  # as a client that reads nothing until then
        answer = received_one(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b"larger than 20 MB; send a shorter" in answer


def received_one(connection):
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


def test_a_client_that_asks_before_it_sends_is_refused_at_once(heard):
    with serving(heard) as address, connected(address) as connection:
        head = HEAD.format(10**9).replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n")
        connection.sendall(head.encode())
        assert received_one(connection).startswith(b"HTTP/1.1 413")


def test_json_has_a_smaller_limit_than_sound(text):
    body = b'{"text": "' + b"a" * http_server.MAX_JSON_BYTES + b'"}'
    assert "larger than 1 MB" in told(client_of(text).post("/api/text", content=body), 413)


def test_requests_that_do_not_arrive_are_closed_and_hold_no_thread(text, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    with serving(text) as address, ExitStack() as stack:
        threads = threading.active_count()
        silent, half_head, half_body, *many = [
            stack.enter_context(connected(address)) for _ in range(103)
        ]
        half_head.sendall(b"GET / HTTP/1.1\r\nHost: ")
        half_body.sendall(HEAD.format(10).encode() + b"{")
        for connection in many:
            connection.sendall(b"POST /api/sound HTTP/1.1\r\n")
        assert threading.active_count() <= threads + 2
        with urllib.request.urlopen(address + "api/model", timeout=5) as answer:
            assert answer.status == 200
        start = time.monotonic()
        for _ in range(3):  # bytes that trickle in do not extend the time
            time.sleep(0.1)
            half_head.sendall(b"1")
        for connection, part in ((half_head, "the headers"), (half_body, "the body")):
            answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 408")
            message = json.loads(answer.split(b"\r\n\r\n")[1])["message"]
            assert message == f"{part} did not arrive within 0.5 seconds; send the request again"
        assert received(silent) == b""
        assert all(received(connection).startswith(b"HTTP/1.1 408") for connection in many)
        assert time.monotonic() - start < 5


def test_bytes_that_are_not_http_are_refused_in_a_sentence(text):
    with serving(text) as address:
        for sent_bytes in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"A" * 20_000):
            with connected(address) as connection:
                with suppress(OSError):
                    connection.sendall(sent_bytes)
                answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 400") and b"not an HTTP request" in answer


# --- The command --------------------------------------------------------------------------------


def explore(*arguments, monkeypatch=None):
    with pytest.raises(SystemExit) as end:
        cli.app(["explore", *map(str, arguments)])
    return str(end.value.code)


def test_without_a_web_server_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    found = {"fastapi": object(), "uvicorn": None}
    # `cli.explore` is the command, which hides its module of the same name.
    monkeypatch.setattr(sys.modules["transduce.cli.explore"], "find_spec", found.get)
    assert 'needs uvicorn; install it with pip install "transduce[web]"' in explore(tmp_path)


def test_other_networks_are_refused(tmp_path):
    config = NetworkConfig("ctc", hidden_size=4)
    model = text_model()
    network = build_network(config, 3, 4)
    save_model(TrainedModel(network, config, model.signature), tmp_path)
    assert "a CTC network alone has no output lattice" in explore(tmp_path)
    assert "there is no file" in explore(tmp_path / "nothing")


def test_the_command_shows_the_examples_of_data_or_else_of_the_run(text, tmp_path, monkeypatch):
    save_model(text_model(), tmp_path)
    (tmp_path / "words.tsv").write_text("abc\tA B C\n")
    served, own = [], text.pairs[:1]
    monkeypatch.setattr("transduce.web.server.serve", lambda explorer, *_: served.append(explorer))
    monkeypatch.setattr(sys.modules["transduce.cli.explore"], "own_pairs", lambda run: own)
    cli.explore(tmp_path)
    cli.explore(tmp_path, data=tmp_path / "words.tsv")
    assert served[0].pairs == own
    assert [pair.target for pair in served[1].pairs] == [("A", "B", "C")]


@pytest.mark.parametrize("host, shown", [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_address_of_a_server_is_a_url(host, shown):
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    listening, address = listen(host, 0, "the server")
    with listening:
        assert address == f"http://{shown}:{listening.getsockname()[1]}/"


def test_a_port_in_use_is_reported(tmp_path):
    save_model(text_model(), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = explore(tmp_path, "--port", port)
    assert f"port {port}" in message and "give another --port" in message


# In this process, /api/text does not end by itself.
COMMAND = """
from time import sleep
from transduce.cli import main
from transduce.web.explorer import Explorer

Explorer.open_text = lambda self, text: sleep(100)
main()
"""


@pytest.mark.slow
def test_the_command_ends_at_the_first_ctrl_c_while_requests_are_open(tmp_path):
    save_model(text_model(), tmp_path)
    (tmp_path / "words.tsv").write_text("abc\tA B C\n")
    command = [sys.executable, "-c", COMMAND, "explore"]
    command += [str(tmp_path), "--data", str(tmp_path / "words.tsv"), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(address + "api/examples") as answer:
            assert b'"abc"' in answer.read()
        with connected(address) as waiting, connected(address) as computing:
            waiting.sendall(HEAD.format(10).encode())
            computing.sendall(HEAD.format(13).encode() + b'{"text": "a"}')
            computing.settimeout(0.3)
            with pytest.raises(TimeoutError):
                computing.recv(1)  # it computes
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            _, said = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0 and said == ""
    assert time.monotonic() - start < 5  # GRACE_SECONDS, and the time of a busy machine


def test_the_wheel_contains_the_page(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "transduce/web").iterdir():
        if path.suffix in (".html", ".js", ".css", ".svg", ".py"):
            assert f"transduce/web/{path.name}" in inside


def test_a_header_with_a_number_that_json_does_not_have_is_not_packed():
    with pytest.raises(ValueError, match="JSON"):
        pack({"log_likelihood": float("nan")}, {})


def test_the_timer_that_ends_the_explorer_does_not_keep_it_alive(text, monkeypatch):
    monkeypatch.setattr(http_server, "GRACE_SECONDS", 1000)
    http_server.ExplorerServer(text, "127.0.0.1").handle_exit(signal.SIGINT, None)
    timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    [timer] = [one for one in timers if one.function is os._exit]
    timer.cancel()
    assert timer.daemon
