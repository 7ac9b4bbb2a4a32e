"""Which network, how large, and the network itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transduce.decoding.ensemble import Ensemble
from transduce.networks import PredictionNetwork, TranscriptionNetwork, Transducer
from transduce.settings import check_at_least

Network = Transducer | TranscriptionNetwork | PredictionNetwork | Ensemble


@dataclass(frozen=True)
class NetworkConfig:
    """Which network, and how large. The defaults are the paper's."""

    network: Literal["transducer", "ctc", "prediction"] = "transducer"
    hidden_size: int = 128  # of the transcription network, in each direction
    num_layers: int = 1  # of the transcription network
    bidirectional: bool = True
    pooling: int = 1  # frames averaged into one after the first layer
    prediction_size: int = 128  # hidden units of the prediction network
    prediction_layers: int = 1
    dropout: float = 0.0  # of what each layer of either hands on, and of embeddings
    # Numbers that a letter or a label stands for, and frames are turned into; 0: one-hot vectors
    embedding_size: int = 0
    # Whether a transducer reads and writes every sequence from its end: its prediction network then
    # knows the labels that come after, not those before
    backwards: bool = False

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "pooling", "prediction_size", "prediction_layers")
        check_at_least(self, 1, *sizes)
        check_at_least(self, 0, "embedding_size")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.backwards and self.network != "transducer":
            raise ValueError(f"backwards is for a transducer, not {self.network}; leave it out")


def build_network(config: NetworkConfig, input_size: int, num_labels: int) -> Network:
    """The network that a recipe asks for, its weights uniform in [-0.1, 0.1]."""
    prediction = (config.prediction_size, config.prediction_layers)
    embedded = config.embedding_size
    if config.network == "prediction":
        return PredictionNetwork(num_labels, *prediction, config.dropout, False, embedded)
    transcription = (config.hidden_size, config.num_layers, config.bidirectional)
    regularised = (config.dropout, config.pooling)
    if config.network == "ctc":
        return TranscriptionNetwork(input_size, num_labels, *transcription, *regularised, embedded)
    return Transducer(input_size, num_labels, *transcription, *regularised, *prediction, embedded)
