"""The choice of a backend; and of arguments that are no tensors, the first is named."""

import numpy as np
import pytest
import torch

import transduce
from transduce import SearchOptions
from transduce.kernels.backends import resolve

f, g, labels = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), torch.ones(1, 2, dtype=torch.int64)
lengths = {"num_frames": torch.tensor([3]), "num_labels": torch.tensor([2])}
additive = {"transcription": f, "prediction": g, "labels": labels, **lengths}
joint = {
    "logits": torch.zeros(1, 3, 3, 4),
    "targets": labels,
    "logit_lengths": lengths["num_frames"],
    "target_lengths": lengths["num_labels"],
}
arrows = {"log_null": torch.zeros(1, 3, 3), "log_label": torch.zeros(1, 3, 2), **lengths}
one = {"log_null": torch.zeros(3, 3), "log_label": torch.zeros(3, 2)}
network = transduce.Transducer(4, 3, 5)
searched = {"frames": torch.ones(1, 3, dtype=torch.int64), "num_frames": torch.tensor([3])}
ctc = {"transcription": f, "num_frames": torch.tensor([3])}
DOORS = {
    "transducer_loss": (transduce.transducer_loss, additive),
    "rnnt_loss": (transduce.rnnt_loss, joint),
    "lattice_loss": (transduce.lattice_loss, arrows),
    "lattice_transitions": (
        transduce.lattice_transitions,
        {"transcription": f[0], "prediction": g[0], "labels": labels[0]},
    ),
    "forward_variables": (transduce.forward_variables, one),
    "backward_variables": (transduce.backward_variables, one),
    "log_likelihood": (transduce.log_likelihood, one),
    "log_occupancy": (transduce.log_occupancy, one),
    "best_alignment": (transduce.best_alignment, one),
    "search": (
        lambda **given: transduce.search(
            **given, prediction_network=network.prediction_network, beam_width=2
        ),
        {"transcription": f, "num_vectors": torch.tensor([3])},
    ),
    "beam_search": (
        lambda **given: transduce.beam_search(network, **given, beam_width=2), searched
    ),
    "greedy_search": (lambda **given: transduce.greedy_search(network, **given), searched),
    "ctc_best_path": (transduce.ctc_best_path, ctc),
    "ctc_prefix_search": (transduce.ctc_prefix_search, ctc),
    "ctc_beam_search": (
        lambda **given: transduce.ctc_beam_search(**given, options=SearchOptions(2)), ctc
    ),
    "TranscriptionNetwork": (network.transcription_network, searched),
    "PredictionNetwork": (network.prediction_network, {"labels": labels}),
    "PeepholeLSTM": (transduce.PeepholeLSTM(4, 3), {"x": f, "lengths": torch.tensor([3])}),
}  # fmt: skip


def test_a_backend_is_that_of_the_tensors_device_or_the_one_asked_for():
    cpu, cuda, mps = map(torch.device, ("cpu", "cuda", "mps"))
    assert [resolve("auto", device) for device in (cpu, cuda)] == ["cpu", "cuda"]
    assert [resolve("reference", device) for device in (cpu, cuda, mps)] == ["reference"] * 3
    assert (resolve("cpu", cpu), resolve("cuda", cuda)) == ("cpu", "cuda")
    for device in (cuda, mps):
        with pytest.raises(ValueError, match=f"'cpu' needs tensors on the CPU; .* on {device}"):
            resolve("cpu", device)
    for device in (cpu, mps):
        with pytest.raises(ValueError, match=f"'cuda' needs tensors on a GPU; .* on {device}"):
            resolve("cuda", device)


@pytest.mark.parametrize("door", DOORS)
def test_a_list_or_an_array_in_place_of_a_tensor_is_named(door):
    function, given = DOORS[door]
    for name, tensor in given.items():
        for wrong, kind in ((tensor.tolist(), "list"), (tensor.numpy(), "ndarray")):
            with pytest.raises(TypeError) as error:
                function(**given | {name: wrong})
            assert str(error.value) == (
                f"{name} must be a tensor, not {kind}; call torch.as_tensor on it"
            )


def test_arrays_can_be_converted_as_the_error_says():
    converted = {name: torch.as_tensor(np.asarray(given)) for name, given in additive.items()}
    assert torch.equal(
        transduce.transducer_loss(**converted), transduce.transducer_loss(**additive)
    )


@pytest.mark.parametrize("blank", [True, 1.0, "0", None])
def test_a_blank_that_is_no_whole_number_is_refused(blank):
    with pytest.raises(TypeError, match="blank must be a whole number, not"):
        transduce.rnnt_loss(**joint, blank=blank)
