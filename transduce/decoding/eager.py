"""Both searches in tensors, for models on a GPU: no loop over hypotheses.

Algorithm 1's loop in batches is that of cpu.py, and so is the proof. What differs is how its parts
are put: a set is a tensor from which what has become too improbable is left out, and what is asked
of every prefix is asked of the trie, of all at once. Probabilities are logarithms in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from transduce.alphabet import NULL
from transduce.decoding.fusion import FusedScores
from transduce.decoding.hypothesis import Found, check_prediction
from transduce.decoding.trie import prefixes_for
from transduce.kernels.nvrtc import current, without_autocast
from transduce.networks import PredictionNetwork

MIN_BATCH = 256  # hypotheses that are expanded at once, of a narrow beam; W of a wide one
LEAST = -torch.finfo(torch.float64).max  # of what is possible at all


def beam_searches(
    network: PredictionNetwork,
    transcriptions: list[Tensor],  # [T, K+1] each
    beam_width: int,
    max_labels_per_frame: int,
    fused: Callable[[], FusedScores | None],
) -> list[Found]:
    """B after the last frame, of each utterance, one utterance after the other."""
    device = network.output.weight.device
    on_gpu = device.type == "cuda"
    with current(device) if on_gpu else nullcontext(), without_autocast():
        return [
            _Search(network, f, beam_width, max_labels_per_frame, fused()).run()
            for f in transcriptions
        ]


class _Search:
    """The search through one utterance's output sequences."""

    def __init__(
        self,
        network: PredictionNetwork,
        transcription: Tensor,
        beam_width: int,
        max_labels_per_frame: int,
        fused: FusedScores | None,
    ) -> None:
        self.f = transcription.double().contiguous()
        self.prefixes = prefixes_for(network, fused)
        self.beam_width, self.max_labels_per_frame = beam_width, max_labels_per_frame
        self.batch_size = max(MIN_BATCH, beam_width)
        self.num_bounded = self.num_expanded = 0

    def run(self) -> Found:
        nodes = torch.zeros(1, dtype=torch.int64, device=self.f.device)
        log_prob = self.f.new_zeros(1)
        for t in range(len(self.f)):
            if len(nodes) == 0:
                break
            log_prob = self.prefixes.enter(t, nodes, log_prob, self.f[t])
            nodes, log_prob = self._frame(t, nodes, log_prob)
        # What remains of the trie, on the CPU.
        size, prefixes = self.prefixes.size, self.prefixes
        check_prediction(float(prefixes.g[:size].amax()))
        prefixes.parent, prefixes.label = prefixes.parent[:size].cpu(), prefixes.label[:size].cpu()
        at = nodes.tolist()
        return Found(
            log_prob.cpu().numpy(),
            prefixes.depth[nodes].cpu().numpy(),
            lambda i: prefixes.labels(at[i]),
            self.num_bounded,
            self.num_expanded,
            size,
        )

    def _frame(self, t: int, nodes: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """B of frame t: its nodes and their probabilities, from A with its prefix sums."""
        trie, K1, most = self.prefixes, self.prefixes.K1, self.max_labels_per_frame
        beam_nodes, beam = nodes[:0], log_prob[:0]
        # The extensions in A: their probabilities and keys.
        open_log_prob, open_keys = log_prob[:0], nodes[:0]
        bounded = log_prob.new_full((), -torch.inf)
        rounds = 0
        while len(nodes) > 0:
            self.num_expanded += len(nodes)
            # Pr(y) from before the product with Pr(∅|y,t).
            with_null, extended = trie.extend(t, nodes, log_prob, self.f[t], most)
            beam_nodes, beam = torch.cat([beam_nodes, nodes]), torch.cat([beam, with_null])
            if rounds >= most:
                ended = trie.emitted[nodes] == most
                bounded = torch.maximum(bounded, torch.where(ended, log_prob, -torch.inf).amax())
            # What is equal to the W-th best stays, until the frame is over.
            worst = self._worst(beam)
            found = (extended >= worst).view(-1).nonzero()[:, 0]
            row = found // K1
            keys = torch.add(found, nodes[row] - row, alpha=K1)
            if len(open_keys) > 0:
                kept = (open_log_prob >= worst).nonzero()[:, 0]
                open_log_prob, open_keys = open_log_prob[kept], open_keys[kept]
            open_log_prob = torch.cat([open_log_prob, extended.view(-1)[found]])
            open_keys = torch.cat([open_keys, keys])
            log_prob, keys = open_log_prob, open_keys
            open_log_prob, open_keys = open_log_prob[:0], open_keys[:0]
            if len(keys) > self.batch_size:
                taken = log_prob.topk(self.batch_size, sorted=False).indices
                left = torch.ones_like(keys, dtype=torch.bool)
                left[taken] = False
                open_log_prob, open_keys = log_prob[left], keys[left]
                log_prob, keys = log_prob[taken], keys[taken]
            nodes = trie.child.view(-1)[keys].long()
            new = (nodes < 0).nonzero()[:, 0]
            if len(new) > 0:
                nodes[new] = trie.add(keys[new])
            rounds += 1
        worst = self._worst(beam)
        self.num_bounded += rounds > most and bool(bounded >= worst)
        kept = (beam >= worst).nonzero()[:, 0]
        return self._best(beam_nodes[kept], beam[kept])

    def _worst(self, beam: Tensor) -> Tensor:
        """The W-th best of B, or what is better than impossible if B has fewer."""
        excess = len(beam) - self.beam_width
        if excess < 0:
            return beam.new_full((), LEAST)
        return beam.kthvalue(excess + 1).values.clamp(min=LEAST)

    def _best(self, nodes: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """The W best; equals in the order of their labels."""
        excess = len(nodes) - self.beam_width
        if excess > 0:
            equal = (log_prob == log_prob.amin()).nonzero()[:, 0].tolist()
            last = sorted(equal, key=lambda i: self.prefixes.labels(int(nodes[i])))[-excess:]
            kept = torch.ones_like(nodes, dtype=torch.bool)
            kept[last] = False
            nodes, log_prob = nodes[kept], log_prob[kept]
        return nodes, log_prob


def greedy_searches(
    network: PredictionNetwork,
    transcription: Tensor,  # [B, T, K+1]
    num_vectors: Tensor,  # [B]
    max_labels_per_frame: int,
) -> tuple[list[list[int]], list[list[int]], list[float], list[int]]:
    """The labels, their frames, log_prob and the number of bounded frames of each utterance."""
    B, T = transcription.shape[:2]
    prediction, state = network.step(num_vectors.new_full((B,), NULL))
    labels: list[list[int]] = [[] for _ in range(B)]
    times: list[list[int]] = [[] for _ in range(B)]
    log_prob = torch.zeros(B, dtype=torch.float64, device=transcription.device)
    num_bounded, largest = torch.zeros_like(num_vectors), prediction.amax()
    for t in range(T):
        here = t < num_vectors  # the utterances whose alignment is at this frame
        for emitted in range(max_labels_per_frame + 1):
            scores = (transcription[:, t] + prediction).log_softmax(-1)
            best, output = scores.max(-1)
            if emitted == max_labels_per_frame:
                num_bounded += here & (output != NULL)
                best, output = scores[:, NULL], torch.full_like(output, NULL)
            log_prob += torch.where(here, best, 0.0)
            here = here & (output != NULL)
            rows = here.nonzero()[:, 0]
            if len(rows) == 0:
                break
            for b, label in zip(rows.tolist(), output[rows].tolist(), strict=True):
                labels[b].append(label)
                times[b].append(t)
            stepped, later = network.step(output[rows], (state[0][:, rows], state[1][:, rows]))
            largest = torch.maximum(largest, stepped.amax())
            prediction = prediction.index_copy(0, rows, stepped)
            state = (
                state[0].index_copy(1, rows, later[0]),
                state[1].index_copy(1, rows, later[1]),
            )
    check_prediction(float(largest))
    return labels, times, log_prob.tolist(), num_bounded.tolist()
