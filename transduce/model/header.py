"""The signature of a model in the header of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from transduce.alphabet import Alphabet
from transduce.audio.features import FeatureSettings, Statistics
from transduce.audio.outputs import FrameOutputs
from transduce.data.pairs import Notation
from transduce.model.signature import Signature
from transduce.settings import replace_settings


def signature_header(signature: Signature) -> dict[str, Any]:
    """Return a signature as JSON, without its statistics."""
    header: dict[str, Any] = {
        "targets": signature.targets.symbols,
        "target_notation": asdict(signature.target_notation),
        "sources": signature.sources and signature.sources.symbols,
        "source_notation": signature.source_notation and asdict(signature.source_notation),
        "features": signature.features and asdict(signature.features),
    }
    if (outputs := signature.outputs) is not None:
        header["outputs"] = {"features": asdict(outputs.features), "stacking": outputs.stacking}
    return header


def read_signature(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Signature:
    """Make the signature of a file's header and tensors."""
    optional: dict[str, Any] = {}
    if header["sources"] is not None:
        optional["sources"] = Alphabet(header["sources"])
    if header["source_notation"] is not None:
        optional["source_notation"] = Notation(**header["source_notation"])
    if header["features"] is not None:
        optional["features"] = replace_settings(FeatureSettings(), header["features"])
    if "statistics.mean" in tensors:
        statistics = Statistics(tensors["statistics.mean"], tensors["statistics.deviation"])
        if (outputs := header.get("outputs")) is None:
            optional["statistics"] = statistics
        else:
            features = replace_settings(FeatureSettings(), outputs["features"])
            optional["outputs"] = FrameOutputs(features, statistics, outputs["stacking"])
    return Signature(Alphabet(header["targets"]), Notation(**header["target_notation"]), **optional)
