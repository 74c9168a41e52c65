from __future__ import annotations

from sglang_afd.attn.announcer import Announcer, Forecast
from sglang_afd.protocol.messages import Kind, StepIntent, Withdrawal

PREFILL = Forecast(kind=Kind.PREFILL, num_rows=0)


class Wire:
    def __init__(self, epoch: int = 7) -> None:
        self.epoch = epoch
        self.said: list[StepIntent | Withdrawal] = []

    def announce(self, message: StepIntent | Withdrawal) -> None:
        self.said.append(message)


def intent(step: int, num_rows: int = 4, kind: Kind = Kind.DECODE, epoch: int = 7) -> StepIntent:
    return StepIntent(epoch=epoch, step=step, num_rows=num_rows, num_micro_batches=2, kind=kind)


def decode(num_rows: int = 4) -> Forecast:
    return Forecast(kind=Kind.DECODE, num_rows=num_rows)


def test_a_step_is_announced_when_the_one_before_it_was_launched() -> None:
    wire, announcer = Wire(), Announcer()

    announcer.step_begins(wire, 1, Kind.DECODE, 4, 2)
    announcer.step_launched(wire, 1, decode(), 2)

    assert wire.said == [intent(1), intent(2)]


def test_a_forecast_that_came_true_is_not_said_again() -> None:
    wire, announcer = Wire(), Announcer()

    announcer.step_launched(wire, 1, decode(), 2)
    announcer.step_begins(wire, 2, Kind.DECODE, 4, 2)

    assert wire.said == [intent(2)]


def test_a_forecast_that_was_wrong_is_corrected() -> None:
    wire, announcer = Wire(), Announcer()

    announcer.step_launched(wire, 1, decode(4), 2)
    announcer.step_begins(wire, 2, Kind.PREFILL, 90, 2)

    assert wire.said == [intent(2), intent(2, 90, Kind.PREFILL)]


def test_the_last_step_is_followed_by_one_withdrawal() -> None:
    wire, announcer = Wire(), Announcer()

    announcer.step_begins(wire, 5, Kind.DECODE, 4, 2)
    announcer.step_launched(wire, 5, None, 2)
    announcer.idle(wire)
    announcer.idle(wire)

    assert wire.said == [intent(5), Withdrawal(epoch=7, step=6)]


def test_a_server_that_never_had_a_step_says_nothing() -> None:
    wire, announcer = Wire(), Announcer()

    announcer.idle(wire)
    announcer.idle(None)

    assert wire.said == []


def test_a_new_attachment_is_told_under_its_own_epoch() -> None:
    announcer, before, after = Announcer(), Wire(7), Wire(8)
    announcer.step_begins(before, 1, Kind.DECODE, 4, 2)

    announcer.step_begins(after, 1, Kind.DECODE, 4, 2)

    assert after.said == [intent(1, epoch=8)]


def test_a_prefill_to_come_is_announced_as_one() -> None:
    wire, announcer = Wire(), Announcer()

    announcer.step_launched(wire, 1, PREFILL, 1)

    assert wire.said[0].kind is Kind.PREFILL  # type: ignore[union-attr]
