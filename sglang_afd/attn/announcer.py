"""Tell rank 0 what the scheduler is about to do; never waits, and nothing depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sglang_afd.protocol.messages import Kind, StepIntent, Withdrawal


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The step that a scheduler will choose next, as far as it can be known now."""

    kind: Kind
    num_rows: int


class Announcing(Protocol):
    """What the announcer needs of a link."""

    epoch: int

    def announce(self, message: StepIntent | Withdrawal) -> None:
        """See `Link`."""


class Announcer:
    """Keeps what rank 0 was told last, so that it is told of changes only.

    A step is announced twice: when the one before it has been launched, from what is known then,
    and when it is launched itself, exactly. Under the overlap scheduler a launch is one step ahead
    of the rows already; on a CPU, where a forward ends before `run_batch` returns, only the first
    comes in time.
    """

    def __init__(self) -> None:
        self._told: StepIntent | None = None  # None when nothing is expected of us
        self._begun = 0  # the last step that was launched

    @property
    def is_awaited(self) -> bool:
        """Does rank 0 expect a step?"""
        return self._told is not None

    def step_begins(
        self, link: Announcing, step: int, kind: Kind, num_rows: int, num_micro_batches: int
    ) -> None:
        """The scheduler launches this step."""
        self._begun = step
        self._tell(link, step, kind, num_rows, num_micro_batches)

    def step_launched(
        self, link: Announcing, step: int, forecast: Forecast | None, num_micro_batches: int
    ) -> None:
        """The step was launched; `forecast` is of the next, None when there will be none."""
        if forecast is None:
            self.idle(link)
        else:
            self._tell(link, step + 1, forecast.kind, forecast.num_rows, num_micro_batches)

    def idle(self, link: Announcing | None) -> None:
        """Nothing is to come; said once."""
        told, self._told = self._told, None
        if link is not None and told is not None:
            link.announce(Withdrawal(epoch=link.epoch, step=self._begun + 1))

    def _tell(
        self, link: Announcing, step: int, kind: Kind, num_rows: int, num_micro_batches: int
    ) -> None:
        message = StepIntent(
            epoch=link.epoch,
            step=step,
            num_rows=num_rows,
            num_micro_batches=num_micro_batches,
            kind=kind,
        )
        if message != self._told:
            self._told = message
            link.announce(message)
