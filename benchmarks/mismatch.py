"""Words that are not said: how many are flagged, and how many right words are flagged too.

    python benchmarks/mismatch.py LIBRISPEECH_10S [--set test] [--number 200] [--figure FILE]
    python benchmarks/mismatch.py LIBRISPEECH_10S --set dev --number 249 --weights 0 2 5 10

In each of `--number` utterances drawn at random, one word, drawn at random, is replaced by another
word of the set with as many phones (CMUdict's first pronunciation) and no common pronunciation. The
misfit of a word is that of `AlignedWord.misfit`. A replaced word is found if its misfit is above
the threshold; an utterance with its right text is a false alarm if any of its words' is. The score
and the threshold that ships were chosen on the set `dev`. `--weights` compares weights of the
second opinion, and prints the threshold of 5 % false alarms for each.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transduce.alignment.align import Aligner, Task
from transduce.alignment.pronunciations import english_lexicon
from transduce.alignment.result import ACOUSTIC, MISFIT, PRIOR_PHONES, Alignment
from transduce.model.model import load

FALSE_ALARMS = 0.01, 0.02, 0.05, 0.1, 0.2


def replaced(texts: list[list[str]], chosen: list[int], seed: int) -> list[tuple[int, list[str]]]:
    """Return, for each chosen text, the place of the replaced word and the text with it."""
    lexicon, draw = english_lexicon(), random.Random(seed)
    vocabulary = sorted({word for text in texts for word in text})
    variants = {word: lexicon.words(word)[0].pronunciations for word in vocabulary}
    by_length = defaultdict(list)
    for word in vocabulary:
        by_length[len(variants[word][0])].append(word)
    found = []
    for i in chosen:
        others: list[str] = []
        while not others:
            place = draw.randrange(len(texts[i]))
            own = variants[texts[i][place]]
            others = [w for w in by_length[len(own[0])] if set(own).isdisjoint(variants[w])]
        words = list(texts[i])
        words[place] = draw.choice(others)
        found.append((place, words))
    return found


def misfits(result: object, weight: float) -> np.ndarray:
    """Return the misfit of each word with a weight of the second opinion; infinity if refused."""
    if not isinstance(result, Alignment):
        return np.array([np.inf])
    return np.array(
        [
            (weight * word.acoustic_deficit - word.log_ratio) / (len(word.phones) + PRIOR_PHONES)
            if word.phones
            else np.inf
            for word in result.words
        ]
    )


def main() -> None:
    """Print the rates of found words and false alarms."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--set", default="test")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=float, nargs="+", help="compare weights of ACOUSTIC")
    parser.add_argument("--figure", type=Path, help="write the ROC curve to a file")
    arguments = parser.parse_args()
    lines = (arguments.corpus / f"{arguments.set}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [row["text"].split() for row in rows]
    number = min(arguments.number, len(rows))
    chosen = sorted(random.Random(arguments.seed).sample(range(len(rows)), number))
    wrong = replaced(texts, chosen, arguments.seed)
    aligner = Aligner(load("english-phone-recogniser"))
    sounds = [arguments.corpus / rows[i]["audio_filepath"] for i in chosen]
    right_results = list(
        aligner.align_many(
            Task(sound, " ".join(texts[i])) for sound, i in zip(sounds, chosen, strict=True)
        )
    )
    wrong_results = list(
        aligner.align_many(
            Task(sound, " ".join(words)) for sound, (_, words) in zip(sounds, wrong, strict=True)
        )
    )

    def scored(weight: float) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the misfits of the words of each right text, and of the replaced words."""
        found = [misfits(one, weight) for one in wrong_results]
        places = [p if len(one) > 1 else 0 for one, (p, _) in zip(found, wrong, strict=True)]
        scores = np.array([one[place] for one, place in zip(found, places, strict=True)])
        return [misfits(one, weight) for one in right_results], scores

    if arguments.weights:
        compare_weights(arguments.weights, scored)
        return
    right, scores = scored(ACOUSTIC)
    worst, every = np.array([one.max() for one in right]), np.concatenate(right)
    lengths = [len(english_lexicon().words(words[p])[0].pronunciations[0]) for p, words in wrong]
    print(f"{number} utterances of {arguments.set}, {len(every)} words, seed {arguments.seed}\n")
    print(
        "| false alarms | threshold | found | found, the rate being of words |\n|---|---|---|---|"
    )
    for rate in FALSE_ALARMS:
        by_utterance, by_word = np.quantile(worst, 1 - rate), np.quantile(every, 1 - rate)
        shares = (100 * np.mean(scores > threshold) for threshold in (by_utterance, by_word))
        found_shares = " | ".join(f"{share:.1f} %" for share in shares)
        print(f"| {100 * rate:.0f} % | {by_utterance:.2f} | {found_shares} |")
    print(
        f"\nat the shipped threshold {MISFIT}: {100 * np.mean(scores > MISFIT):.1f} % of replaced "
        f"words found, false alarms in {100 * np.mean(worst > MISFIT):.1f} % of utterances and "
        f"{100 * np.mean(every > MISFIT):.2f} % of words"
    )
    print("\n| phones of the word | words | found |\n|---|---|---|")
    for length in range(1, 7):
        same = np.array([n == length if length < 6 else n >= 6 for n in lengths])
        label = f"{length}" if length < 6 else "6 and more"
        if same.any():
            print(f"| {label} | {same.sum()} | {100 * np.mean(scores[same] > MISFIT):.0f} % |")
    if arguments.figure:
        draw_curve(scores, worst, every, arguments.figure)


def compare_weights(
    weights: list[float], scored: Callable[[float], tuple[list[np.ndarray], np.ndarray]]
) -> None:
    """Print the words found at each rate of false alarms of utterances, for each weight."""
    rates = " | ".join(f"{100 * rate:.0f} %" for rate in FALSE_ALARMS)
    print(f"| weight | {rates} | mean | threshold of 5 % |\n|{'---|' * (len(FALSE_ALARMS) + 3)}")
    for weight in weights:
        right, scores = scored(weight)
        worst = np.array([one.max() for one in right])
        found = [100 * np.mean(scores > np.quantile(worst, 1 - rate)) for rate in FALSE_ALARMS]
        shares = " | ".join(f"{share:.1f} %" for share in [*found, np.mean(found)])
        print(f"| {weight:g} | {shares} | {np.quantile(worst, 0.95):.2f} |")


def draw_curve(scores: np.ndarray, worst: np.ndarray, every: np.ndarray, file: Path) -> None:
    """Draw the share of found words against that of false alarms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    thresholds = np.sort(np.concatenate([scores, worst, every]))
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for right, label in ((worst, "of utterances"), (every, "of words")):
        alarms = [100 * np.mean(right > t) for t in thresholds]
        axes.plot(alarms, [100 * np.mean(scores > t) for t in thresholds], label=label)
    axes.plot(
        100 * np.mean(worst > MISFIT), 100 * np.mean(scores > MISFIT), "o", color="black",
        label="the threshold that ships",
    )  # fmt: skip
    axes.set(
        xlim=(0, 20), ylim=(50, 100), xlabel="false alarms, %", ylabel="replaced words found, %"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
