"""Word error rates in the languages of SIGMORPHON 2020: of each model, and of the models' vote.

`python benchmarks/languages.py FOLDER dev|test WIDTH RUN...`, such as
`python benchmarks/languages.py sigmorphon2020-g2p dev 1 runs/languages-1 'runs/own-{}'`. A run with
{} in its name stands for one run for each language, trained on that language alone; {} becomes the
language's code, such as kor. The models vote on all outputs that their beams of WIDTH have found:
for each word, the output with the highest sum of ln Pr(y|x) over all models wins. A run may also be
the file of a joint n-gram model, such as 'runs/joint-{}.safetensors'; it votes with ln Pr(x, y),
and has no outputs of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from measure import DEVICE, machine, show

from transduce.data.batches import Example
from transduce.data.dictionaries import read_sigmorphon
from transduce.data.pairs import Pair, Splits, Symbols
from transduce.decoding.options import SearchOptions
from transduce.evaluation import nearest_error_rate
from transduce.model.joint_ngram import JointNGramModel, load_joint_ngram
from transduce.model.model import Model, batches_of, load, search_examples
from transduce.model.tensors import is_joint_ngram
from transduce.training.teacher_models import LEAST_LOG_LIKELIHOOD


def main() -> None:
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    folder, split, width, *runs = sys.argv[1:]
    of_all = [_load(run) for run in runs if "{}" not in run]
    rates: dict[str, list[float]] = {}
    for language, together in groupby(_pairs(folder, "all", split), lambda pair: pair.name[:3]):
        pairs = list(together)
        words = [(model, model.signature.examples(pairs, with_labels=False)) for model in of_all]
        for run in runs:
            if "{}" in run:
                model = _load(run.format(language))
                alone = _pairs(folder, language, split)
                words.append((model, model.signature.examples(alone, with_labels=False)))
        outputs = [
            _outputs(model, examples, int(width))
            for model, examples in words
            if isinstance(model, Model)
        ]
        chosen = _vote(words, outputs)
        best = [[some[0] for some in each] for each in outputs]
        rates[language] = [_wrong(one, pairs) for one in (*best, chosen)]
        print(language, *(f"{rate:.1f}" for rate in rates[language]), file=sys.stderr)
    with_outputs = [
        run
        for run in sorted(runs, key=lambda run: "{}" in run)
        if not is_joint_ngram(Path(run.format(next(iter(rates)))))
    ]
    means = [sum(column) / len(rates) for column in zip(*rates.values(), strict=True)]
    print(machine())
    show(
        f"{split}, word errors, %, width {width}",
        ["language", *(Path(run).name for run in with_outputs), "vote"],
        [[language, *(f"{rate:.1f}" for rate in row)] for language, row in rates.items()]
        + [["mean", *(f"{mean:.2f}" for mean in means)]],
    )


def _load(run: str) -> Model | JointNGramModel:
    """Load a run onto the device, or the file of a joint n-gram model."""
    return load_joint_ngram(Path(run)) if is_joint_ngram(Path(run)) else load(run).to(DEVICE)


def _pairs(folder: str, language: str, split: str) -> Sequence[Pair]:
    """Read the validation or test set of a language, or of all."""
    splits: Splits = read_sigmorphon(folder, language)
    return {"dev": splits.validation, "test": splits.test}[split]


def _outputs(model: Model, examples: Sequence[Example], width: int) -> list[list[Symbols]]:
    """Return the outputs that a beam of `width` finds for each example, the best first."""
    found = search_examples(model, examples, SearchOptions(width, width, with_timings=False))
    decode = model.signature.targets.decode
    return [[tuple(decode(one.labels)) for one in best] for best in found]


def _wrong(outputs: Sequence[Symbols], pairs: Sequence[Pair]) -> float:
    """Return the word error rate in per cent."""
    references = [pair.references for pair in pairs]
    return 100 * nearest_error_rate(outputs, references, num_resamples=0).sequence_rate


def _vote(
    words: Sequence[tuple[Model | JointNGramModel, Sequence[Example]]],
    outputs: Sequence[Sequence[Sequence[Symbols]]],
) -> list[Symbols]:
    """Return, for each word, the output to which all models together give the highest score."""
    different = [
        sorted({y for found in some for y in found if y}) or [()]
        for some in zip(*outputs, strict=True)
    ]
    candidates = [(i, y) for i, some in enumerate(different) for y in some]
    each_models = [_log_likelihoods(model, examples, candidates) for model, examples in words]
    sums = torch.stack(each_models).sum(0)
    best: dict[int, tuple[float, Symbols]] = {}
    for (i, y), log_likelihood in zip(candidates, sums.tolist(), strict=True):
        best[i] = max(best.get(i, (-torch.inf, ())), (log_likelihood, y))
    return [best[i][1] for i in range(len(different))]


@torch.no_grad()
def _log_likelihoods(
    model: Model | JointNGramModel,
    examples: Sequence[Example],
    candidates: Sequence[tuple[int, Symbols]],
) -> torch.Tensor:
    """Return ln Pr(y|x) of each candidate, which is the number of an example and an output y.

    A joint n-gram model has ln Pr(x, y). A candidate with a symbol that the model lacks has
    LEAST_LOG_LIKELIHOOD, so that it loses the vote.
    """
    known = set(model.signature.targets.symbols)
    found = torch.full((len(candidates),), LEAST_LOG_LIKELIHOOD, dtype=torch.float64)
    rows = [row for row, (_, y) in enumerate(candidates) if y and known.issuperset(y)]
    labelled = [
        replace(examples[i], labels=torch.tensor(model.signature.targets.encode(y)))
        for i, y in (candidates[row] for row in rows)
    ]
    if isinstance(model, JointNGramModel):
        for row, one in zip(rows, labelled, strict=True):
            found[row] = model.ngram.log_joint(one.frames.numpy(), one.labels.numpy())
        return found
    model.network.eval()
    for ids, batch in batches_of(model, labelled):
        found[[rows[i] for i in ids]] = -model.network.losses(batch).double().cpu()
    return found


if __name__ == "__main__":
    main()
