"""How a step's rows reach the experts: one face for host memory and for the GPU's own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.base import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One forward of this server."""

    number: int
    kind: Kind  # as the scheduler sees it
    deadline_s: float  # time.monotonic() at which it must be over; inf without a limit


class StepExchange(ABC):
    """The dispatchers of every layer go through one of these; used by the scheduler's thread."""

    max_rows: int  # of one exchange
    runs_ahead: bool  # is a step still under way when it has been launched?
    slab_bytes = 0  # memory of slots on the GPU

    @abstractmethod
    def start(self) -> None:
        """Begin to look for MLP servers; with CUDA graphs once they are captured."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """A step begins.

        Raises:
            StallTimeout: It cannot run: no MLP servers are attached, and its time is over.
        """

    @abstractmethod
    def end(self) -> None:
        """The step was launched, or an error ended it."""

    @abstractmethod
    def stage(self, kind: Kind, *, number: int, num_rows: int | None, most_rows: int) -> None:
        """Just before a forward: what its exchanges are to say.

        Args:
            kind: Of its rows.
            number: Of micro-batches, all with rows.
            num_rows: Rows of the step in tensors that are padded beyond them, None where no tensor
                is padded.
            most_rows: Of its largest micro-batch.
        """

    @abstractmethod
    def send(
        self, layer_id: int, micro_batch: MicroBatch, rows: Rows, *, first_row: int, is_whole: bool
    ) -> None:
        """Dispatch one piece of one layer.

        Args:
            layer_id: Of the layer.
            micro_batch: Names the slot.
            rows: At most `max_rows`, where the model runs.
            first_row: Of the piece in its micro-batch.
            is_whole: Is there one piece only?
        """

    @abstractmethod
    def receive(self, micro_batch: MicroBatch, num_rows: int, *, is_whole: bool) -> Tensor:
        """The sum of what was dispatched last in this slot: [num_rows, H], where the rows were.

        Where a step goes on by itself and is captured whole, it is the slot's own memory, valid
        until its next dispatch.
        """

    @abstractmethod
    def launched(self) -> None:
        """A step begins whose end `finished` will tell; one that runs ahead is watched."""

    @abstractmethod
    def finished(self) -> None:
        """The oldest step's results are there.

        Raises:
            StallTimeout: They are worthless, the step was given up.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise StallTimeout when what was launched was given up."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """End every step under way, so that the next one finds no trace of them."""

    @abstractmethod
    def close(self) -> None:
        """Nothing will run any more; the MLP servers have been told."""


def kind_of(kind: Kind, most_rows: int, max_rows: int) -> Kind:
    """Of a step whose largest micro-batch has `most_rows`: what goes in pieces joins no round.

    All exchanges of a step are of one kind, so that none is waited for in vain.
    """
    return Kind.PREFILL if most_rows > max_rows else kind
