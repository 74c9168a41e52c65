"""The directory of a build is whole or absent, whoever dies or competes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_afd.demo.store import (
    build_lock,
    require_free_space,
    staged_directory,
    storage_errors,
    write_durably,
)
from sglang_afd.errors import ConfigError

BUILDER = """
import os, sys
from pathlib import Path
from sglang_afd.demo.store import build_lock, staged_directory, write_durably
target, mode = Path(sys.argv[1]), sys.argv[2]
with build_lock(target, lambda: print("waiting", flush=True)):
    if target.exists():
        print("reused", flush=True)
        sys.exit()
    with staged_directory(target) as staging:
        write_durably(staging / "half", b"x")
        print("building", flush=True)
        if mode == "die":
            os._exit(9)
        sys.stdin.readline()
"""


def start_builder(target: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(target), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_staged_directory_appears_only_when_its_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "model"

    with staged_directory(target) as staging:
        write_durably(staging / "a", b"1")
        seen_inside = target.exists()

    assert not seen_inside
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_what_was_there(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()

    with pytest.raises(interruption), staged_directory(target) as staging:
        write_durably(staging / "new", b"1")
        raise interruption

    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_builder_that_was_killed_is_no_trap_for_the_next_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with start_builder(target, "die") as killed:
        killed.wait()
    leftovers = [path.name for path in tmp_path.iterdir()]

    with (
        build_lock(target, lambda: pytest.fail("the dead builder still holds the lock")),
        staged_directory(target) as staging,
    ):
        write_durably(staging / "whole", b"1")

    assert ".model.building" in leftovers
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert not (tmp_path / ".model.building").exists()


def test_of_two_builders_one_builds_and_the_other_reuses(tmp_path: Path) -> None:
    target = tmp_path / "model"
    builders = [start_builder(target, "wait") for _ in range(2)]
    said = [builder.stdout.readline() for builder in builders]  # type: ignore[union-attr]
    holder, waiter = (builders[said.index(word)] for word in ("building\n", "waiting\n"))

    outputs = [holder.communicate("go on\n")[0], waiter.communicate()[0]]

    assert outputs == ["", "reused\n"]
    assert [path.name for path in target.iterdir()] == ["half"]


def test_a_waiting_builder_says_so_and_goes_on_when_the_holder_is_done(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with start_builder(target, "wait") as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "building\n"
        waits: list[int] = []

        def let_it_go_on() -> None:
            waits.append(holder.stdin.write("go on\n"))  # type: ignore[union-attr]
            holder.stdin.flush()  # type: ignore[union-attr]

        with build_lock(target, let_it_go_on):
            exists_when_locked = target.exists()

    assert len(waits) == 1
    assert exists_when_locked


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "that you may write to"),
        (errno.EIO, "choose another place"),
    ],
)
def test_a_storage_error_names_the_place_the_cause_and_the_remedy(number: int, remedy: str) -> None:
    target = Path("/some/where")

    with pytest.raises(ConfigError) as caught, storage_errors(target):
        raise OSError(number, os.strerror(number), "/some/file")

    message = str(caught.value)
    assert "/some/where" in message
    assert os.strerror(number) in message
    assert remedy in message


def test_a_full_disk_is_refused_before_the_build(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 1000000000000 MB at .* MB are free"):
        require_free_space(tmp_path / "model", 10**18)
