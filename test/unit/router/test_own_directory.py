from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from sgl_router_afd import own_directory as module
from sgl_router_afd.own_directory import LOCK, PREFIX, own_directory
from sglang_afd.errors import ConfigError


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by_a_killed_router(parent: Path, name: str = "killed") -> Path:
    directory = parent / f"{PREFIX}{name}"
    directory.mkdir()
    (directory / LOCK).touch()
    (directory / "control").touch()
    return directory


def test_a_router_has_a_directory_that_only_its_user_enters_and_that_goes_with_it(
    parent: Path,
) -> None:
    with own_directory() as directory:
        assert directory.parent == parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "control").touch()

    assert os.listdir(parent) == []


def test_directories_of_killed_routers_are_removed_and_named_in_the_log(
    parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    killed = left_by_a_killed_router(parent)

    with own_directory() as directory:
        assert os.listdir(parent) == [directory.name]

    assert f"removed what killed routers left in {parent}: {killed.name}" in caplog.text


def test_the_directory_of_a_living_router_stays() -> None:
    with own_directory() as one, own_directory() as other:
        assert one.is_dir() and other.is_dir() and one != other


def test_what_is_not_surely_left_by_a_killed_router_of_this_user_stays(parent: Path) -> None:
    elsewhere = left_by_a_killed_router(parent, "x").rename(parent / "elsewhere")
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    (parent / f"{PREFIX}new").mkdir()  # a router is about to lock it
    linked_lock = left_by_a_killed_router(parent, "odd") / LOCK
    linked_lock.unlink()
    linked_lock.symlink_to(elsewhere / LOCK)
    before = sorted(os.listdir(parent))

    with own_directory():
        pass

    assert sorted(os.listdir(parent)) == before


def test_a_directory_of_another_user_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = left_by_a_killed_router(parent)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with own_directory():
        assert foreign.is_dir()


def test_a_directory_that_is_taken_for_a_left_one_before_it_is_locked_is_given_up(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def make(prefix: str, dir: Path) -> str:
        name = real(prefix=prefix, dir=dir)
        if not lost:
            lost.append(name)
            shutil.rmtree(name)
        return name

    real = tempfile.mkdtemp
    monkeypatch.setattr(module.tempfile, "mkdtemp", make)

    with own_directory() as directory:
        assert directory.is_dir() and str(directory) not in lost


def test_a_lock_that_another_router_removed_is_not_held(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Path] = []

    def take(lock: int) -> bool:
        if not lost:
            (directory,) = parent.iterdir()
            lost.append(directory)
            shutil.rmtree(directory)
        return real(lock)

    real = module._take
    monkeypatch.setattr(module, "_take", take)

    with own_directory() as directory:
        assert directory.is_dir() and directory not in lost


def test_where_none_can_be_made_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))

    with pytest.raises(ConfigError, match="set TMPDIR"), own_directory():
        pass
