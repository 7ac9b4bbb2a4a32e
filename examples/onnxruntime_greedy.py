"""Run an exported model with onnxruntime and NumPy alone: the greedy search.

transduce export english-pronouncer --output exported
python examples/onnxruntime_greedy.py exported transducer
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

MOST_LABELS = 10  # labels at one vector, as in sherpa-onnx


class Exported:
    """The three graphs of an exported transducer, and its description."""

    def __init__(self, folder: str | Path, encoder: str = "encoder.onnx") -> None:
        folder = Path(folder)
        self.description = json.loads((folder / "model.json").read_text())
        self.encoder, self.decoder, self.joiner = (
            onnxruntime.InferenceSession(folder / name)
            for name in (encoder, "decoder.onnx", "joiner.onnx")
        )

    def ids(self, word: str) -> np.ndarray:
        """Return the ids [T] of the letters of a word, in either case; refuse unknown ones."""
        known = {symbol: k for k, symbol in enumerate(self.description["sources"])}
        ids = []
        for letter in word:
            spellings = (letter, letter.lower(), letter.upper())
            if (spelt := next((one for one in spellings if one in known), None)) is None:
                raise ValueError(
                    f"{word}: {letter!r} is no symbol that the model knows; leave it out"
                )
            ids.append(known[spelt])
        return np.array(ids)

    def transcription(self, frames: np.ndarray) -> np.ndarray:
        """Return f [T', K+1] of ids [T], or of frames [T, D] before normalisation."""
        reads_text = frames.ndim == 1
        inputs = {
            "symbols" if reads_text else "audio_signal": (frames if reads_text else frames.T)[None],
            "length": np.array([len(frames)]),
        }
        f: np.ndarray = self.encoder.run(["outputs"], inputs)[0][0].T
        return f

    def streamed_transcription(self, frames: np.ndarray) -> np.ndarray:
        """Return f of the whole chunks of frames [T, D], by the graph encoder-streaming.onnx."""
        metadata = self.encoder.get_modelmeta().custom_metadata_map
        window, shift = int(metadata["window_size"]), int(metadata["chunk_shift"])
        names = [given.name for given in self.encoder.get_inputs()][2:]
        shape = [1, *(int(metadata[f"cache_last_channel_dim{i}"]) for i in (1, 2, 3))]
        state = [np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(1, np.int64)]
        parts = []
        for start in range(0, len(frames) - window + 1, shift):
            chunk = frames[start : start + window].T[None]
            inputs = {"audio_signal": chunk, "length": np.array([window])}
            f, _, *state = self.encoder.run(None, inputs | dict(zip(names, state, strict=True)))
            parts.append(f[0].T)
        return np.concatenate(parts)

    def prediction(self, label: int, state: list[Any] | None = None) -> tuple[Any, list[Any]]:
        """Return g [K+1] after one more label, and the new state; null is the first label."""
        shape = (self.description["prediction_layers"], 1, self.description["prediction_size"])
        h, c = state or [np.zeros(shape, np.float32)] * 2
        inputs = {"targets": np.array([[label]], np.int32), "h": h, "c": c}
        g, _, *state = self.decoder.run(None, inputs | {"target_length": np.array([1], np.int32)})
        return g[0, :, 0], state

    def greedy(self, f: np.ndarray) -> list[int]:
        """Return the labels of the greedy search through f [T', K+1]."""
        null = len(self.description["targets"])
        labels: list[int] = []
        g, state = self.prediction(null)
        for vector in f:
            for _ in range(MOST_LABELS):
                inputs = {
                    "encoder_outputs": vector[None, :, None],
                    "decoder_outputs": g[None, :, None],
                }
                best = int(self.joiner.run(None, inputs)[0].argmax())
                if best == null:
                    break
                labels.append(best)
                g, state = self.prediction(best, state)
        return labels

    def symbols(self, labels: list[int]) -> list[str]:
        """Return the symbols of labels."""
        return [self.description["targets"][label] for label in labels]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    if not (Path(sys.argv[1]) / "model.json").is_file():
        sys.exit(f"{sys.argv[1]} has no model.json; give a folder that `transduce export` wrote")
    exported = Exported(sys.argv[1])
    if "sources" not in exported.description:
        sys.exit("this command reads words; for a model of sound give frames to `transcription`")
    try:
        inputs = [exported.ids(word) for word in sys.argv[2:]]
    except ValueError as error:
        sys.exit(str(error))
    for ids in inputs:
        print(*exported.symbols(exported.greedy(exported.transcription(ids))))
