from __future__ import annotations

from fake_loop import FakeLoop
from router_servers import TTL_S, attn, mlp, pass_probes, register_all

from sgl_router_afd.awake_clock import MAX_GAP_S, AwakeClock
from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.routing import Candidates
from sgl_router_afd.traffic import SAMPLE_S


def test_a_clock_that_is_read_as_often_as_a_fleet_takes_samples_misses_nothing() -> None:
    real = FakeLoop(now_s=1000.0)
    clock = AwakeClock(real.time)

    for _ in range(100):
        real.advance(SAMPLE_S + 0.1)
        clock()

    assert abs(clock() - real.time()) < 1e-6


def test_time_in_which_nobody_read_it_hardly_passes() -> None:
    real = FakeLoop(now_s=1000.0)
    clock = AwakeClock(real.time)

    real.advance(3600.0)

    assert clock() == clock() == 1000.0 + MAX_GAP_S


def test_a_router_that_was_stopped_takes_nobodys_lease_away() -> None:
    real = FakeLoop(now_s=0.0)
    clock = AwakeClock(real.time)
    plane = ControlPlane("router", Ledger(Saved(), lambda saved: None), started_s=0.0)
    expert = mlp("mlp-0")
    server = attn("attn-0").attach(expert)
    register_all(plane, clock(), expert, server)
    pass_probes(plane, clock())

    real.advance(10 * TTL_S)
    plane.update(clock())

    assert plane.route("tiny") == Candidates(server_ids=("attn-0",))
    assert [view.epoch for view in plane.groups.views.values()] == [2]
