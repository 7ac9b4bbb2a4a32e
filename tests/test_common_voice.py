"""Common Voice: the columns of its TSV files, and the error of each kind of bad line."""

import pytest
from datasets import TEXTS, write_common_voice

from transduce.data.common_voice import is_header, read_common_voice
from transduce.data.pairs import DataError, Notation

CHARACTERS = Notation("characters", None)


def test_any_column_may_be_the_target(tmp_path):
    path = write_common_voice(tmp_path)
    for field, found in (("text", TEXTS), ("sentence", TEXTS), ("up_votes", ["2"] * 4)):
        records = list(read_common_voice(path, (field,)))
        assert ["".join(one.pair(CHARACTERS, field).target) for one in records] == found


def test_a_header_has_the_columns_of_every_version_and_perhaps_more():
    assert is_header("client_id\tpath\tsentence")
    assert is_header("client_id\tpath\tsentence\tup_votes")
    assert not is_header("client_id\tpath")


@pytest.mark.parametrize(
    "line, problem",
    [
        ("x\ta.flac\t1\tab", "there are 4 columns where the header has 5; correct the line"),
        ("x\tnone.flac\t1\tab\t2", "none.flac; sounds must be in the folder clips beside the file"),
        ("x\ta\0.flac\t1\tab\t2", "there is no file"),
        ("x\ta.flac\t1\t\t2", "text is empty; transcribe it, or leave it out"),
    ],
)
def test_a_bad_line_is_a_sentence_and_may_be_skipped(tmp_path, line, problem):
    path = write_common_voice(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]))

    def read(skipped=None):
        found = []
        for record in read_common_voice(path, ("text",), skipped):
            try:
                found.append(record.pair(CHARACTERS))
            except DataError as error:
                if skipped is None:
                    raise
                skipped.append(error)
        return found

    with pytest.raises(DataError, match=r"train\.tsv, line 3: ") as raised:
        read()
    assert problem in str(raised.value)
    skipped = []
    assert [pair.name for pair in read(skipped)] == ["a", "c", "d"]
    assert [str(error) for error in skipped] == [str(raised.value)]
