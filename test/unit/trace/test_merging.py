"""Merging with synthetic servers whose clocks and exchanges are known."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import Run

from sglang_afd import merge_traces
from sglang_afd.errors import ConfigError
from sglang_afd.trace.clocks import estimate
from sglang_afd.trace.exchanges import Sample
from sglang_afd.trace.merging import Merged, merge
from sglang_afd.trace.reading import read_timeline

REQUIRED = {
    "X": {"name", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s", "args"},
    "M": {"name", "ph", "pid", "tid", "ts", "args"},
    "s": {"name", "ph", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "ph", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "ph", "cat", "id", "ts", "pid", "tid", "bp"},
}


def merged(files: list[Path]) -> Merged:
    return merge([read_timeline(path) for path in files])


@pytest.mark.parametrize("offset_s", [-3.7, 0.000_002, 5.25])
def test_a_planted_offset_between_hosts_is_recovered_within_the_round_trip(
    tmp_path: Path, offset_s: float
) -> None:
    run = Run(tmp_path, mlp_clock_offset_ns=round(offset_s * 1e9), mlp_host="far")

    result = merged(run.files)

    found = result.offsets["boot-far"]
    assert found.num_exchanges > 0
    assert found.round_trip_ns < 1_000_000
    assert abs(found.offset_ns - offset_s * 1e9) <= found.round_trip_ns / 2


def test_on_one_host_the_clock_is_taken_as_it_is(tmp_path: Path) -> None:
    result = merged(Run(tmp_path, mlp_clock_offset_ns=0, mlp_host="near").files)

    assert [offset.offset_ns for offset in result.offsets.values()] == [0]


def test_slow_exchanges_do_not_move_the_estimate() -> None:
    quick = [Sample(0, 1_000_050, 1_000_060, 110)] * 5
    late_reply = [Sample(0, 1_000_050, 1_000_060, 90_000)] * 40

    found = estimate(quick + late_reply)

    assert (found.offset_ns, found.round_trip_ns, found.num_exchanges) == (1_000_000, 100, 5)


@pytest.mark.parametrize("host", ["near", "far"])
def test_dispatch_run_and_combine_are_in_causal_order(tmp_path: Path, host: str) -> None:
    run = Run(tmp_path, mlp_clock_offset_ns=0 if host == "near" else -(10**10), mlp_host=host)

    events = merged(run.files).trace["traceEvents"]

    arrows = arrows_of(events)
    assert len(arrows) == run.num_exchanges
    for dispatch, *runs, combine in arrows:
        at = [dispatch["ts"]]
        for each in runs:
            at += [each["ts"], each["ts"] + each["dur"]]
        assert [*at, combine["ts"] + combine["dur"]] == sorted(
            [*at, combine["ts"] + combine["dur"]]
        )


def test_every_event_has_what_chromes_format_wants(tmp_path: Path) -> None:
    events = merged(Run(tmp_path).files).trace["traceEvents"]

    assert {event["ph"] for event in events} == set(REQUIRED)
    for event in events:
        assert event.keys() == REQUIRED[event["ph"]]
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert event.get("dur", 0) >= 0


def test_spans_of_a_track_are_apart_or_inside_one_another(tmp_path: Path) -> None:
    events = merged(Run(tmp_path).files).trace["traceEvents"]

    assert overlaps(events) == []


def test_the_check_for_overlaps_finds_one() -> None:
    def span(ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": ts, "dur": dur}

    assert overlaps([span(0, 10), span(2, 3), span(5, 5), span(10, 1)]) == []
    assert overlaps([span(0, 10), span(5, 6)]) != []


def test_rows_in_pieces_are_matched_piece_by_piece(tmp_path: Path) -> None:
    run = Run(tmp_path, pieces=3)

    arrows = arrows_of(merged(run.files).trace["traceEvents"])

    assert len(arrows) == run.num_exchanges
    assert [arrow[0]["args"]["rows"] for arrow in arrows] == [
        arrow[1]["args"]["rows"] for arrow in arrows
    ]


def test_a_prefill_that_runs_in_pieces_is_one_exchange_with_several_runs(tmp_path: Path) -> None:
    run = Run(tmp_path, runs_of_an_exchange=3)

    arrows = arrows_of(merged(run.files).trace["traceEvents"])

    assert [len(arrow) for arrow in arrows] == [2 + 3] * run.num_exchanges


def test_files_of_different_runs_are_refused(tmp_path: Path) -> None:
    one = Run(tmp_path / "one", epoch=1)
    other = Run(tmp_path / "other", epoch=2)

    with pytest.raises(ConfigError, match="share no exchange; give files of one run"):
        merged([one.files[0], other.files[1]])


def test_a_host_that_shares_no_exchange_is_refused_by_name(tmp_path: Path) -> None:
    one = Run(tmp_path / "one", epoch=1)
    other = Run(tmp_path / "other", epoch=2, mlp_host="far", mlp_server="mlp-9")

    with pytest.raises(ConfigError, match=f"{other.files[1]} was recorded on another host"):
        merged([*one.files, other.files[1]])


def test_the_file_of_a_server_is_taken_once(tmp_path: Path) -> None:
    run = Run(tmp_path)

    with pytest.raises(ConfigError, match="give each server's file once"):
        merged([*run.files, run.files[0]])


def test_times_that_contradict_each_other_on_one_clock_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, mlp_clock_offset_ns=-(10**9), mlp_host="near")

    with pytest.raises(ConfigError, match="contradict each other: the exchange of step"):
        merged(run.files)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; its server recorded nothing"),
        ("hello", "is no timeline of --afd-trace: line 1"),
        ('[\n{"ph":"M","name":"x","pid":1,"tid":0,"ts":0}', "it begins with 'x'"),
        (
            '[\n{"ph":"M","name":"afd_header","pid":1,"tid":0,"ts":0,"args":{"format":99}}',
            "it has format 99, this version reads 1",
        ),
        (
            '[\n{"ph":"M","name":"afd_header","pid":1,"tid":0,"ts":0,"args":{"format":1}}',
            "missing required field",
        ),
    ],
)
def test_what_is_no_timeline_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_timeline(path)


def test_the_program_writes_the_trace_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, mlp_host="far", mlp_clock_offset_ns=2_000_000_000)
    out = tmp_path / "out.json"

    code = merge_traces.main([str(out), *map(str, run.files)])

    assert code == 0
    assert json.loads(out.read_text())["traceEvents"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{out}: 2 servers, {run.num_exchanges} exchanges"
    assert second.startswith("clock of far: +2.000")


def test_the_program_refuses_to_overwrite_what_it_merges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    before = run.files[0].read_bytes()

    code = merge_traces.main([str(run.files[0]), *map(str, run.files)])

    assert code == 2
    assert "the first argument is the output" in capsys.readouterr().err
    assert run.files[0].read_bytes() == before


def arrows_of(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    names = {"s": "dispatch", "t": "run", "f": "combine"}
    slices = {(e["pid"], e["tid"], e["ts"], e["name"]): e for e in events if e["ph"] == "X"}
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in names:
            place = (event["pid"], event["tid"], event["ts"], names[event["ph"]])
            arrows[event["id"]].append(slices[place])
    return list(arrows.values())


def overlaps(events: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    found = []
    for spans in tracks.values():
        open_spans: list[dict[str, Any]] = []
        for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
            while (
                open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"] + 0.0015
            ):
                open_spans.pop()
            if open_spans:
                outer = open_spans[-1]
                if span["ts"] + span["dur"] > outer["ts"] + outer["dur"] + 0.0015:
                    found.append((outer, span))
            open_spans.append(span)
    return found
