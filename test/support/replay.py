"""Light-weight attention peers for tests of many peers: what they do, and what became of them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from fleet import CALM, FLAGS, MAX_ROWS
from servers import CPU_FLAGS, Server, Zygote, wait_until


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer does until it is told to stop; it may travel as JSON."""

    trace: str = ""  # file of replay_trace
    part: int = 0  # of the trace
    progress: str = ""  # file that holds the number of finished steps
    report: str = ""  # file for the report
    num_micro_batches: int = 1  # 1 .. 4
    attention_s: float = 0.0  # sleep of each layer's attention part, all micro-batches together
    prefill_every: int = 0  # a prefill before every so many decode steps; 0 for never
    pause_every: int = 0  # a pause before every so many decode steps; 0 for never
    pause_s: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer says at its end."""

    num_steps: int  # decode steps whose sums were all right
    largest_error: float  # of a sum, in parts of its largest value
    error: str  # why it ended early, or ""


class Peer:
    """One replaying process."""

    def __init__(self, server: Server, plan: Plan) -> None:
        self.server = server
        self.plan = plan

    @property
    def num_steps(self) -> int:
        """Decode steps so far."""
        progress = Path(self.plan.progress)
        text = progress.read_text() if progress.exists() else ""
        return int(text or 0)

    @property
    def report(self) -> Report | None:
        """Its last words, if it has spoken them."""
        path = Path(self.plan.report)
        text = path.read_bytes() if path.exists() else b""
        return msgspec.json.decode(text, type=Report) if text else None

    def stop(self) -> Report:
        """Let it finish its step, detach and report."""
        if self.server.is_alive():
            self.server.signal(signal.SIGTERM)
        self.server.wait_ended()
        if self.report is None:
            raise AssertionError(f"no report:\n{self.server.text()[-4000:]}")
        return self.report

    def raise_if_ended(self) -> None:
        """Show why it ended though nobody told it to."""
        if not self.server.is_alive():
            raise AssertionError(f"a peer ended: {self.report}\n{self.server.text()[-4000:]}")


class Crowd:
    """Starts peers of one model against one MLP group, each with its own part of the trace."""

    def __init__(
        self, zygote: Zygote, model: Path, trace: Path, mlp_port: int, directory: Path
    ) -> None:
        self.peers: list[Peer] = []
        self._zygote = zygote
        self._model = model
        self._trace = trace
        self._mlp_port = mlp_port
        self._directory = directory
        self._number = itertools.count()

    def add(self, part: int, **plan: object) -> Peer:
        """Start one peer; not waited for. `plan` holds fields of `Plan`."""
        stem = self._directory / f"peer-{next(self._number)}"
        full_plan = msgspec.convert(
            {
                "trace": str(self._trace),
                "part": part,
                "progress": f"{stem}.progress",
                "report": f"{stem}.report",
                **plan,
            },
            Plan,
        )
        argv = [
            *("--role", "attn", "--model-path", str(self._model), *CPU_FLAGS, *FLAGS),
            *("--afd-mlp", f"http://127.0.0.1:{self._mlp_port}", "--afd-max-rows", str(MAX_ROWS)),
            *("--afd-attach-timeout", "240", "--afd-stall-timeout", "200", *CALM),
            *("--afd-num-micro-batches", str(full_plan.num_micro_batches)),
        ]
        env = {"TEST_REPLAY": msgspec.json.encode(full_plan).decode()}
        peer = Peer(self._zygote.start("replay", argv, env=env), full_plan)
        self.peers.append(peer)
        return peer

    def wait_steps(self, count: int, peers: Sequence[Peer] | None = None) -> None:
        """Until each of `peers`, or of all, has done `count` decode steps more than now."""
        watched = self.peers if peers is None else peers
        before = [peer.num_steps for peer in watched]

        def all_went_on() -> bool:
            for peer in watched:
                peer.raise_if_ended()
            return all(
                peer.num_steps >= start + count for peer, start in zip(watched, before, strict=True)
            )

        wait_until(all_went_on, f"{count} more steps of each peer")

    def stop(self) -> list[Report]:
        """Tell everybody to stop, then collect the reports."""
        for peer in self.peers:
            if peer.server.is_alive():
                peer.server.signal(signal.SIGTERM)
        return [peer.stop() for peer in self.peers]


@contextmanager
def crowd(
    zygote: Zygote, model: Path, trace: Path, mlp_port: int, directory: Path
) -> Iterator[Crowd]:
    """A `Crowd` whose processes are gone at the end of the block, whatever happens in it."""
    peers = Crowd(zygote, model, trace, mlp_port, directory)
    try:
        yield peers
    finally:
        for peer in peers.peers:
            peer.server.kill_tree()


def counters(rank: Server) -> Callable[[str], float]:
    """The counters of an MLP rank now, by name without prefix and `_total`."""
    status, text = rank.get("/metrics")
    assert status == 200, text
    values = {}
    for line in text.splitlines():
        if line.startswith("sglang_afd_mlp_") and "expert=" not in line:
            name, value = line.rsplit(" ", 1)
            values[name.split("{")[0].removeprefix("sglang_afd_mlp_")] = float(value)

    def value_of(name: str) -> float:
        return values[f"{name}_total"] if f"{name}_total" in values else values[name]

    return value_of
