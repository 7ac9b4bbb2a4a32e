"""Networks as ONNX graphs, in the layout of NeMo's transducers, which sherpa-onnx reads.

There the null symbol (blank) is the last id, so label k of ours is id k - 1. An id that is not a
label, and so null too, is the vector of zeros. ONNX's LSTM has the peepholes of Eqs. 4-8; it orders
the gates input, output, forget, state, where ours are input, forget, state, output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from onnx import NodeProto, TensorProto, checker, helper, numpy_helper
from torch import Tensor

from transduce.architectures import CTC
from transduce.audio.features import Statistics
from transduce.lstm.layer import PeepholeLSTM
from transduce.model.tensors import SCALES, quantise
from transduce.networks import PredictionNetwork, TranscriptionNetwork

OPSET, IR_VERSION = 17, 8  # old enough for the onnxruntime inside sherpa-onnx
FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
LEAST_CHUNK = 16  # frames that a streaming graph reads at once: latency against calls
Shape = Sequence[int | str]
Metadata = Mapping[str, int | str]


class Value(NamedTuple):
    """An input or an output of a graph; a name in the shape is a size that varies."""

    name: str
    dtype: int
    shape: Shape


class State(NamedTuple):
    """The names of h and s of all layers of an LSTM, [layers, B, H]."""

    h: str
    s: str


class _Graph:
    """A graph to which operators and constants are added; names are counted."""

    def __init__(self, *, int8: bool) -> None:
        self.int8, self.names = int8, map(str, count())
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, values: Tensor | np.ndarray | Sequence[int]) -> str:
        """Add a constant; return its name."""
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        name = f"constant_{next(self.names)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def matrix(self, weights: Tensor) -> str:
        """Add weights [..., columns]: in int8 with a scale for each row, if that is wanted."""
        if not self.int8:
            return self.constant(weights.float())
        stored = quantise("weights", weights.float(), torch.int8)
        whole = self.add("Cast", self.constant(stored["weights"]), to=FLOAT)
        return self.add("Mul", whole, self.constant(stored[SCALES + "weights"]))

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one output; return the output's name."""
        return self.add_many(operator, 1, *inputs, **attributes)[0]

    def add_many(self, operator: str, num_outputs: int, *inputs: str, **options: Any) -> list[str]:
        """Add an operator; return the names of its outputs."""
        names = [f"{operator}_{next(self.names)}" for _ in range(num_outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **options))
        return names

    def name_output(self, name: str, value: str) -> None:
        """Call a value by the name of an output."""
        self.nodes.append(helper.make_node("Identity", [value], [name]))

    def size(self, value: str, axis: int) -> str:
        """Return the size [1] of a value along an axis."""
        return self.add("Shape", value, start=axis, end=axis + 1)

    def range(self, length: str) -> str:
        """Return the numbers from 0 to a length, which is [1], without the length itself."""
        zero, one = self.constant(np.array(0)), self.constant(np.array(1))
        return self.add("Range", zero, self.add("Squeeze", length), one)

    def model(
        self, inputs: Iterable[Value], outputs: Iterable[Value], metadata: Metadata, name: str
    ) -> bytes:
        """Return the file of the graph, checked."""
        starts, ends = (
            [helper.make_tensor_value_info(*value) for value in values]
            for values in (inputs, outputs)
        )
        graph = helper.make_graph(self.nodes, name, starts, ends, self.constants)
        opset = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)
        model.producer_name = "transduce"
        helper.set_model_props(model, {key: str(value) for key, value in metadata.items()})
        checker.check_model(model, full_check=True)
        return cast(bytes, model.SerializeToString())


# --- Layers -------------------------------------------------------------------------------------


def _reordered(gates: Tensor) -> Tensor:
    """Return weights [D, 4 H, ...] with their gates in the order of ONNX."""
    input_gate, forget_gate, state, output_gate = gates.chunk(4, dim=1)
    return torch.cat([input_gate, output_gate, forget_gate, state], dim=1)


