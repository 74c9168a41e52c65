from __future__ import annotations

from sgl_router_afd.dataplane.headers import MAX_SPELLINGS, Names, line, without_named


def test_a_special_name_is_known_in_any_spelling_and_others_are_nothing() -> None:
    names = Names(frozenset({b"te"}))

    assert [names[spelling] for spelling in (b"TE", b"te", b"tE", b"TEE")] == [b"te"] * 3 + [b""]


def test_no_more_than_so_many_spellings_are_kept() -> None:
    names = Names(frozenset({b"te"}))

    for number in range(2 * MAX_SPELLINGS):
        names[b"X-%d" % number]

    assert len(names) == MAX_SPELLINGS
    assert names[b"TE"] == b"te"


def test_a_field_keeps_its_spelling_and_its_value() -> None:
    assert line(b"X-oDD", b"b\xff ") == b"X-oDD: b\xff \r\n"


def test_fields_that_connection_names_end_there() -> None:
    lines = [line(name, b"1") for name in (b"X-One", b"A", b"x-TWO", b"x-one")]

    assert without_named(lines, b"Close, x-one,X-Two , ") == [b"A: 1\r\n"]


def test_connection_cannot_take_the_length_of_an_answer_away() -> None:
    lines = [line(b"Content-Length", b"1")]

    assert without_named(lines, b"content-length") == lines
