"""Teachers: trained transducers whose expectations of the next label another network learns.

What a teacher expects after each prefix of a target does not depend on frames. So it is computed
once, on the input without augmentation, and serves in every epoch and for every architecture.

A teacher that reads in the other direction does not know the prefixes. Where there is one, all
teachers together score some candidates: the target, and the output of each teacher's greedy search.
What follows a prefix is then what follows it in the candidates (docs/derivations.md, section 9).
A joint n-gram model among the teachers scores the candidates too, and finds none of its own. The
first transducer then finds more of them, with a beam, and the other ones only score them.

For a network of all languages, a teacher may be a set of models, one for each language. It scores
the candidates too and, if its models are transducers, finds some as a transducer does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import escape, glob
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from transduce.alphabet import NULL, Alphabet
from transduce.architectures import Transducer
from transduce.data.batches import Batch, Example
from transduce.decoding.hypothesis import Labels
from transduce.model.checkpoint import load_model
from transduce.model.model import FOLDER, model_names
from transduce.model.signature import Signature
from transduce.model.tensors import CheckpointError, is_joint_ngram, read_tensors, write_tensors
from transduce.training.checks import TrainingError
from transduce.training.loading import load_by_length
from transduce.training.teacher_models import (
    END_OF_PREFIX,
    JointNGramTeacher,
    LanguageTeachers,
    SingleTeacher,
    Teacher,
)

CACHED = "the candidates of teachers"
CACHE_VERSION = 1  # of the numbers, not of the file
RANKED = 8  # outputs that the first transducer finds if a joint n-gram model scores them
LANGUAGE = "{}"  # in a teacher's path: the code of each language, such as kor
Candidates = dict[Labels, float]  # outputs with ln Pr(y|x)


Teachers = Sequence[SingleTeacher | LanguageTeachers]


def load_teachers(paths: Sequence[Path], signature: Signature) -> Teachers:
    """Load the teachers of a network with a signature; raise TrainingError if one does not fit.

    A path with LANGUAGE in it is that of a set of models, one for each language.
    """
    loaded = {
        path: (_load_languages if LANGUAGE in str(path) else _load)(path, signature)
        for path in dict.fromkeys(paths)
    }
    teachers = [loaded[path] for path in paths]
    if teachers and not _finders(teachers):
        raise TrainingError(
            f"train.teacher, {paths[0]}: it ranks the outputs of transducers; "
            "name the run of a transducer beside it"
        )
    return teachers


def transducers(teachers: Teachers) -> list[Teacher]:
    """Return the teachers that are transducers, without those of a set."""
    return [teacher for teacher in teachers if isinstance(teacher, Teacher)]


def _members(teachers: Teachers) -> list[SingleTeacher]:
    """Return the teachers, and in the place of each set its models."""
    members: list[SingleTeacher] = []
    for teacher in teachers:
        members += teacher.models.values() if isinstance(teacher, LanguageTeachers) else [teacher]
    return members


def _finders(teachers: Teachers) -> list[Teacher | LanguageTeachers]:
    """Return the teachers that find outputs: transducers, and sets of them."""
    return [
        teacher
        for teacher in teachers
        if not isinstance(teacher, JointNGramTeacher) and transducers(_members([teacher]))
    ]


def find_candidates(
    teachers: Teachers,
    examples: Sequence[Example],
    device: torch.device,
    cache: Path | None = None,
) -> list[Candidates]:
    """Return the candidates of each example, with the teachers' mean log-probability.

    The candidates are the example's labels, if any, and the outputs of the transducers' greedy
    searches, or the RANKED best ones of the first one's beam if there is a joint n-gram model. Its
    log-probability is ln Pr(x, y) and that of a transducer ln Pr(y|x), so that only differences
    have a meaning. `cache` is a folder that several runs may share, with a file for each set of
    examples.
    """
    path = None if cache is None else cache / f"candidates-{_key(teachers, examples)}.safetensors"
    if path is not None and path.is_file():
        with suppress(CheckpointError):  # an incomplete copy
            return _read_candidates(path)
    groups = _groups(teachers, examples)
    found: list[Candidates] = [{}] * len(examples)
    with _on_device(transducers(_members(teachers)), device):
        for group in groups:
            for ids, batch in load_by_length([examples[i] for i in group], device):
                for i, candidates in zip(ids, _candidates(teachers, batch), strict=True):
                    found[group[i]] = candidates
    if path is not None:
        _write_candidates(path, found)
    return found


def label_examples(
    examples: Sequence[Example], candidates: Sequence[Candidates]
) -> list[tuple[Example, Candidates]]:
    """Return the examples with the labels of their most probable candidate, and the candidates.

    Examples that would have no labels are left out.
    """
    labelled = []
    for example, found in zip(examples, candidates, strict=True):
        if best := max(found, key=lambda labels: (found[labels], labels)):
            labelled.append((replace(example, labels=torch.tensor(best)), found))
    return labelled


def exact_targets(
    teachers: Sequence[Teacher],  # which read in the direction of the network that learns
    examples: Sequence[Example],
    shares: Sequence[float],  # of each example
    device: torch.device,
) -> list[Tensor]:
    """Return the targets of each example: a float16 distribution for each prefix, [U+1, K+1].

    They are the label that follows, and with the weight of its share what the teachers expect: the
    normalised geometric mean of their distributions. Null is the end.
    """
    targets: list[Tensor] = [torch.empty(0)] * len(examples)
    with _on_device(teachers, device):
        for ids, batch in load_by_length(examples, device):
            read = batch.reversed() if teachers[0].backwards else batch
            following = nn.functional.pad(read.labels, (0, 1))  # padding is null
            each = torch.stack([teacher.log_probs(batch) for teacher in teachers])
            expected = each.mean(0).softmax(-1).float()
            certain = nn.functional.one_hot(following, expected.shape[2])
            share = torch.tensor([shares[i] for i in ids], device=device)[:, None, None]
            mixed = (share * expected + (1 - share) * certain).half().cpu()
            for i, target in zip(ids, mixed, strict=True):
                targets[i] = target[: examples[i].num_labels + 1].clone()
                if not targets[i].isfinite().all():
                    raise TrainingError(
                        f"the teacher's distributions for {examples[i].pair.name} are not finite; "
                        "check its weights"
                    )
    return targets


def candidate_targets(
    examples: Sequence[Example],
    candidates: Sequence[Candidates],
    shares: Sequence[float],
    size: int,  # K+1
    backwards: bool,  # whether the network that learns reads so
) -> list[Tensor]:
    """Return the targets of each example, as `exact_targets` does, from its candidates.

    What follows a prefix is what follows it in the candidates. The weight of a candidate is its
    likelihood.
    """
    order, targets = (-1 if backwards else 1), []
    for example, found, share in zip(examples, candidates, shares, strict=True):
        labels = tuple(example.labels.tolist())[::order]
        open_ones = [(one[::order], value) for one, value in found.items()]
        target = np.zeros((len(labels) + 1, size), np.float32)
        for u in range(len(labels) + 1):
            following = labels[u] if u < len(labels) else NULL
            open_ones = [(one, value) for one, value in open_ones if one[:u] == labels[:u]]
            top = max(value for _, value in open_ones)
            weights = [math.exp(value - top) for _, value in open_ones]
            for (one, _), weight in zip(open_ones, weights, strict=True):
                target[u, one[u] if u < len(one) else NULL] += share * weight / sum(weights)
            target[u, following] += 1 - share
        targets.append(torch.from_numpy(target.astype(np.float16)))
    return targets


@contextmanager
def _on_device(teachers: Sequence[Teacher], device: torch.device) -> Iterator[None]:
    """Move the teachers to a device; move them back on exit."""
    networks = nn.ModuleList(teacher.network for teacher in teachers).to(device)
    yield
    networks.cpu()


def _groups(teachers: Teachers, examples: Sequence[Example]) -> list[list[int]]:
    """Return the indices of all examples: in one group, or in one for each language of a set."""
    groups = [list(range(len(examples)))]
    for teacher in dict.fromkeys(teachers):
        if isinstance(teacher, LanguageTeachers):
            groups = teacher.group_by_language(examples)  # the same for each set
    return groups


def _candidates(teachers: Teachers, batch: Batch) -> list[Candidates]:
    """Return the candidates of each input of a batch."""
    found: list[Candidates] = [{} for _ in batch.pairs]
    rows, num_labels = batch.labels.tolist(), batch.num_labels.tolist()
    for candidates, row, length in zip(found, rows, num_labels, strict=True):
        if length:
            candidates[tuple(row[:length])] = 0.0
    finders, number = _finders(teachers), 1
    if len(finders) < len(teachers):  # a joint n-gram model wants more to rank than greedy outputs
        finders, number = finders[:1], RANKED
    for finder in finders:
        for candidates, outputs in zip(found, finder.outputs(batch, number), strict=True):
            candidates |= dict.fromkeys(outputs, 0.0)
    flat = [(b, labels) for b, candidates in enumerate(found) for labels in candidates]
    lengths = [len(labels) for _, labels in flat]
    padded = np.zeros((len(flat), max(lengths)), np.int64)
    for padded_row, (_, labels) in zip(padded, flat, strict=True):
        padded_row[: len(labels)] = labels
    device = batch.labels.device
    scored = tuple(
        torch.as_tensor(part, device=device) for part in ([b for b, _ in flat], padded, lengths)
    )
    # A teacher that is named more than once counts as often, and is asked once.
    values = {one: one.log_likelihoods(batch, *scored).double() for one in dict.fromkeys(teachers)}
    mean = torch.stack([values[teacher] for teacher in teachers]).mean(0)
    for (b, labels), value in zip(flat, mean.tolist(), strict=True):
        found[b][labels] = value
        if not math.isfinite(value):
            raise TrainingError(
                f"the teachers' likelihoods for {batch.pairs[b].name} are not finite; check their "
                "weights"
            )
    return found


def _key(teachers: Teachers, examples: Sequence[Example]) -> str:
    """Return a hash of all that candidates depend on."""
    parts = [CACHE_VERSION, RANKED, len(teachers), len(examples)]
    key = hashlib.sha256(str(parts).encode())
    for teacher in teachers:
        for array in _arrays(teacher):
            key.update(array.tobytes())
    for example in examples:
        key.update(str((example.num_frames, example.num_labels)).encode())
        key.update(example.frames.numpy().tobytes() + example.labels.numpy().tobytes())
    return key.hexdigest()


def _arrays(teacher: SingleTeacher | LanguageTeachers) -> Iterator[np.ndarray]:
    """Yield all that a teacher's candidates depend on."""
    if isinstance(teacher, LanguageTeachers):
        for prefix, model in teacher.models.items():
            yield np.array(prefix)
            yield from _arrays(model)
        return
    if isinstance(teacher, JointNGramTeacher):
        yield from (teacher.labels.numpy(), teacher.sources.numpy())
        yield from (teacher.ngram.keys, *teacher.ngram.automaton)
        return
    yield np.array(teacher.backwards)
    known = [s for s in (teacher.ours.statistics, teacher.theirs.statistics) if s is not None]
    of_input = [t for s in known for t in (s.mean, s.deviation)]
    if teacher.sources is not None:
        of_input.append(teacher.sources)
    for tensor in (*of_input, teacher.labels, *teacher.network.state_dict().values()):
        yield tensor.cpu().contiguous().numpy()


