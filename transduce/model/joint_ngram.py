"""The file of a joint n-gram model: its tables, and its signature in the header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from transduce.graphones.model import JointNGram
from transduce.graphones.ngram import Automaton
from transduce.graphones.reference import MOST_LABELS
from transduce.model.header import read_signature, signature_header
from transduce.model.signature import Signature
from transduce.model.tensors import JOINT_NGRAM, CheckpointError, read_tensors, write_tensors

DTYPES = {  # of the tables
    "keys": np.int64,
    "first_arcs": np.int32,
    "symbols": np.int32,
    "log_probs": np.float32,
    "suffixes": np.int32,
    "back_off": np.float32,
}
ROUNDING = 1e-3  # by which ln of a probability may exceed 0


@dataclass(frozen=True, eq=False)
class JointNGramModel:
    """A joint n-gram model, and the meaning of its symbols and labels."""

    ngram: JointNGram
    signature: Signature


def save_joint_ngram(model: JointNGramModel, path: Path) -> None:
    """Write a joint n-gram model; an error leaves the old file in place."""
    arrays = model.ngram.automaton._asdict() | {"keys": model.ngram.keys}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    write_tensors(path, tensors, signature_header(model.signature), JOINT_NGRAM)


def load_joint_ngram(path: Path) -> JointNGramModel:
    """Load the joint n-gram model of a file."""
    tensors, header = read_tensors(path, JOINT_NGRAM)
    try:
        signature = read_signature(header, {})
        if signature.sources is None:
            raise ValueError("it reads no text")
        if tensors.keys() != DTYPES.keys():
            raise ValueError(f"its tables are not {', '.join(DTYPES)}")
        # A copy: the tensors are those of the file, which may change.
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        keys = arrays.pop("keys")
        sizes = len(signature.sources), len(signature.targets)
        ngram = JointNGram(*sizes, keys, Automaton(**arrays))
        _check(ngram)
    except KeyError as error:
        raise CheckpointError(
            f"{path} is damaged (there is no {error.args[0]}); learn it again"
        ) from None
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is damaged ({reason}); learn it again") from None
    return JointNGramModel(ngram, signature)


def _check(ngram: JointNGram) -> None:
    """Raise ValueError if an index leaves its table, or if suffixes form a cycle.

    Compiled code reads the tables without checks.
    """
    keys, automaton = ngram.keys, ngram.automaton
    for name, array in {"keys": keys, **automaton._asdict()}.items():
        if array.ndim != 1 or array.dtype != DTYPES[name]:
            raise ValueError(f"{name} is not one row of {DTYPES[name].__name__}")
    first_arcs, symbols, log_probs, suffixes, back_off = automaton
    arcs, states, known = len(symbols), len(back_off), len(keys) + 2  # with the end and the start
    # With n-grams of one symbol there is one state; else there is one after each symbol, too.
    sizes = {
        "symbols": arcs >= known,
        "back_off": states == 1 or known < states <= arcs + 1,
        "first_arcs": len(first_arcs) == states + 1,
        "log_probs": len(log_probs) == arcs,
        "suffixes": len(suffixes) == arcs,
    }
    for name, fits in sizes.items():
        if not fits:
            raise ValueError(f"{name} is not as long as the other tables mean")
    most_keys = (ngram.num_symbols + 1) * (ngram.num_labels + 1) ** MOST_LABELS
    bounds = first_arcs[0] == 0 and first_arcs[1] == known and first_arcs[-1] == arcs
    values = {
        "keys": _ascends(keys).all() and _are_ids(keys, most_keys),
        "first_arcs": bounds and (np.diff(first_arcs) >= 0).all(),
        "symbols": _are_ids(symbols, known),
        "log_probs": (log_probs <= ROUNDING).all(),
        "back_off": (back_off <= ROUNDING).all(),
        # A context is one symbol longer than its suffix, which has a smaller number.
        "suffixes": _are_ids(suffixes, states)
        and (suffixes[: states - 1] <= np.arange(states - 1)).all(),
    }
    for name, is_good in values.items():
        if not is_good:
            raise ValueError(f"{name} has a number that no such table has")
    ascends = _ascends(symbols)
    ascends[first_arcs[:-1][first_arcs[:-1] < arcs]] = True  # the first arc of a state
    if not ascends.all():
        raise ValueError("symbols is not sorted")


def _ascends(array: np.ndarray) -> np.ndarray:
    """Return whether each number is larger than the one before it."""
    return np.append(True, array[1:] > array[:-1])


def _are_ids(array: np.ndarray, size: int) -> bool:
    """Return whether all numbers are from 0 and below `size`."""
    return bool(((array >= 0) & (array < size)).all())
