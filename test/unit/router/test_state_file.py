from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_router_afd.control import persist
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.state_file import open_state
from sglang_afd.errors import ConfigError


def test_a_second_router_is_refused_the_file_until_the_first_one_has_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    with open_state(path) as state:
        state.ledger.epochs.advance("group-1")
        state.ledger.save()

        with pytest.raises(ConfigError, match="is another router's, which runs"), open_state(path):
            pass

    with open_state(path) as after:
        assert after.ledger.epochs.groups == {"group-1": 1}


def test_a_router_that_let_go_of_the_file_undoes_nothing_that_its_successor_saved(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "state")
    with open_state(path) as before:
        before.let_go()
        with open_state(path) as after:
            after.ledger.drains.ask("attn-0", "boot-1", "new kernel")
            after.ledger.save()

            before.ledger.epochs.advance("group-1")
            before.ledger.save()

    assert list(persist.load(Path(path)).drains) == ["attn-0"]


def test_what_killed_routers_wrote_beside_the_file_is_removed_and_nothing_else(
    tmp_path: Path,
) -> None:
    others = ["state", ".state-2-abcdefgh", ".state-notes", ".other-abcdefgh"]
    persist.save(tmp_path / "state", Saved(base=4))
    for name in (".state-abcdefgh", *others[1:]):
        (tmp_path / name).write_bytes(b"half")

    with open_state(str(tmp_path / "state")) as state:
        assert state.ledger.epochs.base == 4

    assert sorted(os.listdir(tmp_path)) == sorted([*others, "state.lock"])


def test_a_link_to_the_file_stays_one_and_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "state")

    with open_state(str(tmp_path / "link")) as state:
        state.ledger.epochs.advance("group-1")
        state.ledger.save()
        with pytest.raises(ConfigError), open_state(str(tmp_path / "disk" / "state")):
            pass

    assert (tmp_path / "link").is_symlink()
    assert persist.load(tmp_path / "disk" / "state").groups == {"group-1": 1}


@pytest.mark.parametrize("name", ["", "missing/state"])
def test_what_is_no_place_for_a_file_is_refused_and_nothing_is_left_beside_it(
    tmp_path: Path, name: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()

    with pytest.raises(ConfigError, match="--state-file"), open_state(str(place / name)):
        pass

    assert os.listdir(tmp_path) == ["place"] and os.listdir(place) == []


def test_a_file_that_is_damaged_can_be_had_again_once_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"{")
    with pytest.raises(ConfigError, match="damaged"), open_state(str(path)):
        pass
    path.unlink()

    with open_state(str(path)) as state:
        assert state.ledger.epochs.groups == {}