def _write_candidates(path: Path, candidates: Sequence[Candidates]) -> None:
    """Write candidates as flat tensors."""
    flat = [item for found in candidates for item in found.items()]
    tensors = {
        "counts": torch.tensor([len(found) for found in candidates]),
        "lengths": torch.tensor([len(labels) for labels, _ in flat]),
        "labels": torch.tensor([label for labels, _ in flat for label in labels]),
        "log_likelihoods": torch.tensor([value for _, value in flat], dtype=torch.float64),
    }
    write_tensors(path, tensors, {}, CACHED)


def _read_candidates(path: Path) -> list[Candidates]:
    """Read candidates that were written."""
    tensors, _ = read_tensors(path, CACHED)
    labels = iter(tensors["labels"].tolist())
    lengths, values = (iter(tensors[name].tolist()) for name in ("lengths", "log_likelihoods"))
    return [
        {tuple(islice(labels, next(lengths))): next(values) for _ in range(count)}
        for count in tensors["counts"].tolist()
    ]


def _load_languages(path: Path, ours: Signature) -> LanguageTeachers:
    """Load the models whose paths have the code of a language in place of LANGUAGE."""
    where, letters = f"train.teacher, {path}", ours.sources or Alphabet(())
    before, _, after = str(path).partition(LANGUAGE)
    models = {}
    for found in sorted(glob(f"{escape(before)}?*{escape(after)}")):
        prefix = found.removeprefix(before).removesuffix(after) + END_OF_PREFIX
        if set(prefix) <= set(letters.symbols):  # else no input begins with it
            models[tuple(letters.encode(prefix))] = _load(Path(found), ours, may_lack=True)
    if not models:
        raise TrainingError(
            f"{where}: {LANGUAGE} stands for a language with which inputs begin, such as kor:, and "
            "there is no run for any; train one for each, and the network with data.language all"
        )
    if len({type(model) for model in models.values()}) > 1:
        raise TrainingError(
            f"{where}: some are transducers and some joint n-gram models; name them as two sets"
        )
    return LanguageTeachers(path, letters, models)


