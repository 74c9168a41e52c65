"""A source with a clock in hand: tests move time, let rows arrive, and run units one by one."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

MS = 1e-3


class Bench:
    """One rank whose events and time a test decides; a run takes 1 ms."""

    def __init__(self, source: UnitSource, *peers: Hashable) -> None:
        self.source, self.now = source, 100.0
        self.units: list[Unit] = []
        for epoch, peer in enumerate(peers, start=1):
            source.peer_attached(peer, epoch, self.now)

    def passes(self, seconds: float) -> None:
        """Time."""
        self.now += seconds

    def arrives(
        self,
        peer: Hashable,
        layer_id: int = 0,
        part: int = 0,
        *,
        step: int = 1,
        parts: int = 1,
        rows: int = 3,
        is_prefill: bool = False,
    ) -> Member:
        """Rows of one exchange."""
        member = Member(
            peer=peer,
            micro_batch_id=part,
            step=step,
            layer_id=layer_id,
            num_rows=rows,
            num_micro_batches=parts,
            is_prefill=is_prefill,
        )
        self.source.arrived(member, self.now)
        return member

    def announces(self, peer: Hashable, step: int, *, is_prefill: bool = False) -> None:
        """An intent."""
        intent = Intent(peer=peer, step=step, num_rows=3, is_prefill=is_prefill)
        self.source.announced(intent, self.now)

    def runs(self, run_s: float = MS) -> Unit | None:
        """At most one unit."""
        unit = self.source.next_unit(self.now)
        if unit is not None:
            self.now += run_s
            self.source.finished(unit, self.now)
            self.units.append(unit)
        return unit

    def peers(self, run_s: float = MS) -> list[Hashable]:
        """Run one unit; the peers in it, sorted, or none."""
        unit = self.runs(run_s)
        return sorted(member.peer for member in unit.members) if unit is not None else []  # type: ignore[type-var]

    def step(self, peers: str, layers: int, *, step: int, gap_s: float = 2 * MS) -> None:
        """A whole decode step of peers that stay together, after their host gap."""
        self.passes(gap_s)
        for layer_id in range(layers):
            for peer in peers:
                self.arrives(peer, layer_id, step=step)
            assert self.peers() == sorted(peers), f"step {step}, layer {layer_id}"
            self.passes(0.2 * MS)