def _lstm(
    graph: _Graph, lstm: PeepholeLSTM, x: str, lengths: str = "", state: State | None = None
) -> tuple[str, State]:
    """Add the layers of an LSTM to the embedded x [T, B, I]; return outputs and last state."""
    D, layers = lstm.num_directions, range(lstm.num_layers)
    first: list[tuple[str, str]] = [("", "") for _ in layers]
    if state is not None:
        parts = (graph.add_many("Split", lstm.num_layers, part, axis=0) for part in state)
        first = list(zip(*parts, strict=True))
    last: list[tuple[str, str]] = []
    for i, layer in enumerate(lstm.layers):
        inputs, hidden, peepholes, biases = cast(Any, layer).weights(of_embedded=True)
        biases = torch.cat([_reordered(biases), torch.zeros_like(biases)], dim=1)
        outputs, h, s = graph.add_many(
            "LSTM",
            3,
            *(x, graph.matrix(_reordered(inputs)), graph.matrix(_reordered(hidden))),
            *(graph.constant(biases), lengths, *first[i]),
            graph.constant(peepholes[:, [0, 2, 1]].flatten(1)),
            hidden_size=lstm.hidden_size,
            direction="bidirectional" if D == 2 else "forward",
        )  # [T, D, B, H]
        by_frame = graph.add("Transpose", outputs, perm=[0, 2, 1, 3])
        x = graph.add("Reshape", by_frame, graph.constant(np.array([0, 0, D * lstm.hidden_size])))
        last.append((h, s))
    h, s = (graph.add("Concat", *parts, axis=0) for parts in zip(*last, strict=True))
    return x, State(h, s)


def _embedded(graph: _Graph, lstm: PeepholeLSTM, x: str) -> str:
    """Return the embeddings of vectors x [T, B, I]; without an embedding, x itself."""
    embedding = cast(Any, lstm.layers[0]).embedding
    return x if embedding is None else graph.add("MatMul", x, graph.constant(embedding))


def _embedded_ids(graph: _Graph, lstm: PeepholeLSTM, ids: str) -> str:
    """Return the embeddings, or one-hot vectors, [T, B, I] of ids [B, T]; null is zero."""
    ids, embedding = graph.add("Transpose", ids, perm=[1, 0]), cast(Any, lstm.layers[0]).embedding
    if embedding is not None:
        with_null = torch.nn.functional.pad(embedding, (0, 0, 0, 1))
        return graph.add("Gather", graph.constant(with_null), ids)
    depth, values = np.array(lstm.input_size), np.array([0, 1], dtype=np.float32)
    # An id that is not below the depth gives the vector of zeros.
    return graph.add("OneHot", ids, graph.constant(depth), graph.constant(values))


def _output_layer(graph: _Graph, layer: torch.nn.Linear, x: str) -> str:
    """Add the output layer to x [..., width]; null becomes the last output."""
    weights = graph.add("Transpose", graph.matrix(layer.weight.roll(-1, 0)), perm=[1, 0])
    return graph.add("Add", graph.add("MatMul", x, weights), graph.constant(layer.bias.roll(-1)))


def _stacked(graph: _Graph, x: str, lengths: str, lookahead: int) -> str:
    """Concatenate each frame of x [T, B, D] and those after it, as `networks.stack_frames`."""
    T = graph.size(x, 0)
    frames = graph.add("Unsqueeze", graph.range(T), _axis(graph, 1))
    inside = graph.add("Less", frames, graph.add("Unsqueeze", lengths, _axis(graph, 0)))
    inside = graph.add("Unsqueeze", inside, _axis(graph, 2))
    x = graph.add("Where", inside, x, graph.constant(np.zeros(1, np.float32)))
    x = graph.add("Pad", x, graph.constant(np.array([0, 0, 0, lookahead, 0, 0])))
    return _windows(graph, x, T, lookahead)


def _windows(graph: _Graph, x: str, T: str, lookahead: int) -> str:
    """Concatenate each of the first T frames of x [T + lookahead, B, D] and those after it."""
    starts = [graph.constant(np.array([k])) for k in range(1 + lookahead)]
    axis = _axis(graph, 0)
    shifted = [graph.add("Slice", x, k, graph.add("Add", T, k), axis) for k in starts]
    return graph.add("Concat", *shifted, axis=2)


def _averaged(graph: _Graph, x: str, lengths: str, pooling: int) -> tuple[str, str]:
    """Average every `pooling` frames of x [T, B, width], as `networks.average_frames`."""
    n = graph.constant(np.array([pooling]))
    missing = graph.add("Mod", graph.add("Neg", graph.size(x, 0)), n)
    zeros = [graph.constant(np.zeros(size, np.int64)) for size in (3, 2)]
    after = graph.add("Concat", zeros[0], missing, zeros[1], axis=0)
    sums = _grouped_sums(graph, graph.add("Pad", x, after), pooling)
    starts = graph.add("Mul", graph.range(graph.size(sums, 0)), n)
    starts = graph.add("Unsqueeze", starts, _axis(graph, 1))
    left = graph.add("Sub", graph.add("Unsqueeze", lengths, _axis(graph, 0)), starts)
    one = graph.constant(np.array(1))
    counts = graph.add("Clip", left, one, graph.constant(np.array(pooling)))
    counts = graph.add("Cast", graph.add("Unsqueeze", counts, _axis(graph, 2)), to=FLOAT)
    more = graph.add("Add", lengths, graph.constant(np.array(pooling - 1)))
    return graph.add("Div", sums, counts), graph.add("Div", more, n)


