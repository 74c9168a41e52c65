"""What each role's timeline makes of the calls that it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.trace import attn, mlp
from sglang_afd.trace.attn import AttnTimeline
from sglang_afd.trace.header import Header
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.trace.reading import Event, read_timeline
from sglang_afd.trace.recorder import Recorder

BEGIN_NS = 10**12
MS = 1_000_000


class Clock:
    """Stands in for `time.monotonic_ns`; `ms` is the time since the recording began."""

    ms = 0.0

    def __call__(self) -> int:
        return BEGIN_NS + round(self.ms * MS)

    def at(self, ms: float) -> int:
        self.ms = ms
        return self()


Read = Callable[[], list[Event]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic_ns", clock)
    return clock


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> Iterator[Recorder]:
    header = Header(
        role="attn",
        server_id="a",
        hostname="h",
        boot_id="b",
        clock_ns=BEGIN_NS,
        wall_clock_s=0.0,
    )
    recorder = Recorder(str(tmp_path / "a.json"), header)
    yield recorder
    recorder.close()


@pytest.fixture
def spans(recorder: Recorder, tmp_path: Path) -> Callable[[], list[tuple[str, int, float, float]]]:
    """Name, track, begin and end in milliseconds of every span so far."""

    def read() -> list[tuple[str, int, float, float]]:
        recorder.flush()
        events = read_timeline(tmp_path / "a.json").events
        return [(e.name, e.tid, e.ts / 1000, e.end / 1000) for e in events if e.ph == "X"]

    return read


def dispatch(micro_batch_id: int, layer_id: int = 0) -> Dispatch:
    return Dispatch(
        epoch=5,
        step=1,
        layer_id=layer_id,
        micro_batch_id=micro_batch_id,
        num_rows=2,
        kind=Kind.DECODE,
        num_micro_batches=2,
    )


def test_the_attention_of_a_micro_batch_begins_where_the_thread_finished_another(
    recorder: Recorder, clock: Clock, spans: Callable[[], object]
) -> None:
    timeline = AttnTimeline(recorder)

    clock.at(1)
    timeline.step_begins(1, Kind.DECODE)
    begun = clock.at(3)
    clock.at(4)
    timeline.dispatched(dispatch(0), begun)
    begun = clock.at(6)
    clock.at(7)
    timeline.dispatched(dispatch(1), begun)
    begun = clock.at(8)
    received = clock.at(10)
    clock.at(11)
    timeline.combined(0, begun, 5, {0: received})
    clock.at(15)
    timeline.step_ends()

    first, second = attn.MICRO_BATCH_0, attn.MICRO_BATCH_0 + 1
    assert spans() == [
        ("attention", first, 1, 3),
        ("dispatch", first, 3, 4),
        ("attention", second, 4, 6),
        ("dispatch", second, 6, 7),
        ("wait", first, 8, 10),
        ("combine", first, 10, 11),
        ("step 1 (decode)", attn.STEPS, 1, 15),
        ("head", attn.STEPS, 11, 15),
    ]


def test_a_stall_before_a_dispatch_is_no_attention(
    recorder: Recorder, clock: Clock, spans: Callable[[], object]
) -> None:
    timeline = AttnTimeline(recorder)

    clock.at(1)
    timeline.step_begins(1, Kind.DECODE)
    begun = clock.at(2)
    clock.at(900)
    timeline.taken(5, begun)
    begun = clock.at(901)
    clock.at(902)
    timeline.dispatched(dispatch(0), begun)

    track = attn.MICRO_BATCH_0
    assert spans() == [
        ("stall", attn.STEPS, 2, 900),
        ("attention", track, 1, 2),
        ("dispatch", track, 901, 902),
    ]


def test_replies_that_were_read_long_before_leave_no_wait(
    recorder: Recorder, clock: Clock, spans: Callable[[], list[tuple[str, int, float, float]]]
) -> None:
    timeline = AttnTimeline(recorder)
    timeline.step_begins(1, Kind.DECODE)
    timeline.dispatched(dispatch(0), clock.at(1))
    received = clock.at(2)
    begun = clock.at(5)
    clock.at(6)

    timeline.combined(0, begun, 5, {0: received, 1: received})

    track = attn.MICRO_BATCH_0
    assert spans()[-2:] == [("wait", track, 5, 5), ("combine", track, 5, 6)]


def test_the_loops_turns_without_work_are_one_wait_and_a_wait_for_others_is_another(
    recorder: Recorder, clock: Clock, spans: Callable[[], object]
) -> None:
    timeline = MlpTimeline(recorder)
    member = Member(peer=b"p", micro_batch_id=0, step=1, layer_id=2, num_rows=3)

    for begin, end, num_waiting in ((0, 200, 0), (200.01, 300, 0), (300.02, 301, 1)):
        begun = clock.at(begin)
        clock.at(end)
        timeline.waited(begun, num_waiting)
    begun, ran = clock.at(302), clock.at(304)
    clock.at(305)
    timeline.ran(Unit(layer_id=2, members=(member,)), (member,), begun, ran)

    assert spans() == [
        ("wait for rows", mlp.LOOP, 0, 300),
        ("window wait", mlp.LOOP, 300.02, 301),
        ("run", mlp.LOOP, 302, 304),
        ("reply", mlp.LOOP, 304, 305),
    ]


def test_a_run_names_its_participants_and_when_they_came_and_were_answered(
    recorder: Recorder, clock: Clock, tmp_path: Path
) -> None:
    timeline = MlpTimeline(recorder)
    members = [
        Member(peer=peer, micro_batch_id=1, step=step, layer_id=2, num_rows=rows)
        for peer, step, rows in ((b"p", 7, 3), (b"q", 9, 4))
    ]
    clock.at(1)
    timeline.attached(b"p", "attn-p", 2**60 + 1)
    timeline.attached(b"q", "attn-q", 6)
    for number, member in enumerate(members):
        clock.at(2 + number)
        timeline.arrived(member)
    begun, ran = clock.at(4), clock.at(5)
    for number, member in enumerate(members):
        clock.at(6 + number)
        timeline.replying(member)
    unit = Unit(layer_id=2, members=members, sequence=11, micro_batch_id=1, num_rows=7)

    timeline.ran(unit, members, begun, ran)

    recorder.flush()
    (run,) = [event for event in read_timeline(tmp_path / "a.json").events if event.name == "run"]
    described = run.args.pop("members")
    assert run.args == {
        "layer": 2,
        "micro_batch": 1,
        "kind": "decode",
        "rows": 7,
        "sequence": 11,
        "participants": 2,
    }
    assert described == [
        {
            "peer": peer,
            "epoch": epoch,
            "step": step,
            "micro_batch": 1,
            "rows": rows,
            "arrived_us": arrived,
            "replied_us": replied,
        }
        for peer, epoch, step, rows, arrived, replied in (
            ("attn-p", str(2**60 + 1), 7, 3, 2000, 6000),
            ("attn-q", "6", 9, 4, 3000, 7000),
        )
    ]


def test_a_run_on_a_gpu_ends_when_its_end_was_seen_and_keeps_the_arrivals_of_its_own(
    recorder: Recorder, clock: Clock, tmp_path: Path
) -> None:
    timeline = MlpTimeline(recorder)
    timeline.attached("p", "attn-0", 7)
    first = Member(peer="p", micro_batch_id=0, step=3, layer_id=2, num_rows=4)
    clock.at(1)
    timeline.arrived(first)
    arrivals = [timeline.take_arrival(first)]
    clock.at(2)
    timeline.arrived(first)  # the next one of this slot, before the end of the first was seen
    clock.at(5)

    timeline.ran_on_device(
        Unit(layer_id=2, members=(first,), sequence=9, num_rows=4),
        (first,),
        arrivals,
        BEGIN_NS + 1 * MS,
        BEGIN_NS + 4 * MS,
    )

    recorder.flush()
    (run,) = [event for event in read_timeline(tmp_path / "a.json").events if event.name == "run"]
    (member,) = run.args["members"]
    assert (member["arrived_us"], member["replied_us"]) == (1000, 4000)
    assert timeline.take_arrival(first) == BEGIN_NS + 2 * MS