def _load(path: Path, ours: Signature, may_lack: bool = False) -> SingleTeacher:
    """Load a transducer or a joint n-gram model; say whether it `may_lack` symbols of ours."""
    return (_load_joint_teacher if is_joint_ngram(path) else _load_teacher)(path, ours, may_lack)


def _load_teacher(path: Path, ours: Signature, may_lack: bool) -> Teacher:
    """Load a teacher from a run's folder, a file, or the name of a model that ships."""
    where = f"train.teacher, {path}"
    if not path.exists() and path.name in model_names():
        path = FOLDER / f"{path.name}.safetensors"
    try:
        model = load_model(path)
    except CheckpointError as error:
        raise TrainingError(f"train.teacher: {error}") from None
    if not isinstance(model.network, Transducer):
        raise TrainingError(f"{where}: it is of the kind {model.config.network}; give a transducer")
    theirs, sources = model.signature, None
    if theirs.sources is not None and ours.sources is not None:
        sources = _ids(theirs.sources, ours.sources, "source symbol", where, may_lack)
    elif theirs.sources is not ours.sources:
        kinds = ("sound", "text") if theirs.sources is None else ("text", "sound")
        raise TrainingError(
            f"{where}: it reads {kinds[0]}, and the network to be trained {kinds[1]}; give a "
            "teacher with the same kind of input"
        )
    elif theirs.features != ours.features or theirs.input_size != ours.input_size:
        raise TrainingError(
            f"{where}: it has other features; set data.features to those of its config.toml, or "
            "give a teacher that was trained on these"
        )
    return Teacher(model.network, ours, theirs, _label_ids(theirs, ours, where, may_lack), sources)


