"""Which attention servers an MLP server says that it hears, and lost."""

from __future__ import annotations

import pytest

from sglang_afd.mlp import peers as peers_module
from sglang_afd.mlp.peers import LOST_S, Peers, PeersPage


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page(clock: Clock) -> PeersPage:
    """Two are attached."""
    page = PeersPage(clock)
    page.attached(b"1", "attn-1")
    page.attached(b"2", "attn-2")
    return page


def lost(page: PeersPage) -> list[tuple[str, str]]:
    return [(one.boot_id, one.reason) for one in page.read().lost]


def test_nobody_is_heard_before_anybody_came() -> None:
    assert PeersPage().read() == Peers()


def test_those_that_are_attached_are_named(page: PeersPage) -> None:
    assert page.read().attached == ("attn-1", "attn-2")


def test_a_lost_one_is_told_with_its_reason_for_a_while(page: PeersPage, clock: Clock) -> None:
    page.gone(b"1", "attn-1", reason="silent")

    assert page.read().attached == ("attn-2",)
    assert lost(page) == [("attn-1", "silent")]
    clock.now_s += LOST_S + 0.1
    assert lost(page) == []


def test_an_orderly_goodbye_is_no_loss(page: PeersPage) -> None:
    page.gone(b"1", "attn-1", reason="")

    assert lost(page) == []


def test_one_that_is_back_is_not_lost(page: PeersPage) -> None:
    page.gone(b"1", "attn-1", reason="silent")

    page.attached(b"3", "attn-1")

    assert lost(page) == []
    assert page.read().attached == ("attn-2", "attn-1")


def test_an_old_connection_of_one_that_is_back_is_no_loss(page: PeersPage) -> None:
    page.attached(b"3", "attn-1")

    page.gone(b"1", "attn-1", reason="silent")

    assert lost(page) == []


def test_many_losses_and_long_reasons_fit(page: PeersPage) -> None:
    for number in range(200):
        page.gone(b"x", f"attn-{number}-{'y' * 40}", reason="\N{SNOWMAN}" * 5000)

    assert len(page.read().lost) == 64
    assert page.read().lost[-1].boot_id.startswith("attn-199")


def test_as_many_peers_as_may_attach_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PeersPage()
    shown = []
    monkeypatch.setattr(page, "_show", lambda: shown.append(1))
    for number in range(2 * peers_module.MAX_PEERS - 1):
        page.attached(number.to_bytes(4, "big"), "y" * 60 + f"{number:04}")
    monkeypatch.undo()

    page.attached(b"last", "z")

    assert len(page.read().attached) == 2 * peers_module.MAX_PEERS