def _grouped_sums(graph: _Graph, x: str, pooling: int) -> str:
    """Return the sums of every `pooling` frames of x [T, B, width]; T is a multiple of it."""
    rest = graph.add("Shape", x, start=1, end=3)
    shape = graph.add("Concat", graph.constant(np.array([-1, pooling])), rest, axis=0)
    return graph.add("ReduceSum", graph.add("Reshape", x, shape), _axis(graph, 1), keepdims=0)


def _axis(graph: _Graph, axis: int) -> str:
    return graph.constant(np.array([axis]))


# --- The three networks -------------------------------------------------------------------------


def transcription_graph(
    network: TranscriptionNetwork, statistics: Statistics | None, metadata: Metadata, *, int8: bool
) -> bytes:
    """Return the graph of a transcription network (encoder).

    Inputs are frames `audio_signal` [B, D, T] before normalisation, or ids `symbols` [B, T] without
    statistics, and their numbers `length` [B]; outputs are f [B, K+1, T'] and their numbers. A CTC
    network has log-probabilities [B, T', K+1] instead.
    """
    graph = _Graph(int8=int8)
    inputs = [Value("audio_signal", FLOAT, ["B", network.input_size, "T"])]
    if statistics is None:
        inputs = [Value("symbols", INT64, ["B", "T"])]
        x = _embedded_ids(graph, network.lstm, "symbols")
    else:
        x = _normalised(graph, "audio_signal", statistics)
        if network.lookahead:
            x = _stacked(graph, x, "length", network.lookahead)
        x = _embedded(graph, network.lstm, x)
    lengths = "length"
    x, _ = _lstm(graph, network.lstm, x, graph.add("Cast", lengths, to=INT32))
    if network.pooling > 1:
        x, lengths = _averaged(graph, x, lengths, network.pooling)
    if network.upper_lstm is not None:
        x, _ = _lstm(graph, network.upper_lstm, x, graph.add("Cast", lengths, to=INT32))
    f = _output_layer(graph, network.output, x)
    K = network.output.out_features
    if isinstance(network, CTC):
        f = graph.add("Transpose", graph.add("LogSoftmax", f, axis=-1), perm=[1, 0, 2])
        outputs = Value("logprobs", FLOAT, ["B", "T'", K])
    else:
        f = graph.add("Transpose", f, perm=[1, 2, 0])
        outputs = Value("outputs", FLOAT, ["B", K, "T'"])
    graph.name_output(outputs.name, f)
    graph.name_output("encoded_lengths", lengths)
    ends = [outputs, Value("encoded_lengths", INT64, ["B"])]
    inputs.append(Value("length", INT64, ["B"]))
    return graph.model(inputs, ends, metadata, "transcription")


