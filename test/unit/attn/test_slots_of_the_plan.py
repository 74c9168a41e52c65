from __future__ import annotations

from sglang_afd.attn import open_exchange
from sglang_afd.fleet import memory


def test_the_launcher_plans_as_many_slots_as_auto_makes() -> None:
    assert memory.AUTO_SLOTS == open_exchange.AUTO_SLOTS
