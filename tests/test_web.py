"""The server of the explorer: its answers match the library, and its errors are one sentence."""

import dataclasses
import io
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from explored import RATE, sound, sound_model, sound_pairs, text_model, text_pairs, wav_bytes
from fastapi.testclient import TestClient

from transduce import cli
from transduce.analysis import sensitivity, view_lattice
from transduce.architectures import NetworkConfig, build_network
from transduce.data.pairs import Frames, Origin, Pair
from transduce.decoding import beam_search_steps
from transduce.decoding.options import SearchOptions
from transduce.model.checkpoint import TrainedModel, save_model
from transduce.model.model import search_examples
from transduce.web import explorer as exploring
from transduce.web import sounds
from transduce.web.explorer import Explorer
from transduce.web.server import create_app, names_this_server
from transduce.web.wire import unpack

ROOT = Path(__file__).parent.parent
HERE = "http://127.0.0.1:8000"


def client_of(explorer, **options):
    return TestClient(create_app(explorer, **options), base_url=HERE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Explorer(text_model(), text_pairs(tmp_path_factory.mktemp("text")), "letters")


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    return Explorer(sound_model(), sound_pairs(tmp_path_factory.mktemp("sound")), "speech")


def told(response, status=400):
    """Return the message of an error response."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["message"] and "Traceback" not in response.text
    return response.json()["message"]


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


def test_the_search_frame_by_frame_matches_the_library(text):
    client = client_of(text)
    query = {"input": opened(client)["input"], "beam_width": 3}
    answer = client.post("/api/search", json=query).json()
    frames = text.model.signature.example("cab").frames
    steps = beam_search_steps(text.model.network, frames, 3)
    assert len(answer["steps"]) == len(steps) == 4
    for found, expected in zip(answer["steps"], steps, strict=True):
        assert [h[0] for h in found] == [list(y.labels) for y in expected]
        assert [h[1] for h in found] == [y.log_prob for y in expected]
        assert [len(h[2]) for h in found] == [len(y.flows) for y in expected]


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


def test_other_rates_and_channels_are_converted(heard):
    for rate in (8_000, 44_100, 48_000):
        content = wav_bytes(sound(0.5, rate, channels=2, frequency=300.0), rate)
        wave = sounds.decode_sound(content, "a.wav", RATE).numpy()
        expected = sound(0.5, RATE, frequency=300.0)[:, 0]
        assert len(wave) == len(expected)
        middle = slice(800, -800)  # resampling rings at the ends
        assert np.abs(wave - expected)[middle].max() < 0.01


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
    large = b"\0" * (sounds.MAX_BYTES + 1)
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
    assert "cannot be read" in told(post("/api/text", content=b"{not json"), 422)
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
    for origin in ("http://evil.example", "http://127.0.0.1:9000", "null"):
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


def test_a_port_in_use_is_reported(tmp_path):
    save_model(text_model(), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = explore(tmp_path, "--port", port)
    assert f"port {port}" in message and "give another --port" in message


def test_the_command_serves_until_ctrl_c(tmp_path):
    save_model(text_model(), tmp_path)
    (tmp_path / "words.tsv").write_text("abc\tA B C\n")
    command = [sys.executable, "-c", "from transduce.cli import main; main()", "explore"]
    command += [str(tmp_path), "--data", str(tmp_path / "words.tsv"), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(address + "api/examples") as answer:
            assert b'"abc"' in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 0 and said == ""


def test_the_wheel_contains_the_page(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "transduce/web").iterdir():
        if path.suffix in (".html", ".js", ".css", ".svg", ".py"):
            assert f"transduce/web/{path.name}" in inside
