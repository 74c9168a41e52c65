from __future__ import annotations

from pathlib import Path

import pytest

from sgl_router_afd.flags import parse_args
from sgl_router_afd.keys import NO_KEY, Key, key_of
from sglang_afd.errors import ConfigError


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    path.chmod(0o600)
    return path


def test_a_key_is_read_from_its_file_without_the_line_break(key_file: Path) -> None:
    config = parse_args(["--api-key-file", str(key_file), "--admin-api-key", "other"])

    assert (config.api_key, config.admin_api_key) == (Key(b"s3cret"), Key(b"other"))


def test_no_key_is_no_key() -> None:
    assert not key_of("--api-key", None, None)
    assert not NO_KEY and Key(b"x")


def test_a_key_is_in_no_repr_of_anything(key_file: Path) -> None:
    config = parse_args(["--api-key-file", str(key_file), "--admin-api-key", "other"])

    assert "s3cret" not in repr(config) + str(config.api_key)
    assert "other" not in repr(config) + f"{config.admin_api_key}"


def test_only_the_same_bytes_are_equal() -> None:
    key = Key(b"s3cret")

    assert key.is_equal_to(b"s3cret")
    assert not any(map(key.is_equal_to, (b"", b"s3cre", b"s3cret ", b"S3cret")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("two words", "a space"),
        ("two\nlines", "a line break"),
        ("ключ", "beyond ASCII"),
        ("x" * 5000, "more than 4096 bytes"),
    ],
)
def test_what_no_header_can_carry_is_refused_in_a_file_and_as_a_flag(
    key_file: Path, text: str, message: str
) -> None:
    key_file.write_text(text)

    with pytest.raises(ConfigError, match=rf"--api-key-file .*{message}"):
        key_of("--api-key", None, str(key_file))
    with pytest.raises(ConfigError, match=rf"--api-key .*{message}") as caught:
        key_of("--api-key", text, None)
    assert not text or text not in str(caught.value)


def test_a_file_that_others_can_read_is_refused_with_the_command_that_mends_it(
    key_file: Path,
) -> None:
    key_file.chmod(0o644)

    with pytest.raises(ConfigError, match=f"mode 0644.*chmod 600 {key_file}"):
        key_of("--api-key", None, str(key_file))


def test_a_file_that_is_not_there_and_two_keys_for_one_purpose_are_refused(key_file: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-file /no/such: No such file"):
        key_of("--api-key", None, "/no/such")
    with pytest.raises(ConfigError, match="both given"):
        key_of("--api-key", "x", str(key_file))
