from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from sgl_router_afd.dataplane import body
from sgl_router_afd.dataplane.body import MAX_TOKEN_BYTES, Said, Scanner, read

TEXTS = ('\\"model\\"', '\\"model\\": \\"x\\"', "{", "]", "\\\\", "a, b", "\\u007d", "h\u00e9", "")
NESTED = ('{"model": "x"}', '["model", ":", "x"]', '[[{"a": [1]}], {}]', "[]", '{"a": "}"}')
SCALARS = ("1", "-2.5e3", "true", "false", "null")
KEYS = ("model", "a", "models", "Model", "mod\\u0065l", "background", "previous_response_id", "")


def drawn(seed: int) -> bytes:
    """A JSON object with what may mislead a reader, the same one for the same seed."""
    draw = random.Random(seed)

    def value() -> str:
        texts = [f'"{text}"' for text in (*TEXTS, *"abc")]
        return draw.choice(draw.choice((texts, NESTED, SCALARS)))

    space = draw.choice(("", " ", "\n\t"))
    fields = [
        f'{space}"{draw.choice(KEYS)}"{space}:{space}{value()}{space}'
        for _ in range(draw.randrange(7))
    ]
    return f"{space}{{{','.join(fields)}}}{space}".encode()


def by_json(data: bytes) -> Said:
    found = json.loads(data)
    return Said(**{name: found[name] for name in body.FIELDS if name in found})


def scan(pieces: Iterable[bytes]) -> Scanner:
    scanner = Scanner()
    for piece in pieces:
        scanner.feed(piece)
    return scanner


def cut(data: bytes, draw: random.Random) -> list[bytes]:
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(6)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def test_a_whole_body_says_what_python_reads_in_it() -> None:
    for seed in range(3000):
        data = drawn(seed)
        assert read(data) == by_json(data), (seed, data)


def test_a_scanned_body_says_the_same_wherever_it_is_cut() -> None:
    for seed in range(3000):
        data = drawn(seed)
        scanner = scan(cut(data, random.Random(seed)))
        wanted = by_json(data)
        # A number, or what is nested, is no value that matters.
        for name in body.FIELDS:
            value = getattr(wanted, name)
            if not isinstance(value, str | bool):
                value = None
            assert getattr(scanner.said, name) == value, (seed, data)
        assert scanner.is_over, (seed, data)


def test_a_scanned_body_says_the_same_byte_for_byte() -> None:
    data = (
        b'\xef\xbb\xbf {"a": {"model": "x\\\\"}, "mod\\u0065l" : "b\\"\\u00e9\xc3\xa9", "c": [1]} '
    )

    assert scan(bytes([byte]) for byte in data).said.model == 'b"\u00e9\u00e9'


@pytest.mark.parametrize("at", range(60))
def test_a_field_counts_once_all_of_it_is_there(at: int) -> None:
    data = b'{"prompt": "\\"model\\": \\"x\\"", "model": "tiny", "n": 1}'
    start = data.index(b'"tiny"') + len(b'"tiny"')

    scanner = scan([data[:at]])

    assert scanner.said.model == ("tiny" if at >= start else None)
    assert scanner.is_over == (at >= len(data))


@pytest.mark.parametrize(
    "data",
    [
        b'{"model": "a", "x": NaN}',
        b'{"model": "a", "x": "\\ud800"}',
        b'\xef\xbb\xbf{"model": "a"}',
        '{"model": "a"}'.encode("utf-16"),
        '{"model": "a"}'.encode("utf-32-be"),
        b'{"model": "a", "n": 1e999}',
    ],
)
def test_what_python_takes_is_read_as_python_reads_it(data: bytes) -> None:
    assert read(data).name == "a"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"model": "a"',
        b'{"model": "a"} x',
        b'["model", "a"]',
        b'"model"',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"model": "\xff"}',
        b'{"model": 5}',
        b'{"model": null}',
        b'{"model": ["a"]}',
        b'{"model": 1e999}',
    ],
)
def test_what_names_no_model_is_left_for_a_server_to_judge(data: bytes) -> None:
    assert read(data).name is None


def test_two_values_of_a_field_are_a_contradiction_unless_they_are_the_same() -> None:
    assert scan([b'{"model": "a", "model": "a"}']).contradiction == ""
    assert scan([b'{"model": "a", "mod\\u0065l": "b"}']).contradiction == "model"
    assert scan([b'{"model": "a", "model": {}}']).contradiction == "model"
    assert scan([b'{"a": {"model": "a"}, "model": "b"}']).contradiction == ""


@pytest.mark.parametrize("data", [b"not json", b"[1]", b'{"a" 1}', b'{"a": 1]', b'{,"model": "a"}'])
def test_a_scan_ends_where_there_is_no_object(data: bytes) -> None:
    scanner = scan([data, b'{"model": "a"}'])

    assert scanner.is_over and scanner.said.name is None


def test_a_scanner_keeps_little_of_a_long_key_or_value() -> None:
    scanner = Scanner()
    scanner.feed(b'{"')
    for _ in range(100):
        scanner.feed(b"k" * 10_000)
    scanner.feed(b'": "')
    for _ in range(100):
        scanner.feed(b"v" * 10_000)
    scanner.feed(b'", "model": "' + b"m" * 1_000_000)

    assert len(scanner._token) == MAX_TOKEN_BYTES
