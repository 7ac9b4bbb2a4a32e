"""A joint n-gram model: the probability of a source and its labels together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transduce.graphones.ngram import Automaton, estimate_ngrams
from transduce.graphones.reference import MOST_LABELS
from transduce.graphones.segmentation import Sequences, can_end, graphone_key, segment_pairs
from transduce.kernels.sentinels import IMPOSSIBLE, NEVER
from transduce.kernels.simd.options import compiled
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team
from transduce.lattice.cpu.emissions import log_sum

ORDER = 8
CONTEXTS_KEPT = 64  # at one place of a pair; fewer are faster and less exact
# ln of the probability of labels without a source symbol: finite, so that other models can rank it.
LEAST_LOG_JOINT = -1e5


@dataclass(frozen=True, eq=False)
class JointNGram:
    """An n-gram model of graphones, and the graphones.

    It gives ln Pr(x, y). For one source x this ranks labels y as Pr(y|x) does.
    """

    num_symbols: int  # of sources
    num_labels: int
    keys: np.ndarray  # [G], of the graphones, ascending
    automaton: Automaton

    @classmethod
    def learn(
        cls,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]],
        num_symbols: int,
        num_labels: int,
        order: int = ORDER,
    ) -> JointNGram:
        """Learn from pairs of source symbols and labels, which are ids from 1."""
        sources, targets = (Sequences.of(pair[side] for pair in pairs) for side in (0, 1))
        keys, _, sequences = segment_pairs(sources, targets, num_labels)
        if not len(keys):
            raise ValueError(
                "all pairs have more than two labels for each source symbol, and graphones have at "
                "most two; give other pairs"
            )
        return cls(
            num_symbols, num_labels, keys, estimate_ngrams(sequences.not_empty(), len(keys), order)
        )

    def log_joint(self, source: np.ndarray, labels: np.ndarray) -> float:
        """Return ln Pr(x, y) of one pair."""
        frames, y = (torch.from_numpy(ids.astype(np.int64))[None] for ids in (source, labels))
        lengths = (torch.tensor([len(source)]), torch.tensor([0]), y, torch.tensor([len(labels)]))
        return float(self.log_joints(frames, *lengths))

    def log_joints(
        self,
        frames: Tensor,  # [B, T], ids of source symbols
        num_frames: Tensor,
        rows: Tensor,  # [R]
        labels: Tensor,  # [R, U]
        num_labels: Tensor,
    ) -> Tensor:
        """Return ln Pr(x, y), [R], of each labels with the source rows[r], on their device.

        A graphone that training has not seen is taken only if there is no other way.
        """
        batch = (frames, num_frames, rows, labels, num_labels)
        pairs = tuple(part.cpu().contiguous().numpy() for part in batch)
        found = np.empty(len(labels))
        model = (self.num_symbols, self.num_labels, self.keys, *self.automaton)
        T, U = (lengths.numpy() for lengths in (num_frames[rows].cpu(), num_labels.cpu()))
        rows_of_shares, starts = shares_of(T * (U + 1), num_threads())
        arguments = (rows_of_shares, starts, pairs, model, CONTEXTS_KEPT, found)
        _score_shares(team(len(starts) - 1), arguments)
        return torch.from_numpy(found).to(labels.device)


@compiled
def _find(symbols, first, last, symbol):
    """Return the place of the first symbol that is not less, among ascending ones from `first`."""
    while first < last:
        middle = (first + last) // 2
        if symbols[middle] < symbol:
            first = middle + 1
        else:
            last = middle
    return first


@compiled
def _advance(state, symbol, first_arcs, symbols, log_probs, suffixes, back_off):
    """Return ln of the probability of a symbol in a state, and the next state.

    A symbol without any arc has the probability of the unknown one.
    """
    log_prob, following = 0.0, -1
    while following < 0:
        last = first_arcs[state + 1]
        arc = _find(symbols, first_arcs[state], last, symbol)
        if arc < last and symbols[arc] == symbol:
            log_prob += log_probs[arc]
            # A context of the largest length loses its first symbol.
            following = arc + 1 if arc + 1 < len(back_off) else suffixes[arc]
        else:
            log_prob += back_off[state]
            if state == 0:  # below it all symbols, the end and the unknown one are alike
                log_prob -= np.log(first_arcs[1])
                following = 0
            else:
                state = suffixes[state - 1]
    return log_prob, following


@compiled
def _add(states, log_probs, row, u, count, state, log_prob):
    """Add a context to those of a place, or its probability to the same one; return their number.

    If there is no room, it takes the place of the least probable one, or is dropped.
    """
    least, same = 0, -1
    for k in range(count):
        if states[row, u, k] == state:
            same = k
        if log_probs[row, u, k] < log_probs[row, u, least]:
            least = k
    if same >= 0:
        log_probs[row, u, same] = log_sum(log_probs[row, u, same], log_prob)
    elif count < states.shape[2]:
        states[row, u, count], log_probs[row, u, count] = state, log_prob
        count += 1
    elif log_probs[row, u, least] < log_prob:
        states[row, u, least], log_probs[row, u, least] = state, log_prob
    return count


@compiled
def _log_joint(
    source,
    labels,
    num_symbols,
    num_labels,
    keys,
    first_arcs,
    symbols,
    log_probs,
    suffixes,
    back_off,
    unseen,  # whether graphones that training has not seen may be taken, also with more labels
    kept,
):
    """Return ln of the sum over all ways to cut a pair, IMPOSSIBLE if there is none."""
    T, U, end = len(source), len(labels), len(keys)
    # The contexts after i source symbols and u labels are in row i % 2.
    counts = np.zeros((2, U + 1), np.int64)
    states = np.empty((2, U + 1, kept), np.int64)
    alpha = np.empty((2, U + 1, kept))
    # With n-grams of one symbol there is no context but the empty one.
    states[0, 0, 0], alpha[0, 0, 0] = end + 2 if len(back_off) > 1 else 0, 0.0
    counts[0, 0] = 1
    for i in range(T):
        here, there = i % 2, (i + 1) % 2
        for u in range(U + 1):
            counts[there, u] = 0
        for u in range(U + 1):
            most = 0 if counts[here, u] == 0 else U - u + 1 if unseen else MOST_LABELS + 1
            for count in range(most):
                if not unseen and not can_end(i + 1, u + count, T, U):
                    continue
                graphone, share = end, 0.0
                if count <= MOST_LABELS:
                    key = graphone_key(source[i], labels, u, count, num_labels)
                    graphone = _find(keys, 0, end, key)
                if graphone == end or keys[graphone] != key:
                    if not unseen:
                        continue
                    # Half of the unknown symbol's probability is for graphones without labels, a
                    # quarter for those with one, and so on.
                    graphone = end + 2
                    share = -np.log(num_symbols) - np.log(2) - count * np.log(2 * num_labels)
                for k in range(counts[here, u]):
                    state, v = states[here, u, k], u + count
                    log_prob, following = _advance(
                        state, graphone, first_arcs, symbols, log_probs, suffixes, back_off
                    )
                    log_prob += alpha[here, u, k] + share
                    counts[there, v] = _add(
                        states, alpha, there, v, counts[there, v], following, log_prob
                    )
    total, last = IMPOSSIBLE, T % 2
    for k in range(counts[last, U]):
        log_prob, _ = _advance(
            states[last, U, k], end, first_arcs, symbols, log_probs, suffixes, back_off
        )
        total = log_sum(total, alpha[last, U, k] + log_prob)
    return total


@compiled
def _score_rows(share, rows_of_shares, starts, pairs, model, kept, found):
    """Fill ln of the probability of the pairs of a share."""
    frames, num_frames, rows, labels, num_labels = pairs
    for r in rows_of_shares[starts[share] : starts[share + 1]]:
        b = rows[r]
        source, y = frames[b, : num_frames[b]], labels[r, : num_labels[r]]
        found[r] = _log_joint(source, y, *model, False, kept)
        if found[r] <= NEVER:
            found[r] = _log_joint(source, y, *model, True, kept)
        found[r] = max(found[r], LEAST_LOG_JOINT)


_share_rows = sharing(_score_rows)


@compiled
def _score_shares(team, arguments):
    _share_rows(team, arguments)
