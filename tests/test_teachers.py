"""Teachers of sound: normalisation and features. tests/test_training.py trains with teachers."""

from dataclasses import replace

import pytest
import torch

from transduce.alphabet import Alphabet
from transduce.architectures import NetworkConfig, build_network
from transduce.audio.features import FeatureSettings, Statistics
from transduce.data.batches import Batch
from transduce.data.pairs import Notation
from transduce.lattice.distillation import next_label_log_probs
from transduce.model.checkpoint import TrainedModel, save_model
from transduce.model.signature import Signature
from transduce.training.checks import TrainingError
from transduce.training.teachers import load_teachers

FEATURES = FeatureSettings(kind="log_mel", num_channels=4, num_deltas=0)
CONFIG = NetworkConfig(hidden_size=6, prediction_size=6, pooling=2)
SOUND = Signature(
    Alphabet("abc"),
    Notation("characters", None),
    features=FEATURES,
    statistics=Statistics(torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([0.5, 2.0, 1.0, 4.0])),
)
TEXT = Signature(*[Alphabet("abc"), Notation("characters", None)] * 2)


def teacher_file(tmp_path, signature):
    torch.manual_seed(0)
    network = build_network(CONFIG, signature.input_size, 3)
    path = tmp_path / "teacher.safetensors"
    save_model(TrainedModel(network, CONFIG, signature), path)
    return path


def test_a_teacher_hears_with_its_own_normalisation(tmp_path):
    path = teacher_file(tmp_path, SOUND)
    ours = replace(SOUND, statistics=Statistics(torch.full((4,), 5.0), torch.full((4,), 3.0)))
    (teacher,) = load_teachers([path], ours)
    frames, lengths = torch.randn(2, 5, 4), torch.tensor([5, 3])
    labels, num_labels = torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])
    heard = Batch((), ours.statistics.normalise(frames), lengths, labels, num_labels)
    with torch.no_grad():
        f, g, num_vectors = teacher.network(SOUND.statistics.normalise(frames), lengths, labels)
    expected = next_label_log_probs(f, g, labels, num_vectors, num_labels)
    torch.testing.assert_close(teacher.log_probs(heard), expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_of_other_inputs_is_refused(tmp_path):
    path = teacher_file(tmp_path, SOUND)
    with pytest.raises(TrainingError, match=r"it reads sound, and the network to be trained text"):
        load_teachers([path], TEXT)
    other = replace(SOUND, features=replace(FEATURES, shift=0.02))
    with pytest.raises(TrainingError, match=r"^train.teacher, .*: it has other features; set data"):
        load_teachers([path], other)
    path = teacher_file(tmp_path, TEXT)
    with pytest.raises(TrainingError, match=r"it reads text, and the network to be trained sound"):
        load_teachers([path], SOUND)
