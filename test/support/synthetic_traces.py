"""Timelines of one attention and one MLP server on invented clocks, through the real recorders."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.trace.attn import AttnTimeline
from sglang_afd.trace.header import Header
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.trace.recorder import Recorder

US = 1000
PEER = b"attention server"
BEGIN_NS = 7_000_000_000_000  # of the attention host's clock


class Run:
    """Two micro-batches in three layers of a few steps; `files` are the attention and MLP files."""

    def __init__(
        self,
        directory: Path,
        *,
        mlp_clock_offset_ns: int = 0,
        mlp_host: str = "near",
        mlp_server: str = "mlp-0",
        epoch: int = 66850084620337153,
        pieces: int = 1,
        runs_of_an_exchange: int = 1,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.files = [directory / "attn.json", directory / f"{mlp_server}.json"]
        self.num_exchanges = 0
        self._now_ns = BEGIN_NS
        self._offset_ns = mlp_clock_offset_ns
        self._epoch = epoch
        self._pieces = pieces
        self._runs = runs_of_an_exchange
        self._random = random.Random(7)
        recorders = [
            Recorder(str(path), _header(role, server, host, BEGIN_NS + offset_ns))
            for path, role, server, host, offset_ns in (
                (self.files[0], "attn", "attn-1", "near", 0),
                (self.files[1], "mlp", mlp_server, mlp_host, mlp_clock_offset_ns),
            )
        ]
        self._attn, self._mlp = AttnTimeline(recorders[0]), MlpTimeline(recorders[1])
        with mock.patch("time.monotonic_ns", self._attn_clock):
            self._serve()
        for recorder in recorders:
            recorder.close()

    def _serve(self) -> None:
        self._on_mlp(lambda: self._mlp.attached(PEER, "attn-1", self._epoch))
        for step in range(1, 5):
            self._attn.step_begins(step, Kind.DECODE)
            self._attn.taken(self._epoch, self._now_ns)
            sent: dict[int, Dispatch] = {}
            for layer_id in range(3):
                for micro_batch_id in (0, 1):
                    if micro_batch_id in sent:
                        self._combine(sent[micro_batch_id])
                    self._pass(60, 80)  # attention
                    for piece in range(1, self._pieces):
                        self._combine(self._dispatch(step, layer_id, micro_batch_id, piece))
                    sent[micro_batch_id] = self._dispatch(step, layer_id, micro_batch_id, 9)
            for dispatch in sent.values():
                self._combine(dispatch)
            self._pass(20, 40)  # head
            self._attn.step_ends()

    def _dispatch(self, step: int, layer_id: int, micro_batch_id: int, rows: int) -> Dispatch:
        header = Dispatch(
            epoch=self._epoch,
            step=step,
            layer_id=layer_id,
            micro_batch_id=micro_batch_id,
            num_rows=rows,
            kind=Kind.DECODE,
            num_micro_batches=2,
        )
        started_ns = self._now_ns
        self._pass(2, 4)
        self._attn.dispatched(header, started_ns)
        return header

    def _combine(self, header: Dispatch) -> None:
        started_ns = self._now_ns
        self._pass(30, 400)  # on the way
        self._on_mlp(lambda: self._run(header))
        self._pass(30, 400)  # and back
        received_ns = self._now_ns
        self._pass(1, 2)
        self._attn.combined(header.micro_batch_id, started_ns, self._epoch, {0: received_ns})
        self.num_exchanges += 1

    def _run(self, header: Dispatch) -> None:
        member = Member(
            peer=PEER,
            micro_batch_id=header.micro_batch_id,
            step=header.step,
            layer_id=header.layer_id,
            num_rows=header.num_rows,
        )
        waited_from_ns = self._mlp_clock()
        self._pass(3, 5)
        self._mlp.waited(waited_from_ns, 0)
        self._mlp.arrived(member)
        for number in range(1, self._runs + 1):
            is_last = number == self._runs
            unit = Unit(
                layer_id=header.layer_id,
                members=(member,),
                micro_batch_id=header.micro_batch_id,
                num_rows=header.num_rows,
                is_last_piece=is_last,
            )
            started_ns = self._mlp_clock()
            self._pass(40, 50)
            ran_ns = self._mlp_clock()
            if is_last:
                self._mlp.replying(member)
            self._pass(2, 3)
            self._mlp.ran(unit, (member,), started_ns, ran_ns)

    def _pass(self, least_us: int, most_us: int) -> None:
        self._now_ns += self._random.randint(least_us * US, most_us * US)

    def _on_mlp(self, act: object) -> None:
        assert callable(act)
        with mock.patch("time.monotonic_ns", self._mlp_clock):
            act()

    def _attn_clock(self) -> int:
        return self._now_ns

    def _mlp_clock(self) -> int:
        return self._now_ns + self._offset_ns


def _header(role: str, server_id: str, host: str, clock_ns: int) -> Header:
    return Header(
        role=role,
        server_id=server_id,
        hostname=host,
        boot_id=f"boot-{host}",
        clock_ns=clock_ns,
        wall_clock_s=1.8e9,
    )
