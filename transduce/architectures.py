"""The networks: the paper's transducer, CTC and next-label predictor, and the continuous
transducer that its last sentence promises.

All have the same methods, so that training, evaluation and the commands work with any of them:
`losses(batch)` for training, `search(batch, options)` for decoding. An `Ensemble` of transducers
has them too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from transduce.alphabet import NULL
from transduce.data.batches import Batch, Example, NetworkSizes
from transduce.decoding.ctc import ctc_beam_search, ctc_best_path, ctc_prefix_search
from transduce.decoding.hypothesis import Hypothesis
from transduce.decoding.options import SearchOptions
from transduce.decoding.search import eval_mode, greedy_search, search_model
from transduce.kernels.backends import Backend
from transduce.lattice.consistency import lattice_symmetric_kl, symmetric_kl
from transduce.lattice.distillation import distillation_losses
from transduce.lattice.loss import transducer_loss
from transduce.lattice.mixtures import mixture_loss, num_parameters
from transduce.networks import PredictionNetwork, TranscriptionNetwork, check_lookahead
from transduce.sequences import reverse_padded, zero_padding
from transduce.settings import check_at_least, check_at_most

Hypotheses = tuple[Hypothesis, ...]  # of one input, best first


class SequenceNetwork(Protocol):
    """The methods of a network that training, evaluation and the commands use."""

    kind: str  # its name in tables and messages
    reads_input: bool  # whether it has a source: the next-label predictor has none
    has_timings: bool  # whether its hypotheses can have timings
    has_labels: bool  # whether its outputs are labels: the continuous transducer's are vectors

    def losses(self, batch: Batch) -> Tensor:
        """Return -ln Pr(y|x) of each sequence in nats, [B]; NaN where the network gives NaN."""

    def search(
        self, batch: Batch, options: SearchOptions, *, backend: Backend = "auto"
    ) -> list[Hypotheses]:
        """Return the hypotheses of each input, best first."""

    def can_align(self, example: Example) -> bool:
        """Return whether some alignment of the example exists, so that its loss is finite."""

    def rows_per_input(self, options: SearchOptions) -> int:
        """Return how many rows of f a search holds for each input."""


Outputs = tuple[Tensor, ...]  # of a network for a batch, and the labels and lengths beside them


class _Trainable(nn.Module):
    """The base class of the networks."""

    reads_input, has_timings, has_labels = True, False, True

    def losses(self, batch: Batch, outputs: Outputs | None = None) -> Tensor:
        """Return -ln Pr(y|x) of each sequence in nats, [B]; NaN where the network gives NaN.

        `outputs` are those of the batch, if they were computed already.
        """
        raise NotImplementedError

    def training_losses(
        self, batch: Batch, outputs: Outputs | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return -ln Pr(y|x) of each sequence and what training minimises, both [B].

        They differ if the batch has targets: the second is then the distillation loss.
        """
        losses = self.losses(batch, outputs)
        return losses, losses

    def consistency_losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means over two views of each sequence of both `training_losses`, and the
        divergence between the views, all [B].

        The batch holds every sequence twice, [2 B]: first all first views, then all second ones,
        which masks and dropout make different. The divergence is the symmetric KL divergence
        between the output distributions of the two.
        """
        outputs = self._outputs(batch)
        pair = self.training_losses(batch, outputs)
        losses, minimised = (each.view(2, -1).mean(0) for each in pair)
        if losses.device.type == "cpu" and not losses.isfinite().all():
            return losses, minimised, torch.zeros_like(losses)  # there is nothing to compare
        return losses, minimised, self._divergence(outputs)

    def can_align(self, example: Example) -> bool:
        """Return whether some alignment of the example exists, so that its loss is finite."""
        return True

    def rows_per_input(self, options: SearchOptions) -> int:
        """Return how many rows of f a search holds for each input."""
        return 1

    def _outputs(self, batch: Batch) -> Outputs:
        raise NotImplementedError

    def _divergence(self, outputs: Outputs) -> Tensor:
        raise NotImplementedError


class Transducer(_Trainable):
    """The transducer: a transcription network and a prediction network.

    transcription, num_vectors = model.transcription_network(frames, num_frames)
    prediction = model.prediction_network(labels)
    loss = transducer_loss(transcription, prediction, labels, num_vectors, num_labels)

    By default the prediction network has one layer as wide as the transcription network in each
    direction. With `embedding_size`, inputs and labels have embeddings of that size, to which
    dropout applies in training. A transducer that reads `backwards` takes every sequence from its
    end; `losses` and the searches reverse inputs and outputs themselves.
    """

    kind, has_timings = "transducer", True

    def __init__(
        self,
        input_size: int,
        num_labels: int,
        hidden_size: int = 128,
        num_layers: int = 1,
        bidirectional: bool = True,
        dropout: float = 0.0,
        pooling: int = 1,
        prediction_size: int | None = None,
        prediction_layers: int = 1,
        embedding_size: int = 0,
        backwards: bool = False,
        lookahead: int = 0,
    ) -> None:
        super().__init__()
        self.backwards = backwards
        self.transcription_network = TranscriptionNetwork(
            *(input_size, num_labels, hidden_size, num_layers, bidirectional, dropout, pooling),
            *(embedding_size, lookahead),
        )
        self.prediction_network = PredictionNetwork(
            *(num_labels, prediction_size or hidden_size, prediction_layers, dropout),
            embedding_size=embedding_size,
        )

    def forward(
        self, frames: Tensor, num_frames: Tensor, labels: Tensor, *, backend: Backend = "auto"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return f [B, T, K+1], g [B, U+1, K+1] and the numbers of transcription vectors [B].

        Sequences are taken as they are given, also by a transducer that reads backwards.
        """
        transcription, num_vectors = self.transcription_network(frames, num_frames, backend=backend)
        return transcription, self.prediction_network(labels, backend=backend), num_vectors

    def losses(self, batch: Batch, outputs: Outputs | None = None) -> Tensor:
        """Return -ln Pr(y|x) of each sequence in nats, [B]; NaN where the network gives NaN."""
        lattice = outputs or self._outputs(batch)
        losses = _losses_if_not_finite(lattice)
        return transducer_loss(*lattice) if losses is None else losses

    def training_losses(
        self, batch: Batch, outputs: Outputs | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return -ln Pr(y|x) of each sequence and what training minimises, both [B].

        They differ if the batch has targets: the second is then the distillation loss, and the
        first is without a gradient.
        """
        if batch.targets is None:
            return super().training_losses(batch, outputs)
        lattice = outputs or self._outputs(batch)
        losses = _losses_if_not_finite(lattice)
        if losses is not None:
            return losses, losses
        distilled, losses = distillation_losses(*(*lattice, batch.targets))
        return losses, distilled

    def candidate_losses(
        self, batch: Batch, rows: Tensor, labels: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Return -ln Pr(y|x) in nats, [R], of labels [R, U], each for the input rows[r].

        The transcription network runs once for each input, the prediction network and the lattice
        once for each row. The labels of the batch itself are not read.
        """
        if self.backwards:
            batch, labels = batch.reversed(), reverse_padded(labels, num_labels)
        f, num_vectors = self.transcription_network(batch.frames, batch.num_frames)
        # The gradients of an input's rows may nearly cancel: add them up in float32, not bfloat16.
        f = f.to(torch.promote_types(f.dtype, torch.float32))
        g = self.prediction_network(labels).to(f.dtype)
        return self.losses(batch, (f[rows], g, labels, num_vectors[rows], num_labels))

    def search(
        self, batch: Batch, options: SearchOptions, *, backend: Backend = "auto"
    ) -> list[Hypotheses]:
        """Search by Algorithm 1; by the greedy search if the options ask for nothing more."""
        if options.greedy:
            found = greedy_search(
                *(self, batch.frames, batch.num_frames, options.max_labels_per_frame),
                null_bias=options.null_bias,
                backend=backend,
                names=batch.names,
            )
            return [(hypothesis,) for hypothesis in found]
        searched = search_model(
            *(self, batch.frames, batch.num_frames, options, backend), names=batch.names
        )
        return [tuple(hypotheses) for hypotheses in searched]

    def _outputs(self, batch: Batch) -> Outputs:
        """Return f, g, and the rest of the arguments of `transducer_loss`."""
        if self.backwards:
            batch = batch.reversed()
        f, g, num_vectors = self(batch.frames, batch.num_frames, batch.labels)
        return f, g, batch.labels, num_vectors, batch.num_labels

    def _divergence(self, outputs: Outputs) -> Tensor:
        return lattice_symmetric_kl(*outputs)


class CTC(_Trainable, TranscriptionNetwork):
    """A transcription network alone, trained by connectionist temporal classification."""

    kind = "CTC"

    def losses(self, batch: Batch, outputs: Outputs | None = None) -> Tensor:
        """Return -ln Pr(y|x) of each sequence in nats, [B]: the CTC loss."""
        transcription, num_vectors = outputs or self._outputs(batch)
        log_prob = transcription.log_softmax(-1).transpose(0, 1)
        lengths = (num_vectors, batch.num_labels)
        return nn.functional.ctc_loss(
            log_prob, batch.labels, *lengths, blank=NULL, reduction="none"
        )

    def search(
        self, batch: Batch, options: SearchOptions, *, backend: Backend = "auto"
    ) -> list[Hypotheses]:
        """Take the best path at width 1, else the prefix search; N-best and fusion use a beam."""
        if options.with_timings:
            raise ValueError("CTC has no timings; ask for the output alone")
        with torch.no_grad(), eval_mode(self):
            f, num_vectors = self(batch.frames, batch.num_frames, backend=backend)
        if options.null_bias:
            f[..., NULL] += options.null_bias
        if options.fuses or options.n_best > 1:
            beams = ctc_beam_search(f, num_vectors, options)
        else:
            search = ctc_best_path if options.beam_width == 1 else ctc_prefix_search
            beams = [[labelling] for labelling in search(f, num_vectors)]
        return [
            tuple(
                Hypothesis(one.labels, one.log_prob, one.log_prob / max(1, len(one.labels)), ())
                for one in beam
            )
            for beam in beams
        ]

    def can_align(self, example: Example) -> bool:
        """Return whether the frames suffice for the labels, and a null between equal ones."""
        labels = example.labels
        repeats = int((labels[1:] == labels[:-1]).sum())
        return example.num_vectors(self.pooling) >= len(labels) + repeats

    def _outputs(self, batch: Batch) -> Outputs:
        return self(batch.frames, batch.num_frames)  # type: ignore[no-any-return]

    def _divergence(self, outputs: Outputs) -> Tensor:
        return symmetric_kl(*outputs)


class NextLabelPredictor(_Trainable, PredictionNetwork):
    """A prediction network alone: Pr(y) of the labels, each given those before it."""

    kind, reads_input = "prediction", False

    def losses(self, batch: Batch, outputs: Outputs | None = None) -> Tensor:
        """Return -ln Pr(y) of each sequence in nats, [B]: the cross-entropy of its labels."""
        prediction, _ = outputs or self._outputs(batch)
        # Label k is output k - 1, and so padding, which is null, is -1.
        losses = nn.functional.cross_entropy(
            prediction.transpose(1, 2), batch.labels - 1, ignore_index=-1, reduction="none"
        )
        return losses.sum(1)

    def search(
        self, batch: Batch, options: SearchOptions, *, backend: Backend = "auto"
    ) -> list[Hypotheses]:
        """Raise ValueError: without an input there is nothing to search."""
        raise ValueError("a prediction network alone has no input to transcribe")

    def _outputs(self, batch: Batch) -> Outputs:
        return self(batch.labels)[:, :-1], batch.num_labels  # nothing follows the last label

    def _divergence(self, outputs: Outputs) -> Tensor:
        return symmetric_kl(*outputs)


class ContinuousTransducer(_Trainable):
    """A transducer whose outputs are vectors, by a mixture of Gaussians at each node.

    transcription, num_vectors = model.transcription_network(frames, num_frames)
    prediction = model.prediction_network(outputs)
    loss = mixture_loss(
        transcription, prediction, outputs, num_vectors, num_outputs, num_components=4
    )

    The prediction network reads the outputs before; in training, with Gaussian noise of the
    deviation `feedback_noise` on each number, because it will read its own outputs in generation,
    which are not exact. Outputs should have mean 0 and deviation 1 over the training set. Only
    inputs have embeddings.
    """

    kind, has_labels = "continuous", False

    def __init__(
        self,
        input_size: int,
        output_size: int,  # D, the numbers of an output
        hidden_size: int = 128,
        num_layers: int = 1,
        bidirectional: bool = True,
        dropout: float = 0.0,
        pooling: int = 1,
        prediction_size: int | None = None,
        prediction_layers: int = 1,
        embedding_size: int = 0,
        lookahead: int = 0,
        num_components: int = 4,
        product_rank: int = 8,
        feedback_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.output_size, self.num_components = output_size, num_components
        self.feedback_noise = feedback_noise
        size = num_parameters(num_components, product_rank, output_size)
        self.transcription_network = TranscriptionNetwork(
            *(input_size, size - 1, hidden_size, num_layers, bidirectional, dropout, pooling),
            *(embedding_size, lookahead),
        )
        self.prediction_network = PredictionNetwork(
            *(output_size, prediction_size or hidden_size, prediction_layers, dropout),
            num_outputs=size,
        )

    def forward(
        self, frames: Tensor, num_frames: Tensor, outputs: Tensor, *, backend: Backend = "auto"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return f [B, T, P], g [B, U+1, P] of outputs [B, U, D] and the numbers of vectors [B]."""
        transcription, num_vectors = self.transcription_network(frames, num_frames, backend=backend)
        return transcription, self.prediction_network(outputs, backend=backend), num_vectors

    def losses(self, batch: Batch, outputs: Outputs | None = None) -> Tensor:
        """Return -ln of the density of each sequence in nats, [B]; negative above density 1."""
        lattice = outputs or self._outputs(batch)
        losses = _losses_if_not_finite(lattice)
        if losses is not None:
            return losses
        return mixture_loss(*lattice, num_components=self.num_components)

    def search(
        self, batch: Batch, options: SearchOptions, *, backend: Backend = "auto"
    ) -> list[Hypotheses]:
        """Raise ValueError: the outputs are vectors, which `decoding.generation` generates."""
        raise ValueError(
            "a continuous transducer outputs vectors, not labels; generate them with `speak`"
        )

    def _outputs(self, batch: Batch) -> Outputs:
        """Return f, g, and the rest of the arguments of `mixture_loss`."""
        before = zero_padding(batch.labels, batch.num_labels)
        if self.training and self.feedback_noise:
            before = before + self.feedback_noise * torch.randn_like(before)
        f, g, num_vectors = self(batch.frames, batch.num_frames, before)
        return f, g, batch.labels, num_vectors, batch.num_labels

    def _divergence(self, outputs: Outputs) -> Tensor:
        raise ValueError(
            "a continuous transducer has no consistency loss; set train.consistency to 0"
        )


def _losses_if_not_finite(lattice: Outputs) -> Tensor | None:
    """Return NaN for the items whose f or g is not finite and 0 for the rest, if there are any.

    A loss on the CPU would raise; on a GPU it is NaN by itself, and this returns None.
    """
    if lattice[0].device.type != "cpu":
        return None
    finite = _finite(lattice[0]) & _finite(lattice[1])
    return None if finite.all() else torch.where(finite, 0.0, torch.nan)


def _finite(vectors: Tensor) -> Tensor:
    """Return whether all numbers of each item of [B, ...] are finite, [B]."""
    return vectors.detach().isfinite().flatten(1).all(1)


AnyNetwork = Transducer | CTC | NextLabelPredictor | ContinuousTransducer


# --- Which network, and how large ---------------------------------------------------------------


@dataclass(frozen=True)
class NetworkConfig:
    """The kind and the sizes of a network. The defaults are the paper's."""

    # continuous: from text to the frames of sound, pairs being read the other way round
    network: Literal["transducer", "ctc", "prediction", "continuous"] = "transducer"
    hidden_size: int = 128  # of the transcription network, in each direction
    num_layers: int = 1  # of the transcription network
    bidirectional: bool = True
    pooling: int = 1  # frames averaged into one after the first layer
    prediction_size: int = 128  # hidden units of the prediction network
    prediction_layers: int = 1
    dropout: float = 0.0  # on the outputs of each layer of either network, and on embeddings
    embedding_size: int = 0  # of inputs and labels; 0: one-hot vectors
    backwards: bool = False  # whether a transducer takes every sequence from its end
    lookahead: int = 0  # frames to the right that each input frame is stacked with
    num_components: int = 4  # Gaussians in the mixture of a continuous transducer
    product_rank: int = 8  # numbers of f and g whose products are added to each logit; 0: the sum
    # Deviation of the noise that its prediction network gets on the outputs before, in training
    feedback_noise: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "pooling", "prediction_size", "prediction_layers")
        check_at_least(self, 1, *sizes, "num_components")
        check_at_least(self, 0, "embedding_size", "lookahead", "product_rank", "feedback_noise")
        check_at_most(self, 1_000_000, "hidden_size", "prediction_size", "embedding_size")
        check_at_most(self, 1000, "num_layers", "prediction_layers", "pooling", "lookahead")
        check_at_most(self, 1000, "num_components", "product_rank")
        check_lookahead(self.lookahead, self.bidirectional)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.backwards and self.network != "transducer":
            raise ValueError(f"backwards is for a transducer, not {self.network}; leave it out")
        if self.lookahead and self.network == "prediction":
            raise ValueError(
                "lookahead is for networks with an input, not prediction; leave it out"
            )


def build_network(config: NetworkConfig, input_size: int, output_size: int) -> AnyNetwork:
    """Build the network of a configuration; draw its weights uniformly from [-0.1, 0.1].

    The output size is the number of labels, or of the numbers of a continuous output.
    """
    prediction = (config.prediction_size, config.prediction_layers)
    embedded = config.embedding_size
    if config.network == "prediction":
        return NextLabelPredictor(output_size, *prediction, config.dropout, False, embedded)
    transcription = (config.hidden_size, config.num_layers, config.bidirectional)
    regularised = (config.dropout, config.pooling)
    if config.network == "ctc":
        return CTC(
            *(input_size, output_size, *transcription, *regularised, embedded), config.lookahead
        )
    sizes = (*transcription, *regularised, *prediction, embedded)
    if config.network == "continuous":
        mixture = (config.num_components, config.product_rank, config.feedback_noise)
        return ContinuousTransducer(input_size, output_size, *sizes, config.lookahead, *mixture)
    return Transducer(input_size, output_size, *sizes, config.backwards, config.lookahead)


def network_sizes(config: NetworkConfig, input_size: int, output_size: int) -> NetworkSizes:
    """Return the sizes of a configuration's network that determine the memory of a step."""
    others = ("network", "backwards", "feedback_noise")
    settings = {name: value for name, value in asdict(config).items() if name not in others}
    if config.network != "continuous":
        settings["num_components"] = 0
    return NetworkSizes(num_labels=output_size, input_size=input_size, **settings)
