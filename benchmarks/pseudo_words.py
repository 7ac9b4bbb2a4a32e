"""Draw words that look like those of a list, for `--data.unlabelled`.

`python benchmarks/pseudo_words.py NUMBER FILE...`, such as
`python benchmarks/pseudo_words.py 100000 g014b2b.train > more.txt`. The words of a file are before
the first tab of its lines. Each letter is drawn as it follows the four letters before it in the
words of the file, so that a new word consists of pieces of the old ones; those are left out. For
several files, such as those of SIGMORPHON 2020, so many words are drawn for each, and each begins
with the file's language, as in `kor:`; its letters are decomposed (NFKD).
"""

from __future__ import annotations

import random
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path

CONTEXT = 4  # letters
END = "\n"


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    number, *files = sys.argv[1:]
    for file in files:
        prefix = "" if len(files) == 1 else f"{Path(file).name[:3]}:"
        for word in draw(first_columns(Path(file)), int(number)):
            print(prefix + word)


def first_columns(path: Path) -> list[str]:
    """Return the words of a file: what is before the first tab of its lines."""
    return [line.split("\t")[0] for line in path.read_text("utf-8").splitlines()]


def draw(words: list[str], number: int) -> list[str]:
    """Return so many new words, or fewer if the words leave less freedom."""
    words = [unicodedata.normalize("NFKD", word) for word in words]
    following = defaultdict(list)
    for word in words:
        letters = word + END
        for i, letter in enumerate(letters):
            following[letters[max(0, i - CONTEXT) : i], i < CONTEXT].append(letter)
    random_letter, known, found = random.Random(0), set(words), dict[str, None]()
    longest = max(map(len, words))
    for _ in range(20 * number):
        word = ""
        while not word.endswith(END) and len(word) <= longest:
            context = word[-CONTEXT:]
            word += random_letter.choice(following[context, len(word) < CONTEXT])
        if word.endswith(END) and (new := word[:-1]) and new not in known:
            found[new] = None
        if len(found) == number:
            break
    return list(found)


if __name__ == "__main__":
    main()
