"""Initial weights from other runs are copied symbol by symbol."""

import pytest
import torch

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.pairs import Notation
from transduce.model.checkpoint import TrainedModel
from transduce.model.signature import Signature
from transduce.training.pretraining import PretrainingError, copy_prediction, copy_transcription

CHARACTERS = Notation("characters", None)


def signature_of(targets, sources="abc"):
    return Signature(Alphabet(targets), CHARACTERS, Alphabet(sources), CHARACTERS)


def model_of(kind, signature, **sizes):
    config = NetworkConfig(kind, **({"hidden_size": 5, "prediction_size": 4} | sizes))
    network = build_network(config, signature.input_size, len(signature.targets))
    return TrainedModel(network, config, signature)


@pytest.mark.parametrize("embedding_size", [0, 3])
@pytest.mark.parametrize("kind", ["prediction", "transducer"])
def test_the_copied_prediction_network_has_the_same_outputs(kind, embedding_size):
    """The alphabets differ in their order, and the pretrained one has more symbols."""
    theirs, ours = signature_of("xqyz"), signature_of("zxy")
    sizes = {"embedding_size": embedding_size}
    pretrained, model = model_of(kind, theirs, **sizes), model_of("transducer", ours, **sizes)
    null_before = model.network.prediction_network.output.weight[0].clone()
    copy_prediction(pretrained, model.network, ours)
    source = getattr(pretrained.network, "prediction_network", pretrained.network)
    found = model.network.prediction_network(torch.tensor([ours.targets.encode("xzzy")]))
    expected = source(torch.tensor([theirs.targets.encode("xzzy")]))
    columns = theirs.targets.encode(ours.targets.symbols)
    null = [0] if kind == "transducer" else []
    columns = null + [k - (kind == "prediction") for k in columns]
    torch.testing.assert_close(found[..., 1 - len(null) :], expected[..., columns])
    kept = torch.equal(model.network.prediction_network.output.weight[0], null_before)
    assert kept == (kind == "prediction")  # a predictor has no output for null to copy


@pytest.mark.parametrize("kind", ["ctc", "transducer"])
@pytest.mark.parametrize("pooling, embedding_size", [(1, 0), (2, 0), (1, 3)])
def test_the_copied_transcription_network_has_the_same_outputs(kind, pooling, embedding_size):
    theirs, ours = signature_of("xqyz", "abc"), signature_of("zxy", "cb")
    sizes = {"num_layers": 2, "pooling": pooling, "embedding_size": embedding_size}
    pretrained, model = model_of(kind, theirs, **sizes), model_of("transducer", ours, **sizes)
    prediction = [w.clone() for w in model.network.prediction_network.parameters()]
    copy_transcription(pretrained, model.network, ours)
    source = getattr(pretrained.network, "transcription_network", pretrained.network)
    found, _ = model.network.transcription_network(torch.tensor([ours.sources.encode("bccbb")]))
    expected, _ = source(torch.tensor([theirs.sources.encode("bccbb")]))
    columns = [0, *theirs.targets.encode(ours.targets.symbols)]
    torch.testing.assert_close(found, expected[..., columns])
    after = model.network.prediction_network.parameters()
    assert all(torch.equal(a, b) for a, b in zip(after, prediction, strict=True))


def sound_signature(**settings):
    features = FeatureSettings(**settings)
    statistics = Statistics(torch.zeros(26), torch.ones(26))
    return Signature(Alphabet("xyz"), CHARACTERS, features=features, statistics=statistics)


@pytest.mark.parametrize(
    "copy, pretrained, said",
    [
        (copy_prediction, model_of("ctc", signature_of("xyz")), "CTC has no prediction network"),
        (copy_prediction, model_of("prediction", signature_of("xy")), "has no label 'z'"),
        (
            copy_prediction,
            model_of("prediction", signature_of("xyz"), prediction_size=3),
            r"is of \(3, 3, num_layers=1\), not of \(3, 4, num_layers=1\)",
        ),
        (copy_transcription, model_of("prediction", signature_of("xyz")), "does not transcribe"),
        (copy_transcription, model_of("ctc", signature_of("xyz", "ab")), "no source symbol 'c'"),
        (copy_transcription, model_of("ctc", signature_of("xyz"), pooling=2), "has pooling 2"),
        (
            copy_transcription,
            model_of("ctc", signature_of("xyz"), num_layers=2),
            "sizes agree",
        ),
        (copy_transcription, model_of("ctc", sound_signature()), "has other inputs"),
    ],
)
def test_weights_of_other_shapes_or_symbols_are_refused(copy, pretrained, said):
    ours = signature_of("xyz")
    with pytest.raises(PretrainingError, match=said) as error:
        copy(pretrained, model_of("transducer", ours).network, ours)
    assert "\n" not in str(error.value)


def test_weights_trained_on_other_features_are_refused():
    ours = sound_signature()
    pretrained = model_of("ctc", sound_signature(pre_emphasis=0.9))
    with pytest.raises(PretrainingError, match="other inputs"):
        copy_transcription(pretrained, model_of("transducer", ours).network, ours)
