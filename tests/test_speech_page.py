"""Explore a continuous transducer: the answers of the server, and its page in a real browser."""

import io
import json
from itertools import pairwise, product

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
    sound,
    speech_model,
    speech_pairs,
    text_model,
    told,
)
from fastapi.testclient import TestClient

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
