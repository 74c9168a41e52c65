"""Events of a timeline that cannot be what they say are refused where they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.simulator.recording import read_recording
from sglang_afd.trace.reading import read_timeline

TIMELINES = sorted(
    (Path(__file__).parents[3] / "benchmark" / "planner" / "timelines" / "3a2f").glob("*.gz")
)
DISPATCH = {"step": 1, "layer": 0, "micro_batch": 0, "epoch": "7", "rows": 3}
COMBINE = {"step": 1, "layer": 0, "micro_batch": 0, "epoch": "7", "received_us": {"0": 5.0}}
MEMBER = {"peer": "a", "epoch": "7", "step": 1, "micro_batch": 0} | dict.fromkeys(
    ("arrived_us", "replied_us"), 1.0
)
RUN = {"layer": 0, "micro_batch": 0, "kind": "decode", "rows": 3, "members": [MEMBER]}


def timeline(path: Path, name: str, arguments: dict[str, Any], ts: float = 0.0) -> Path:
    with gzip.open(TIMELINES[0], "rt") as file:
        header = next(line for line in file if "afd_header" in line)
    event = {"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": ts, "args": arguments}
    path.write_text(f"[\n{header}{json.dumps(event)},\n\n")
    return path


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("dispatch", DISPATCH), ("combine", COMBINE), ("run", RUN), ("somebody's own", {"step": []})],
)
def test_events_as_servers_write_them_are_read(
    tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    (event,) = read_timeline(timeline(tmp_path / "a.json", name, arguments)).events

    assert event.args == arguments


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("step 1 (decode)", {"kind": "decode"}, "missing required field `step`"),
        ("dispatch", DISPATCH | {"layer": "x"}, r"Expected `int`, got `str` - at `\$.layer`"),
        ("dispatch", DISPATCH | {"rows": 10**30}, "rows"),
        ("attention", {"step": [], "layer": 0}, "step"),
        ("combine", COMBINE | {"received_us": {"0": 1e308}}, "received_us"),
        ("combine", COMBINE | {"received_us": {"first": 1.0}}, "received_us"),
        ("run", RUN | {"members": [1]}, "members"),
        ("run", RUN | {"members": [MEMBER | {"peer": 1}]}, "peer"),
    ],
)
def test_an_event_that_lacks_something_names_line_and_field(
    tmp_path: Path, name: str, arguments: dict[str, Any], says: str
) -> None:
    path = timeline(tmp_path / "a.json", name, arguments)

    with pytest.raises(ConfigError, match=f"line 3: .*{says}"):
        read_timeline(path)


def test_a_time_that_no_server_reaches_is_refused(tmp_path: Path) -> None:
    path = timeline(tmp_path / "a.json", "run", RUN, ts=1e308)

    with pytest.raises(ConfigError, match="ts"):
        read_timeline(path)


def test_a_rank_whose_timeline_is_missing_is_named() -> None:
    timelines = [read_timeline(path) for path in TIMELINES if path.name != "mlp-1.json.gz"]

    with pytest.raises(ConfigError, match="has replies of MLP rank 1, of which no timeline"):
        read_recording(timelines)


def test_steps_that_one_rank_did_not_record_to_their_end_are_left_out() -> None:
    whole = [read_timeline(path) for path in TIMELINES]
    cut = [read_timeline(path) for path in TIMELINES]
    events = cut[-1].events
    del events[len(events) // 2 :]

    recording = read_recording(cut)

    count = sum(map(len, recording.steps.values()))
    assert 0 < count < sum(map(len, read_recording(whole).steps.values()))
    for step in (step for each in recording.steps.values() for step in each):
        assert all(op.out_us.keys() == op.back_us.keys() == {0, 1} for op in step.ops.values())


def test_a_recording_without_a_decode_step_is_refused() -> None:
    timelines = [read_timeline(path) for path in TIMELINES]

    with pytest.raises(ConfigError, match="no decode step"):
        read_recording(timelines, skip_steps=10**6)
