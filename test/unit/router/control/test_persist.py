from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_router_afd.control.persist import Saved, SavedDrain, SavedWord, load, save
from sglang_afd.errors import ConfigError


def test_a_first_start_has_no_floors(tmp_path: Path) -> None:
    assert load(tmp_path / "state.json") == Saved()


WHOLE = Saved(
    base=3,
    groups={"group-1": 7},
    places={"attn-0": "group-1"},
    drains={"attn-0": SavedDrain(boot_id="boot-1", reason="new kernel")},
    group_drains={"group-1": "move"},
    models={"tiny": "ab" * 32},
    words={
        "attn-0": SavedWord(
            boot_id="boot-1", started_at_s=1.5, seq=3, sent_at_s=2.5, said_goodbye=False
        )
    },
)


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    save(tmp_path / "state.json", WHOLE)

    assert load(tmp_path / "state.json") == WHOLE
    assert os.listdir(tmp_path) == ["state.json"]


def test_the_file_has_golden_bytes(tmp_path: Path) -> None:
    save(tmp_path / "state.json", WHOLE)

    text = (tmp_path / "state.json").read_bytes()

    assert text == (
        b'{"version":1,"base":3,"groups":{"group-1":7},"places":{"attn-0":"group-1"},'
        b'"drains":{"attn-0":{"boot_id":"boot-1","reason":"new kernel"}},'
        b'"group_drains":{"group-1":"move"},"models":{"tiny":"' + b"ab" * 32 + b'"},'
        b'"words":{"attn-0":{"boot_id":"boot-1","started_at_s":1.5,"seq":3,"sent_at_s":2.5,'
        b'"said_goodbye":false}}}'
    )


def test_a_file_from_before_it_held_more_than_epochs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b'{"version":1,"base":3,"groups":{"group-1":7}}')

    assert load(path) == Saved(base=3, groups={"group-1": 7})


def test_a_file_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    save(path, Saved(groups={"group-1": 7}))

    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        save(path, Saved(groups={"group-1": 8}))

    assert load(path).groups == {"group-1": 7}
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"groups":{"group-1":"7"}}',
        b'{"version":2}',
        b'{"more":1}',
        b'{"base":-1}',
        b'{"groups":{"group-1":-1}}',
    ],
)
def test_a_damaged_file_is_refused_with_a_way_out(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(text)

    with pytest.raises(ConfigError, match="with all servers stopped it may be deleted"):
        load(path)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a named pipe"),
        (make_directory, "a directory"),
        (make_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "a character device"),
    ],
)
@pytest.mark.timeout(20)  # a named pipe that is opened to be read waits for a writer
def test_what_is_no_file_is_refused_by_its_kind_and_never_opened(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    path = tmp_path / "state"
    make(path)

    with pytest.raises(ConfigError) as caught:
        load(path)

    assert str(caught.value) == (
        f"--state-file {path} is {kind}, wanted a file, or a path at which there is nothing yet; "
        "give another path"
    )


def test_a_path_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        save(tmp_path / "none" / "state.json", Saved())


@pytest.mark.parametrize("epoch", ["-1", "281474976710656", "99999999999999999999999"])
def test_a_file_with_an_epoch_that_no_lease_has_room_for_is_refused(
    tmp_path: Path, epoch: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text(f'{{"version":1,"groups":{{"group-1":{epoch}}}}}')

    with pytest.raises(ConfigError, match=f"damaged: it has the epoch {epoch}"):
        load(path)


@pytest.mark.parametrize("text", [b"grOup-1", b"gr/up-1", b"gr\x7fup-1"])
@pytest.mark.parametrize("field", ["groups", "places", "group_drains"])
def test_a_name_that_no_group_can_have_is_damage_and_not_told_to_servers(
    tmp_path: Path, field: str, text: bytes
) -> None:
    path = tmp_path / "state.json"
    save(path, WHOLE)
    before, found, after = path.read_bytes().partition(f'"{field}":'.encode())
    path.write_bytes(before + found + after.replace(b"group-1", text, 1))

    with pytest.raises(ConfigError, match="is damaged or not ours"):
        load(path)
