from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.protocol import auth

SECRET = b"0123456789abcdef"


def write_secret(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_an_empty_path_means_that_there_is_no_secret() -> None:
    assert auth.load_secret("") == b""


def test_a_secret_is_read_without_the_newline_that_an_editor_leaves(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "secret", SECRET + b"\n")

    assert auth.load_secret(path) == SECRET


def test_a_secret_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.symlink_to("/dev/zero")

    with pytest.raises(ConfigError, match="more than 256 MiB"):
        auth.load_secret(str(path))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o644, 0o610])
def test_a_secret_that_others_can_touch_is_refused_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    path = write_secret(tmp_path / "secret", SECRET, mode)

    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600 "):
        auth.load_secret(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_secret_of_its_owner_alone_is_accepted(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "secret", SECRET, mode)

    assert auth.load_secret(path) == SECRET


@pytest.mark.parametrize("content", [b"", b"\n", b"short", SECRET[:-1], SECRET[:-1] + b" \n"])
def test_a_secret_that_is_too_short_is_refused_with_both_lengths(
    tmp_path: Path, content: bytes
) -> None:
    path = write_secret(tmp_path / "secret", content)

    with pytest.raises(ConfigError, match=rf"holds {len(content.strip())} bytes; at least 16 "):
        auth.load_secret(path)


def test_a_missing_secret_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--afd-secret-file .*nowhere: No such file"):
        auth.load_secret(str(tmp_path / "nowhere"))


def test_a_directory_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        auth.load_secret(str(tmp_path))


def test_a_proof_verifies_for_the_secret_the_role_and_the_parts_it_was_made_for() -> None:
    proof = auth.prove(SECRET, "attn", b"ab", b"c")

    assert auth.verify(proof, SECRET, "attn", b"ab", b"c")


@pytest.mark.parametrize(
    ("secret", "role", "parts"),
    [
        (SECRET + b"x", "attn", (b"ab", b"c")),
        (b"", "attn", (b"ab", b"c")),
        (SECRET, "mlp", (b"ab", b"c")),
        (SECRET, "attn", (b"a", b"bc")),  # the same bytes, cut elsewhere
        (SECRET, "attn", (b"abc",)),
        (SECRET, "attn", (b"c", b"ab")),
        (SECRET, "attn", (b"ab", b"c", b"")),
    ],
)
def test_a_proof_is_bound_to_secret_role_and_parts(
    secret: bytes, role: str, parts: tuple[bytes, ...]
) -> None:
    proof = auth.prove(SECRET, "attn", b"ab", b"c")

    assert not auth.verify(proof, secret, role, *parts)


@pytest.mark.parametrize("proof", [b"", b"x", b"\0" * 32, b"\0" * 33])
def test_what_is_no_proof_does_not_verify(proof: bytes) -> None:
    assert not auth.verify(proof, SECRET, "attn")


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/afd/exchange",
        "tcp://127.0.0.1:7000",
        "tcp://127.8.9.10:7000",
        "tcp://[::1]:7000",
        "tcp://localhost:7000",
        "http://localhost:30010",
        "http://LOCALHOST:30010/x",
        "http://127.0.0.1",
        "http://[::1]:30010",
        "127.0.0.1",
        "127.0.0.1:80",
        "localhost",
        "::1",
        "[::1]:80",
        "::ffff:127.0.0.1",
    ],
)
def test_an_address_of_this_host_alone_is_loopback(address: str) -> None:
    assert auth.is_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:7000",
        "tcp://*:7000",
        "tcp://[::]:7000",
        "tcp://10.0.0.5:7000",
        "tcp://128.0.0.1:7000",
        "tcp://[2001:db8::1]:7000",
        "tcp://eth0:7000",
        "http://localhost.example.com:1",
        "http://127.0.0.1.example.com:1",
        "http://127.0.0.1@example.com:1",
        "0.0.0.0",
        "::",
        "::ffff:10.0.0.5",
        "fe80::1",
        "",
    ],
)
def test_an_address_that_others_can_reach_is_not_loopback(address: str) -> None:
    assert not auth.is_loopback(address)


@pytest.mark.parametrize(
    ("address", "secret"),
    [("tcp://127.0.0.1:1", b""), ("ipc:///x", b""), ("tcp://0.0.0.0:1", SECRET)],
)
def test_an_address_is_accepted_on_this_host_or_with_a_secret(address: str, secret: bytes) -> None:
    auth.require_secret_beyond_loopback(address, secret, "--afd-listen")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://*:1", "http://10.0.0.5:30010"])
def test_an_address_beyond_this_host_needs_a_secret(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        auth.require_secret_beyond_loopback(address, b"", "--afd-listen")

    assert f"--afd-listen {address} can be reached from other hosts" in str(caught.value)
    assert "--afd-secret-file, or use ipc:// or 127.0.0.1" in str(caught.value)