def chunk_frames(network: TranscriptionNetwork) -> int:
    """Return by how many frames a streaming graph advances: a multiple of the pooling."""
    return -(-LEAST_CHUNK // network.pooling) * network.pooling


def streaming_graph(
    network: TranscriptionNetwork, statistics: Statistics, metadata: Metadata, *, int8: bool
) -> bytes:
    """Return the graph of a forward transcription network that continues from chunk to chunk.

    It reads `chunk_frames` frames and those of the lookahead, and takes and returns h, s, both
    [B, layers, 1, H], and the number of frames read so far [B].
    """
    graph, chunk = _Graph(int8=int8), chunk_frames(network)
    window, K = chunk + network.lookahead, network.output.out_features
    lower, upper = network.lstm, network.upper_lstm
    layers = [lower.num_layers] + ([] if upper is None else [upper.num_layers])
    shape: Shape = ["B", sum(layers), 1, lower.hidden_size]
    states = [
        [Value(f"cache_last_{name}{suffix}", FLOAT, shape) for name in ("channel", "time")]
        + [Value(f"cache_last_channel_len{suffix}", INT64, ["B"])]
        for suffix in ("", "_next")
    ]
    sizes = graph.constant(np.array(layers))
    parts = []
    for value in states[0][:2]:
        by_layer = graph.add("Squeeze", value.name, _axis(graph, 2))
        by_layer = graph.add("Transpose", by_layer, perm=[1, 0, 2])
        parts.append(graph.add_many("Split", len(layers), by_layer, sizes, axis=0))
    first = [State(h, s) for h, s in zip(*parts, strict=True)]
    x = _normalised(graph, "audio_signal", statistics)
    if network.lookahead:
        x = _windows(graph, x, graph.constant(np.array([chunk])), network.lookahead)
    x, state = _lstm(graph, lower, _embedded(graph, lower, x), state=first[0])
    last = [state]
    if network.pooling > 1:
        n = graph.constant(np.array(network.pooling, np.float32))
        x = graph.add("Div", _grouped_sums(graph, x, network.pooling), n)
    if upper is not None:
        x, state = _lstm(graph, upper, x, state=first[1])
        last.append(state)
    f = graph.add("Transpose", _output_layer(graph, network.output, x), perm=[1, 2, 0])
    graph.name_output("outputs", f)
    num_vectors = graph.constant(np.array(chunk // network.pooling))
    zero = graph.add("Sub", "length", "length")
    graph.name_output("encoded_lengths", graph.add("Add", zero, num_vectors))
    for value, *ends in zip(states[1][:2], *last, strict=True):
        whole = graph.add("Concat", *ends, axis=0) if len(ends) > 1 else ends[0]
        by_item = graph.add("Transpose", whole, perm=[1, 0, 2])
        graph.name_output(value.name, graph.add("Unsqueeze", by_item, _axis(graph, 2)))
    read = graph.add("Add", states[0][2].name, graph.constant(np.array(chunk)))
    graph.name_output(states[1][2].name, read)
    inputs = [
        Value("audio_signal", FLOAT, ["B", network.input_size, window]),
        Value("length", INT64, ["B"]),
    ]
    outputs = [
        Value("outputs", FLOAT, ["B", K, chunk // network.pooling]),
        Value("encoded_lengths", INT64, ["B"]),
    ]
    dimensions = {
        f"cache_last_{name}_dim{i}": shape[i] for name in ("channel", "time") for i in (1, 2, 3)
    }
    described = {**metadata, "window_size": window, "chunk_shift": chunk, **dimensions}
    return graph.model(inputs + states[0], outputs + states[1], described, "transcription")


def prediction_graph(network: PredictionNetwork, *, int8: bool) -> bytes:
    """Return the graph of a prediction network (predictor): g [B, K+1, U] of ids [B, U].

    It takes and returns h and s, each [layers, B, H]. The first id is null.
    """
    graph = _Graph(int8=int8)
    lstm, K = network.lstm, network.output.out_features
    x = _embedded_ids(graph, lstm, graph.add("Cast", "targets", to=INT64))
    hidden, last = _lstm(graph, lstm, x, state=State("h", "c"))
    g = graph.add("Transpose", _output_layer(graph, network.output, hidden), perm=[1, 2, 0])
    names = ("outputs", "prednet_lengths", "h_next", "c_next")
    for name, value in zip(names, (g, "target_length", *last), strict=True):
        graph.name_output(name, value)
    state: Shape = [lstm.num_layers, "B", lstm.hidden_size]
    inputs = [
        Value("targets", INT32, ["B", "U"]),
        Value("target_length", INT32, ["B"]),
        *(Value(name, FLOAT, state) for name in ("h", "c")),
    ]
    outputs = [
        Value("outputs", FLOAT, ["B", K, "U"]),
        Value("prednet_lengths", INT32, ["B"]),
        *(Value(name, FLOAT, state) for name in ("h_next", "c_next")),
    ]
    return graph.model(inputs, outputs, {}, "prediction")


def joint_graph(num_outputs: int) -> bytes:
    """Return the graph of the joint (joiner): the logits f + g [B, T, U, K+1] (Eq. 12)."""
    graph = _Graph(int8=False)
    f, g = (
        graph.add("Unsqueeze", graph.add("Transpose", name, perm=[0, 2, 1]), _axis(graph, axis))
        for name, axis in (("encoder_outputs", 2), ("decoder_outputs", 1))
    )
    graph.name_output("outputs", graph.add("Add", f, g))
    inputs = [
        Value("encoder_outputs", FLOAT, ["B", num_outputs, "T"]),
        Value("decoder_outputs", FLOAT, ["B", num_outputs, "U"]),
    ]
    outputs = [Value("outputs", FLOAT, ["B", "T", "U", num_outputs])]
    return graph.model(inputs, outputs, {}, "joint")


def _normalised(graph: _Graph, name: str, statistics: Statistics) -> str:
    """Return frames [B, D, T] as [T, B, D], normalised."""
    x = graph.add("Transpose", name, perm=[2, 0, 1])
    x = graph.add("Sub", x, graph.constant(statistics.mean))
    return graph.add("Div", x, graph.constant(statistics.deviation))
