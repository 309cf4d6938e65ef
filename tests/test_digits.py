"""The fast parsers of text fields against Python's own int."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile.digits import Text
from torchrec_oper.profile.fields import bags_in_fields, integers

INT64 = st.integers(1 - 2**63, 2**63 - 1)


def fields(words):
    """The words one after another, and where each starts and ends."""
    ends = np.cumsum([len(word) for word in words], dtype=np.int64)
    starts = ends - [len(word) for word in words]
    return "".join(words).encode(), starts, ends


@given(st.lists(INT64.map(str) | INT64.map(lambda value: f"{value:019d}"[-19:])))
def test_integers_equal_pythons(words):
    text, starts, ends = fields([word for word in words if abs(int(word)) < 2**63])
    found = Text(text).integers(starts, ends)
    assert found.dtype == np.int64
    assert found.tolist() == [int(text[a:b]) for a, b in zip(starts, ends, strict=True)]


@given(st.lists(st.text("0123456789-+ .ax\0\x7f", max_size=21), min_size=1, max_size=5))
def test_nothing_else_is_taken_for_a_number(words):
    text, starts, ends = fields(words)
    try:
        found = Text(text).integers(starts, ends).tolist()
    except ValueError:
        return
    assert all(word.removeprefix("-").isdecimal() for word in words)
    assert found == [int(word) for word in words]


@pytest.mark.parametrize("byte", sorted({*range(256)} - {*b"0123456789"}))
def test_every_byte_but_a_digit_is_refused_anywhere(byte):
    for size in (1, 2, 8, 9, 17):
        for at in range(size):
            if byte == ord("-") and at == 0 and size > 1:
                continue
            text = bytearray(b"7" * size)
            text[at] = byte
            with pytest.raises(ValueError, match="digit"):
                Text(text).integers(np.array([0]), np.array([size]))


@pytest.mark.parametrize("word", ["", "-", "9223372036854775808", "-9223372036854775808", "1" * 20])
def test_what_the_fast_parser_leaves_to_the_plain_one(word):
    with pytest.raises(ValueError, match="field|digits|2\\*\\*63"):
        Text(word.encode()).integers(np.array([0]), np.array([len(word)]))


def test_no_field_is_no_number():
    none = np.empty(0, np.int64)
    assert Text(b"").integers(none, none).tolist() == []


def test_words_end_with_the_text():
    text = Text(b"abcdefghij")
    words = text.words_before(np.array([8, 10, 3])), text.words_from(np.array([0, 2, 7]))
    assert [int(word).to_bytes(8, "little") for word in words[0]] == [
        b"abcdefgh",
        b"cdefghij",
        b"\0\0\0\0\0abc",
    ]
    assert [int(word).to_bytes(8, "little") for word in words[1]] == [
        b"abcdefgh",
        b"cdefghij",
        b"hij\0\0\0\0\0",
    ]


@given(st.lists(st.lists(INT64, max_size=4), max_size=6), st.booleans())
def test_bags_in_fields(bags, plain):
    # -2**63 is what only the plain parser reads.
    bags = [*bags, [-(2**63)]] if plain else bags
    words = ["|".join(map(str, bag)) for bag in bags]
    content, _, ends = fields(words)
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    ids, lengths = bags_in_fields(content, offsets, separator="|", place=str)
    assert ids.tolist() == [value for bag in bags for value in bag]
    assert lengths.tolist() == [len(bag) for bag in bags]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (b"x", "place 3: found 'x', wanted an integer"),
        (b"", "place 3: found '', wanted an integer"),
        (b"3.0", r"place 3: found '3.0', wanted an integer; write the column as integers \(pandas"),
        (b"3.5", "place 3: found '3.5', wanted an integer$"),
        (b" 3", "place 3: found ' 3', wanted an integer"),
        (b"\xff", "place 3: found '.*xff', wanted an integer"),
        (b"9223372036854775808", "place 3: '9223372036854775808' is outside the 64-bit integers"),
        (b"9" * 5000, "place 3: '9999.*[.]{3}' is outside the 64-bit integers; hash it"),
    ],
)
def test_what_is_no_integer_is_named(word, message):
    with pytest.raises(LogFormatError, match=message):
        integers([b"1", b"-2", b"0", word], lambda at: f"place {at}")


@pytest.mark.parametrize(
    ("words", "place"),
    [(["1", "2|x", "3"], 1), (["1||2"], 0), (["|1"], 0), (["", "1|"], 1), (["5", "", "-"], 2)],
)
def test_the_field_of_a_wrong_id_is_named(words, place):
    content, _, ends = fields(words)
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    with pytest.raises(LogFormatError, match=f"^field {place}: found"):
        bags_in_fields(content, offsets, separator="|", place=lambda at: f"field {at}")
