"""A recorded timeline of real servers, played again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from sglang_afd.errors import ConfigError
from sglang_afd.planner.simulator.recording import (
    PARKED_US,
    Recording,
    Run,
    read_recording,
)
from sglang_afd.planner.simulator.replay import replay
from sglang_afd.trace.reading import Timeline, read_timeline

# Three attention servers and two MLP ranks on a CPU (docs/results/planner-simulator.md); the first
# nine steps of each warm up one after another, without the planted delays.
FILES = sorted(
    (Path(__file__).parents[4] / "benchmark" / "planner" / "timelines" / "3a2f").glob("*.gz")
)
WARM_STEPS = 9


@pytest.fixture(scope="module")
def recording() -> Recording:
    return read_recording([read_timeline(path) for path in FILES], WARM_STEPS)


def test_the_recording_has_every_step_and_both_ranks(recording: Recording) -> None:
    assert len(FILES) == 5
    assert recording.layers == tuple(range(8))
    assert [len(steps) for steps in recording.steps.values()] == [7, 7, 7]
    assert recording.num_ranks == 2


@pytest.mark.parametrize("as_recorded", [True, False])
def test_the_replayed_mean_step_is_within_three_percent(
    recording: Recording, as_recorded: bool
) -> None:
    found = replay(recording, as_recorded=as_recorded)

    assert len(found.of_decode()) == 18
    assert abs(found.mean_percent) < 3
    assert found.median_abs_percent < 5
    assert found.played_us == pytest.approx(found.recorded_us, rel=0.03)


def test_the_replayed_rounds_are_as_full_as_the_recorded_ones(recording: Recording) -> None:
    found = replay(recording)

    assert found.played_peers_per_run == pytest.approx(found.recorded_peers_per_run, rel=0.02)


def test_who_ran_when_is_not_taken_from_the_recording(recording: Recording) -> None:
    """Only durations and members are read of runs: moved by an hour they change nothing."""
    moved = replace(recording, runs=tuple(_later(run) for run in recording.runs))

    assert replay(moved).steps == replay(recording).steps


def test_longer_runs_make_longer_steps(recording: Recording) -> None:
    slower = replace(
        recording, runs=tuple(replace(run, run_us=1.2 * run.run_us) for run in recording.runs)
    )

    assert replay(slower).mean_percent > 10


def test_the_wait_for_rows_that_are_missing_is_no_time_of_the_ranks_own() -> None:
    timelines = [read_timeline(path) for path in FILES]
    waited = [_with_waits(timeline, PARKED_US) for timeline in timelines]

    turns, with_waits = (read_recording(each, WARM_STEPS).turns for each in (timelines, waited))

    assert (with_waits.before_us, with_waits.after_us) == pytest.approx(
        (turns.before_us, turns.after_us), rel=0.1
    )


def test_timelines_of_one_role_are_refused() -> None:
    attention = [read_timeline(path) for path in FILES if "attn" in path.name]

    with pytest.raises(ConfigError, match="give those of all attention servers and all MLP ranks"):
        read_recording(attention)


def test_skipping_every_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="after the first 99"):
        read_recording([read_timeline(path) for path in FILES], 99)


def test_a_compressed_timeline_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "attn.json.gz"
    file.write_bytes(FILES[0].read_bytes()[:5000])

    with pytest.raises(ConfigError, match="attn.json.gz cannot be unpacked"):
        read_timeline(file)


def _later(run: Run) -> Run:
    return replace(run, start_us=run.start_us + 3.6e9)


def _with_waits(timeline: Timeline, wait_us: float) -> Timeline:
    """Every tenth run begins so much later, and ends when it did."""
    runs = [event for event in timeline.events if event.name == "run" and event.dur > wait_us]
    late = {id(event) for event in runs[::10]}
    events = [
        structs.replace(event, ts=event.ts + wait_us, dur=event.dur - wait_us)
        if id(event) in late
        else event
        for event in timeline.events
    ]
    return replace(timeline, events=events)
