"""Throughput of the API: 64 clients that mix words and short sounds, beside the library's own rate.

Each client sends one request after the other from 127.0.0.1: three in four are words to phonemize,
the others sounds to recognise. Every answer is compared with the library's. The library's rate is
that of the same mix in one call for each model, in this process. Server and library take turns;
the ratio is the median of those of all rounds. Run it as `python benchmarks/serve.py SOUNDS`, a
folder of sound files; `--soak 600` runs for ten minutes. The server's memory is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from measure import machine, show

from transduce.audio.sound import encode_wav, read_wave
from transduce.data.pairs import Audio, DataError
from transduce.decoding.options import SearchOptions
from transduce.model.model import Model, load
from transduce.model.transcripts import Transcript

WORDS = [
    *(
        "transducer",
        "lattice",
        "alignment",
        "network",
        "symbol",
        "sequence",
        "recurrent",
        "gradient",
        "forward",
        "backward",
    ),
    *(
        "probability",
        "utterance",
        "phoneme",
        "dictionary",
        "search",
        "beam",
        "width",
        "memory",
        "hidden",
        "output",
        "garden",
        "river",
    ),
    *(
        "mountain",
        "candle",
        "window",
        "thunder",
        "silver",
        "forest",
        "harbour",
        "lantern",
        "meadow",
        "orchard",
        "pebble",
        "quarry",
    ),
    *(
        "ribbon",
        "saddle",
        "timber",
        "valley",
        "willow",
        "yellow",
        "anchor",
        "basket",
        "copper",
        "dragon",
        "ember",
        "feather",
        "glacier",
    ),
    *(
        "hollow",
        "island",
        "jungle",
        "kettle",
        "ladder",
        "marble",
        "needle",
        "ocean",
        "parcel",
        "quiver",
        "rocket",
        "shadow",
        "tunnel",
    ),
    *("umbrella", "velvet", "whisper", "zephyr"),
]
PRONOUNCER, RECOGNISER = "english-pronouncer", "english-phone-recogniser"
SECONDS = 2.0  # of each sound
NUM_SOUNDS, ROUNDS = 40, 5
SHARE = 0.25  # of the requests that are sounds
GREEDY, BEAM = SearchOptions(1, with_timings=False), SearchOptions(10, with_timings=False)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("sounds", type=Path)
    arguments.add_argument("--clients", type=int, default=64)
    arguments.add_argument("--seconds", type=float, default=60)
    arguments.add_argument("--soak", type=float)
    asked = arguments.parse_args()
    print(machine(), flush=True)
    models = {name: load(name) for name in (PRONOUNCER, RECOGNISER)}
    sounds = read_sounds(asked.sounds)
    waves = [wave for wave, _ in sounds]
    expected = {
        PRONOUNCER: [str(one) for one in results(models[PRONOUNCER], WORDS, GREEDY)],
        RECOGNISER: [str(one) for one in results(models[RECOGNISER], waves, BEAM)],
    }
    library_rate(models, waves)  # loads the kernels
    server, port = start()
    try:
        requests = Requests(expected, [content for _, content in sounds])
        seconds = asked.soak or asked.seconds
        rates, memory = list[tuple[float, float]](), list[float]()
        before = library_rate(models, waves)
        for number in range(ROUNDS):
            sent = requests.sent
            seeds = range(number * asked.clients, (number + 1) * asked.clients)
            lasted = asyncio.run(load_server(port, requests, seeds, seconds / ROUNDS))
            memory.append(resident(server.pid))
            after = library_rate(models, waves)
            rates.append(((requests.sent - sent) / lasted, (before + after) / 2))
            before = after
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    report(requests, rates, memory, code, asked.clients, seconds)


def read_sounds(folder: Path) -> list[tuple[object, bytes]]:
    """Return the first seconds of some sounds: samples, and the bytes of WAV files."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".wav", ".flac", ".opus"))
    waves = []
    for path in files[:: max(1, len(files) // NUM_SOUNDS)][:NUM_SOUNDS]:
        wave = read_wave(Audio(path), 16_000, convert=True)[: round(SECONDS * 16_000)]
        wave = (wave * 32_768).round().clamp(-32_768, 32_767) / 32_768  # as the file has it
        waves.append((wave, encode_wav(wave, 16_000)))
    return waves


def results(model: Model, sources: list[object], options: SearchOptions) -> list[Transcript]:
    found = list(model.transcribe(sources, options))  # type: ignore[arg-type]
    assert not any(isinstance(one, DataError) for one in found)
    return found  # type: ignore[return-value]


def library_rate(models: dict[str, Model], waves: list[object]) -> float:
    """Return the requests a second of the library for the same mix, batched as it likes."""
    texts = [WORDS[i % len(WORDS)] for i in range(round(8 * NUM_SOUNDS * (1 - SHARE) / SHARE))]
    begun = time.perf_counter()
    results(models[PRONOUNCER], texts, GREEDY)
    results(models[RECOGNISER], waves * 8, BEAM)
    return (len(texts) + 8 * len(waves)) / (time.perf_counter() - begun)


def start() -> tuple[subprocess.Popen[str], int]:
    """Start the server; return it when it is ready."""
    command = [sys.executable, "-m", "transduce", "serve", PRONOUNCER, RECOGNISER, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split(" is at ")[1].split()[0]
    port = int(address.rstrip("/").rsplit(":", 1)[1])
    while b'"ready"' not in asyncio.run(once(port, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n")):
        time.sleep(0.1)
    return server, port


async def once(port: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"Connection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


class Requests:
    """The requests, their times, and answers that are not the library's."""

    def __init__(self, expected: dict[str, list[str]], contents: list[bytes]) -> None:
        self.expected, self.contents = expected, contents
        self.times: dict[str, list[float]] = {PRONOUNCER: [], RECOGNISER: []}
        self.failures: list[str] = []
        self.sent = 0

    def draw(self, choice: random.Random) -> tuple[str, bytes, str]:
        """Return a request: its model, its bytes, and the text that the answer must have."""
        if choice.random() < SHARE:
            i = choice.randrange(len(self.contents))
            body = (
                b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
                + RECOGNISER.encode()
                + b"\r\n--x\r\nContent-Disposition: form-data; "
                + b'name="file"; filename="a.wav"\r\n\r\n'
                + self.contents[i]
                + b"\r\n--x--\r\n"
            )
            kind, path = "multipart/form-data; boundary=x", "/v1/audio/transcriptions"
            model, text = RECOGNISER, self.expected[RECOGNISER][i]
        else:
            i = choice.randrange(len(WORDS))
            body, kind = json.dumps({"input": WORDS[i]}).encode(), "application/json"
            path, model, text = "/v1/phonemize", PRONOUNCER, self.expected[PRONOUNCER][i]
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        return model, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, text


async def client(port: int, requests: Requests, seed: int, end: float) -> None:
    """Send one request after the other on one connection until the end."""
    choice = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        model, content, expected = requests.draw(choice)
        begun = time.perf_counter()
        requests.sent += 1
        writer.write(content)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(
            int(line.split(":")[1]) for line in lines if line.startswith("content-length")
        )
        answer = json.loads(await reader.readexactly(length))
        requests.times[model].append(time.perf_counter() - begun)
        text = answer.get("text") or answer.get("results", [{}])[0].get("text")
        if not lines[0].startswith("http/1.1 200") or text != expected:
            requests.failures.append(f"{lines[0]}: {text!r} instead of {expected!r}")
    writer.close()


async def load_server(port: int, requests: Requests, seeds: range, seconds: float) -> float:
    """Run the clients; return the seconds until the last answer."""
    begun = time.perf_counter()
    end = begun + seconds
    await asyncio.gather(*(client(port, requests, seed, end) for seed in seeds))
    return time.perf_counter() - begun


def resident(process: int) -> float:
    """Return the memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def report(
    requests: Requests,
    rates: list[tuple[float, float]],
    memory: list[float],
    code: int,
    num_clients: int,
    seconds: float,
) -> None:
    """Print the figures; fail if an answer is missing or wrong."""
    answered = sum(map(len, requests.times.values()))
    ratio = median(server / library for server, library in rates)
    rows = [
        [name, f"{len(times)}", *(f"{1000 * cut[i]:.0f}" for i in (49, 98))]
        for name, times in requests.times.items()
        for cut in [quantiles(times, n=100)]
    ]
    title = f"{num_clients} clients for {seconds:g} s, {100 * SHARE:.0f} % sounds of {SECONDS:g} s"
    show(title, ["model", "answers", "p50 ms", "p99 ms"], rows)
    print(f"requests {requests.sent}, answers {answered}, wrong {len(requests.failures)}")
    print("requests/s of server and library:", ", ".join(f"{s:.0f} {r:.0f}" for s, r in rates))
    print(f"the server has {100 * ratio:.0f} % of the library's rate (median)")
    print("memory in MB after each round:", " ".join(f"{megabytes:.0f}" for megabytes in memory))
    print("exit code after SIGTERM:", code)
    if requests.failures or answered != requests.sent or code != 0:
        raise SystemExit("\n".join(requests.failures[:5]) or "requests were lost")


if __name__ == "__main__":
    main()
