"""The MLP role's timeline: what the loop waits for, what it runs, whom it answers."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

from sglang_afd.rounds.units import Member, Unit
from sglang_afd.trace.file import place_of
from sglang_afd.trace.header import header_of_this_process
from sglang_afd.trace.recorder import Recorder

LOOP = 0  # track of the loop
PEERS = 1  # track of attention servers that come and go
SHORTEST_WAIT_NS = 2_000  # shorter ones are turns of a busy loop
LONGEST_WAIT_NS = 1_000_000_000  # longer ones are shown in pieces, so that an idle file grows


class MlpTimeline:
    """Called by the loop's thread, with times of `time.monotonic_ns()`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._peers: dict[Hashable, tuple[str, str]] = {}  # server id and epoch
        self._arrived_ns: dict[tuple[Hashable, int], int] = {}  # by slot
        self._replied_ns: dict[tuple[Hashable, int], int] = {}  # by slot, of the running unit
        self._waiting: tuple[str, int, int] | None = None  # name, start, end; not recorded yet
        recorder.name_track(LOOP, "loop")
        recorder.name_track(PEERS, "peers")

    def attached(self, peer: Hashable, server_id: str, epoch: int) -> None:
        """An attention server passed the handshake."""
        self._peers[peer] = (server_id, str(epoch))
        self._recorder.instant(
            f"{server_id} attached", PEERS, time.monotonic_ns(), epoch=str(epoch)
        )

    def gone(self, peer: Hashable, server_id: str, reason: str) -> None:
        """An attention server left."""
        self._peers.pop(peer, None)
        self._arrived_ns = {slot: at for slot, at in self._arrived_ns.items() if slot[0] != peer}
        self._recorder.instant(f"{server_id} gone", PEERS, time.monotonic_ns(), reason=reason)

    def arrived(self, member: Member) -> None:
        """Rows are here."""
        self._arrived_ns[member.peer, member.micro_batch_id] = time.monotonic_ns()

    def waited(self, started_ns: int, num_waiting: int) -> None:
        """The loop waited from `started_ns` until now.

        Args:
            started_ns: When it began.
            num_waiting: Exchanges that were there before; those were held back for others to join.
        """
        now_ns = time.monotonic_ns()
        name = "window wait" if num_waiting else "wait for rows"
        before = self._waiting
        if (
            before is not None
            and before[0] == name
            and started_ns - before[2] < SHORTEST_WAIT_NS * 100
            and now_ns - before[1] < LONGEST_WAIT_NS
        ):
            self._waiting = (name, before[1], now_ns)
            return
        self._end_wait()
        self._waiting = (name, started_ns, now_ns)

    def replying(self, member: Member) -> None:
        """The partial sums of `member` are about to be sent."""
        self._replied_ns[member.peer, member.micro_batch_id] = time.monotonic_ns()

    def take_arrival(self, member: Member) -> int | None:
        """When the rows of a unit that is enqueued now came; None where that was not seen."""
        return self._arrived_ns.pop((member.peer, member.micro_batch_id), None)

    def ran_on_device(
        self,
        unit: Unit,
        members: Sequence[Member],
        arrivals_ns: Sequence[int | None],
        started_ns: int,
        done_ns: int,
    ) -> None:
        """A unit ended on a GPU.

        Args:
            unit: What ran.
            members: Of it, or of a part of it.
            arrivals_ns: Of `take_arrival`, when it was enqueued.
            started_ns: When it was enqueued, or the one before it ended.
            done_ns: When its end was seen.
        """
        now = self._arrived_ns
        self._arrived_ns = {
            (member.peer, member.micro_batch_id): at
            for member, at in zip(members, arrivals_ns, strict=True)
            if at is not None
        }
        if unit.is_last_piece:
            self._replied_ns = {(each.peer, each.micro_batch_id): done_ns for each in members}
        self.ran(unit, members, started_ns, done_ns)
        self._arrived_ns = now

    def ran(self, unit: Unit, members: Sequence[Member], started_ns: int, ran_ns: int) -> None:
        """The experts ran for `members` of `unit`, and their replies have been handed over."""
        now_ns = time.monotonic_ns()
        self._end_wait()
        kind = "prefill" if unit.is_prefill else "decode"
        self._recorder.span(
            "run",
            LOOP,
            started_ns,
            ran_ns,
            layer=unit.layer_id,
            micro_batch=unit.micro_batch_id,
            kind=kind,
            rows=unit.num_rows or sum(member.num_rows for member in members),
            sequence=unit.sequence,
            participants=len(members),
            members=[self._describe(member) for member in members],
        )
        if unit.is_last_piece:
            self._recorder.span("reply", LOOP, ran_ns, now_ns, layer=unit.layer_id)
        self._replied_ns.clear()

    def failed(self, unit: Unit, started_ns: int, reason: str) -> None:
        """The experts raised; everyone in `unit` was told so."""
        self._end_wait()
        self._recorder.span(
            "failed run", LOOP, started_ns, time.monotonic_ns(), layer=unit.layer_id, reason=reason
        )

    def _describe(self, member: Member) -> dict[str, Any]:
        server_id, epoch = self._peers.get(member.peer, ("", "0"))
        slot = (member.peer, member.micro_batch_id)
        replied_ns = self._replied_ns.get(slot)
        arrived_ns = self._arrived_ns.get(slot)
        since_begin_us = self._recorder.since_begin_us
        return {
            "peer": server_id,
            "epoch": epoch,
            "step": member.step,
            "micro_batch": member.micro_batch_id,
            "rows": member.num_rows,
            "arrived_us": None if arrived_ns is None else since_begin_us(arrived_ns),
            "replied_us": None if replied_ns is None else since_begin_us(replied_ns),
        }

    def _end_wait(self) -> None:
        if self._waiting is None:
            return
        name, start_ns, end_ns = self._waiting
        self._waiting = None
        if end_ns - start_ns >= SHORTEST_WAIT_NS:
            self._recorder.span(name, LOOP, start_ns, end_ns)


def begin(file: str, server_id: str, rank: int) -> MlpTimeline | None:
    """The timeline of `--afd-trace FILE`, or None where none is wanted.

    Raises:
        ConfigError: The file cannot be written.
    """
    if not file:
        return None
    header = header_of_this_process("mlp", server_id, rank)
    return MlpTimeline(Recorder(place_of(file, server_id), header))