def _load_joint_teacher(path: Path, ours: Signature, may_lack: bool) -> JointNGramTeacher:
    """Load a joint n-gram model from its file."""
    from transduce.model.joint_ngram import load_joint_ngram  # it needs Numba

    where = f"train.teacher, {path}"
    try:
        model = load_joint_ngram(path)
    except CheckpointError as error:
        raise TrainingError(f"train.teacher: {error}") from None
    if ours.sources is None or model.signature.sources is None:
        raise TrainingError(
            f"{where}: it reads text, and the network to be trained does not; leave it out"
        )
    sources = _ids(model.signature.sources, ours.sources, "source symbol", where, may_lack)
    labels = _label_ids(model.signature, ours, where, may_lack)
    return JointNGramTeacher(model.ngram, labels, sources)


def _label_ids(theirs: Signature, ours: Signature, where: str, may_lack: bool) -> Tensor:
    """Return the teacher's id of each of our labels; raise TrainingError if it has others."""
    for symbol in theirs.targets.symbols:
        if symbol not in ours.targets.symbols:
            raise TrainingError(
                f"{where}: it has a label {symbol!r} that the training data do not have; give a "
                "teacher with the same labels"
            )
    return _ids(theirs.targets, ours.targets, "label", where, may_lack)


def _ids(theirs: Alphabet, ours: Alphabet, what: str, where: str, may_lack: bool) -> Tensor:
    """Return the teacher's id of each of our ids; null stays null.

    A symbol that the teacher lacks is null, too, if it `may_lack` some.
    """
    ids = [NULL]
    for symbol in ours.symbols:
        if symbol in theirs.symbols:
            ids += theirs.encode([symbol])
        elif may_lack:
            ids.append(NULL)
        else:
            raise TrainingError(
                f"{where}: it has no {what} {symbol!r}; give a teacher trained on data that have it"
            )
    return torch.tensor(ids)
