"""From frames to labels: the search through the output sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.networks import Transducer


@dataclass(frozen=True)
class Hypothesis:
    """An output sequence, and how it was found."""

    labels: tuple[int, ...]  # ids, null excluded
    frames: tuple[int, ...]  # the transcription vector at which each label was emitted, from 0
    log_prob: float  # of the alignment


@torch.no_grad()
def greedy_search(
    model: Transducer,
    frames: Tensor,  # [B, T, D], or ids [B, T]
    num_frames: Tensor,  # [B]
    max_labels_per_frame: int = 20,
) -> list[Hypothesis]:
    """The alignment that takes the most probable output at every node, for each utterance."""
    transcription, num_vectors = model.transcription_network(frames, num_frames)
    B = len(transcription)
    prediction, state = model.prediction_network.step(num_vectors.new_full((B,), NULL))
    labels: list[list[int]] = [[] for _ in range(B)]
    times: list[list[int]] = [[] for _ in range(B)]
    log_prob = torch.zeros(B, dtype=torch.float64)
    for t in range(transcription.shape[1]):
        here = t < num_vectors  # the utterances whose alignment is at this frame
        for emitted in range(max_labels_per_frame + 1):
            scores = (transcription[:, t] + prediction).log_softmax(-1)
            best, output = scores.max(-1)
            if emitted == max_labels_per_frame:
                best, output = scores[:, NULL], torch.full_like(output, NULL)
            log_prob += torch.where(here, best, 0.0)
            here = here & (output != NULL)
            rows = here.nonzero()[:, 0]
            if len(rows) == 0:
                break
            for b in rows.tolist():
                labels[b].append(int(output[b]))
                times[b].append(t)
            stepped, later = model.prediction_network.step(
                output[rows], (state[0][:, rows], state[1][:, rows])
            )
            prediction = prediction.index_copy(0, rows, stepped)
            state = (state[0].index_copy(1, rows, later[0]), state[1].index_copy(1, rows, later[1]))
    return [
        Hypothesis(tuple(y), tuple(when), float(log_prob[b]))
        for b, (y, when) in enumerate(zip(labels, times, strict=True))
    ]
