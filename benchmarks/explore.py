"""Response times of the explorer: the paper's transducer, T 300, U 40, sound, request to body.

The page asks for sensitivities whenever the crosshair rests; the target is 200 ms. Run it as
`python benchmarks/explore.py`.
"""

from __future__ import annotations

import torch
from fastapi.testclient import TestClient
from measure import machine, medians, show

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.audio.sound import encode_wav
from transduce.data.pairs import Notation
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import Signature
from transduce.web.explorer import Explorer
from transduce.web.server import create_app
from transduce.web.wire import unpack

T, U, LABELS = 300, 40, 39


def main() -> None:
    print(machine())
    torch.manual_seed(0)
    features, config = FeatureSettings(), NetworkConfig()
    symbols = [f"p{k}" for k in range(LABELS)]
    statistics = Statistics(torch.zeros(features.size), torch.full((features.size,), 10.0))
    signature = Signature(
        Alphabet(symbols), Notation("spaces", None), features=features, statistics=statistics
    )
    network = build_network(config, features.size, LABELS).eval()
    explorer = Explorer(TrainedModel(network, config, signature), (), "the paper's transducer")
    client = TestClient(create_app(explorer), base_url="http://127.0.0.1")
    samples = (T - 1) * features.shift_samples + features.window_samples
    sound = encode_wav(0.1 * torch.randn(samples), features.sample_rate)
    name = client.post("/api/sound", content=sound).json()["input"]
    lattice = {"input": name, "target": [symbols[u % LABELS] for u in range(U)]}
    view = unpack(client.post("/api/lattice", json=lattice).content)[0]["view"]
    node = {"view": view, "t": T // 2, "u": U // 2}
    calls = {
        "the lattice": lambda: client.post("/api/lattice", json=lattice).content,
        "sensitivities": lambda: client.post("/api/sensitivity", json=node).content,
        "a sound and its 8 best outputs": lambda: client.post("/api/sound", content=sound).content,
    }
    rows = [
        [what, f"{ms:.1f}", f"{len(calls[what]()) / 1000:.0f}"]
        for what, ms in medians(calls, seconds=4).items()
    ]
    show(f"T {T}, U {U}, K {LABELS}, 128 units", ["answer", "ms", "kB"], rows)


if __name__ == "__main__":
    main()
