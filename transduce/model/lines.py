"""Lines of several words, for models that read single words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from transduce.data.pairs import DataError
from transduce.decoding.options import SearchOptions
from transduce.model.model import Model, sorts_by_length
from transduce.model.signature import EmptyInput
from transduce.model.transcripts import Transcript, join_words


def pronunciations(
    model: Model, lines: Sequence[str], options: SearchOptions, at_first: int | None = None
) -> Iterator[tuple[str, Transcript | DataError]]:
    """Yield each line, stripped, and its transcript, which joins those of its words.

    `at_first` is that of `Model.transcribe`.
    """
    lines = [line.strip() for line in lines]
    words = [model.signature.words(line) for line in lines]
    inputs = [word for of_line in words for word in of_line]
    found = model.transcribe(inputs, options, at_first=at_first)
    yield from join_lines(model, lines, words, found, options)


def join_lines(
    model: Model,
    lines: Sequence[str],
    words: Sequence[Sequence[str]],
    found: Iterable[Transcript | DataError],
    options: SearchOptions,
) -> Iterator[tuple[str, Transcript | DataError]]:
    """Yield each line and the joined results of its words; `found` has those of all words."""
    rest, by_length = iter(found), sorts_by_length(model, options)
    for line, of_line in zip(lines, words, strict=True):
        results = [next(rest) for _ in of_line]
        error = next((one for one in results if isinstance(one, DataError)), None)
        if not line:
            error = EmptyInput("the line is blank; write a word")
        elif not of_line:
            error = DataError(f"{line!r} has no symbol that the model knows; give a word")
        if error is not None:
            yield line, error
        else:
            transcripts = [one for one in results if isinstance(one, Transcript)]
            yield (
                line,
                join_words(line, transcripts, options.n_best, length_normalised=by_length),
            )
