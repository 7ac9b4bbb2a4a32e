"""The folder of an exported model: its graphs, its tokens, and its description in JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transduce.alphabet import Alphabet
from transduce.architectures import CTC, ContinuousTransducer, Transducer
from transduce.audio.features import FeatureSettings
from transduce.decoding.ensemble import Ensemble
from transduce.files import write_folder_by_rename
from transduce.model.checkpoint import TrainedModel

NULL_TOKEN = "<blk>"  # sherpa-onnx's name of null
# The settings that sherpa-onnx does not let a model choose.
FIXED = ("sample_rate", "window", "shift", "pre_emphasis")
DESCRIPTION = "model.json"


def export_onnx(model: TrainedModel, folder: str | Path, *, int8: bool = False) -> list[str]:
    """Write a model as ONNX graphs into a new folder; return the names of the files.

    A transducer has `encoder.onnx`, `decoder.onnx` and `joiner.onnx` in the layout that sherpa-onnx
    calls nemo_transducer, and one of sound with a forward network `encoder-streaming.onnx` too;
    CTC has `model.onnx`. `tokens.txt` lists the outputs, null last, and `model.json` has all else
    that a runtime needs to know. With `int8` the matrices are stored in int8, with a scale for each
    row. Raise ValueError if the model cannot be exported or the folder exists.
    """
    folder = Path(folder)
    check_exportable(model)
    if folder.exists():
        raise ValueError(f"{folder} exists already; give a new folder, or remove this one")
    files = {
        **_graphs(model, int8),
        "tokens.txt": _tokens(model.signature.targets),
        DESCRIPTION: (json.dumps(_description(model), indent=1) + "\n").encode(),
    }
    write_folder_by_rename(folder, files)
    return sorted(files)


def check_exportable(model: TrainedModel) -> None:
    """Raise ValueError if there is no ONNX export of the model, or the package onnx is missing."""
    network = model.network
    if isinstance(network, Ensemble):
        raise ValueError("an ensemble has no ONNX export; export one of its members")
    if isinstance(network, ContinuousTransducer):
        raise ValueError(
            "a continuous transducer has no ONNX export; run it with this package, by `speak`"
        )
    if not isinstance(network, Transducer | CTC):
        raise ValueError("a prediction network alone has no ONNX export; export a transducer")
    if model.config.backwards:
        raise ValueError(
            "the model reads backwards, which runtimes of ONNX do not; export one that was trained "
            "with network.backwards false"
        )
    if find_spec("onnx") is None:
        raise ValueError(
            'the ONNX export needs onnx; install it with pip install "transduce[onnx]"'
        )


def unlike_sherpa(model: TrainedModel) -> str | None:
    """Say why sherpa-onnx would compute other frames than the model was trained on.

    Return None if it computes the same, or if the model reads text.
    """
    features, signature = model.signature.features, model.signature
    if signature.sources is not None:
        return None
    if features is None:
        return "the model reads frames that were computed elsewhere, not sherpa-onnx's features"
    is_ctc = isinstance(model.network, CTC)
    kind = "sherpa" if model.config.bidirectional and not is_ctc else "sherpa_streaming"
    if features.kind not in ("sherpa", "sherpa_streaming"):
        return (
            f"the model was trained on {features.kind} features, not on sherpa-onnx's, and makes "
            f"more errors there; train one with --data.features.kind {kind} "
            "--data.features.num_channels 80 --data.features.num_deltas 0"
        )
    standard = FeatureSettings(kind=features.kind)
    others = [name for name in FIXED if getattr(features, name) != getattr(standard, name)]
    others += ["num_deltas"] if features.num_deltas else []
    if others:
        return f"sherpa-onnx has no setting {others[0]} {getattr(features, others[0])}"
    if features.kind == kind:
        return None
    recogniser = "CTC" if is_ctc else "offline" if kind == "sherpa" else "streaming"
    return (
        f"features of the kind {features.kind} are not those of sherpa-onnx's {recogniser} "
        f"recogniser; for it, train with --data.features.kind {kind}"
    )


def _graphs(model: TrainedModel, int8: bool) -> dict[str, bytes]:
    """Return the ONNX files of a model."""
    from transduce.export.graphs import (
        joint_graph,
        prediction_graph,
        streaming_graph,
        transcription_graph,
    )

    network, statistics = model.network, model.signature.statistics
    num_labels = len(model.signature.targets)
    metadata: dict[str, int | str] = {
        "vocab_size": num_labels,  # without null
        "subsampling_factor": model.config.pooling,
        "normalize_type": "NA",  # the graph normalises
        "feat_dim": model.signature.input_size,
    }
    if isinstance(network, CTC):
        metadata["model_type"] = "EncDecCTCModelBPE"
        return {"model.onnx": transcription_graph(network, statistics, metadata, int8=int8)}
    assert isinstance(network, Transducer)
    metadata |= {
        "model_type": "EncDecRNNTBPEModel",
        "pred_rnn_layers": model.config.prediction_layers,
        "pred_hidden": model.config.prediction_size,
    }
    transcription = network.transcription_network
    graphs = {
        "encoder.onnx": transcription_graph(transcription, statistics, metadata, int8=int8),
        "decoder.onnx": prediction_graph(network.prediction_network, int8=int8),
        "joiner.onnx": joint_graph(num_labels + 1),
    }
    if statistics is not None and not model.config.bidirectional:
        graphs["encoder-streaming.onnx"] = streaming_graph(
            transcription, statistics, metadata, int8=int8
        )
    return graphs


def _tokens(targets: Alphabet) -> bytes:
    """Return the file of tokens: a symbol and its id on each line, null last."""
    for symbol in targets.symbols:
        if symbol == NULL_TOKEN or (symbol != " " and len(symbol.split()) != 1):
            raise ValueError(
                f"the symbol {symbol!r} cannot stand in tokens.txt; train with symbols without "
                f"white space, none of them {NULL_TOKEN}"
            )
    symbols = (*targets.symbols, NULL_TOKEN)
    return "".join(f"{symbol} {k}\n" for k, symbol in enumerate(symbols)).encode()


def _description(model: TrainedModel) -> dict[str, Any]:
    """Return what a runtime needs to know besides the graphs, in values of JSON."""
    signature, config = model.signature, model.config
    description: dict[str, Any] = {
        "network": config.network,
        "targets": signature.targets.symbols,
        "separator": signature.separator,
        "pooling": config.pooling,
        "lookahead": config.lookahead,
        "prediction_layers": config.prediction_layers,
        "prediction_size": config.prediction_size,
    }
    if signature.sources is not None and signature.source_notation is not None:
        description["sources"] = signature.sources.symbols
        description["source_notation"] = asdict(signature.source_notation)
    if signature.features is not None:
        features = signature.features
        description["features"] = asdict(features) | {"convention": asdict(features.convention)}
    return description
