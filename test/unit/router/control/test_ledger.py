"""What must outlive the router: epochs that never go back, and all that is saved with them."""

from __future__ import annotations

import pytest

from sgl_router_afd.control.epochs import Epochs
from sgl_router_afd.control.ledger import FORGET_S, Ledger
from sgl_router_afd.control.persist import Saved, SavedDrain
from sglang_afd.errors import ConfigError

DRAIN = SavedDrain(boot_id="boot-1", reason="new kernel")


def test_a_forgotten_name_begins_above_all_epochs_that_it_had() -> None:
    epochs = Epochs(0, {"group-1": 7})

    epochs.forget("group-1")

    assert epochs.known_names() == frozenset()
    assert epochs.advance("group-1") == 8


def test_an_epoch_that_a_server_heard_of_is_never_undercut() -> None:
    epochs = Epochs(0, {"group-1": 7})

    raised = epochs.raise_to("group-1", 9), epochs.raise_to("group-1", 8)

    assert raised == (9, 9)


def test_an_epoch_that_no_group_can_have_come_to_is_not_followed() -> None:
    epochs = Epochs(0, {"group-1": 7})

    raised = epochs.raise_to("group-1", 2**48)

    assert (raised, epochs.advance("group-1")) == (7, 8)


def test_an_epoch_of_a_name_that_was_forgotten_does_not_come_back() -> None:
    epochs = Epochs(9, {})

    epochs.raise_to("group-1", 8)

    assert epochs.advance("group-1") == 10


def test_what_changed_is_saved_once() -> None:
    saved: list[Saved] = []
    ledger = Ledger(Saved(base=2), saved.append)
    ledger.epochs.advance("group-1")
    ledger.note_places({"attn-0": "group-1"})
    ledger.drains.ask("attn-0", "boot-1", "new kernel")
    ledger.drains.ask_group("group-1", "move")

    ledger.save_epochs()
    ledger.save()

    assert saved == [
        Saved(
            base=2,
            groups={"group-1": 3},
            places={"attn-0": "group-1"},
            drains={"attn-0": DRAIN},
            group_drains={"group-1": "move"},
        )
    ]


def test_what_could_not_be_saved_is_saved_the_next_time() -> None:
    saved: list[Saved] = []
    is_full = True

    def save(now: Saved) -> None:
        if is_full:
            raise ConfigError("the disk is full")
        saved.append(now)

    ledger = Ledger(Saved(), save)
    ledger.epochs.advance("group-1")
    with pytest.raises(ConfigError, match="the disk is full"):
        ledger.save_epochs()
    is_full = False

    ledger.save_epochs()

    assert saved == [Saved(groups={"group-1": 1})]


def test_a_server_that_is_away_for_long_is_forgotten_with_its_drain() -> None:
    last = Saved(places={"attn-0": "group-1", "attn-1": "group-1"}, drains={"attn-0": DRAIN})
    saved: list[Saved] = []
    ledger = Ledger(last, saved.append)

    for now_s in (0.0, 1.0, FORGET_S):
        ledger.forget_who_is_away({"attn-1"}, now_s)
        ledger.save()

    assert saved == [Saved(places={"attn-1": "group-1"})]
    assert ledger.unseen == {"attn-1": "group-1"}


def test_a_server_that_comes_back_in_between_is_away_from_anew() -> None:
    ledger = Ledger(Saved(places={"attn-0": "group-1"}), lambda saved: None)

    for now_s, present in ((0.0, set()), (1.0, {"attn-0"}), (FORGET_S, set[str]())):
        ledger.forget_who_is_away(present, now_s)

    assert ledger.unseen == {"attn-0": "group-1"}


def test_a_group_is_forgotten_with_its_drain_and_its_places() -> None:
    last = Saved(
        groups={"group-1": 7, "group-2": 1},
        places={"attn-0": "group-1", "attn-1": "group-2"},
        group_drains={"group-1": "move"},
    )
    saved: list[Saved] = []
    ledger = Ledger(last, saved.append)

    ledger.forget_groups({"group-1"})
    ledger.save()

    assert saved == [Saved(base=7, groups={"group-2": 1}, places={"attn-1": "group-2"})]
