"""Timelines of real servers: what --afd-trace writes, merged, is the run that happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleet
import pytest
from compare import PROMPTS, ask_at_once, differences
from fleet import Oracle
from servers import Zygote, fetch, running, wait_until

from sglang_afd.ports import free_ports
from sglang_afd.trace.reading import read_timeline

Event = dict[str, Any]
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def files(
    zygote: Zygote, qwen3_oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Path]]:
    """Timelines of one attention server and two ranks that served sixteen prompts at once."""
    directory = tmp_path_factory.mktemp("timelines")
    model, ports = qwen3_oracle.model, free_ports(2)
    flags = ("--afd-trace", f"{directory}/")
    ranks = fleet.start_mlp(zygote, model, ports, *flags)
    attn = fleet.start_attn(zygote, model, ports[0], *flags)
    with running([*ranks, attn]):
        fleet.wait_ready(attn)
        assert differences(qwen3_oracle.at_once, ask_at_once([attn.url], PROMPTS)) == []
        fleet.forget_prefixes(attn)  # no step runs any more
        _, metrics = fetch(f"http://127.0.0.1:{ports[0]}/metrics")
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
        num_served = int(float(values['sglang_afd_mlp_exchanges_total{rank="0"}']))
        (written,) = directory.glob("attn-*.json")
        wait_until(lambda: _holds_whole_steps(written, num_served), "all is written")
        attn.signal(signal.SIGKILL)
        for rank in ranks:
            rank.stop()
    yield sorted(directory.glob("*.json"))


@pytest.fixture(scope="module")
def events(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The merged trace, made by the program."""
    out = tmp_path_factory.mktemp("merged") / "trace.json"
    command = [sys.executable, "-m", "sglang_afd.merge_traces", str(out), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: 3 servers, ")
    found: list[Event] = json.loads(out.read_text())["traceEvents"]
    return found


def _holds_whole_steps(path: Path, num_exchanges: int) -> bool:
    """Are so many exchanges written, and the end of each step that had one?"""
    events = read_timeline(path).events
    combines = [event for event in events if event.name == "combine"]
    ended = {event.args["step"] for event in events if event.name.startswith("step ")}
    return len(combines) >= num_exchanges and {event.args["step"] for event in combines} <= ended


def _exchanges(events: list[Event]) -> list[tuple[Event, list[Event], Event]]:
    """Dispatch, runs and combine of each arrow."""
    slices = {(e["pid"], e["tid"], e["ts"], e["name"]): e for e in events if e["ph"] == "X"}
    arrows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    names = {"s": "dispatch", "t": "run", "f": "combine"}
    found = []
    for arrow in arrows.values():
        ends = [slices[e["pid"], e["tid"], e["ts"], names[e["ph"]]] for e in arrow]
        found.append((ends[0], ends[1:-1], ends[-1]))
    return found


def test_every_file_is_of_one_server_and_named_after_it(files: list[Path]) -> None:
    headers = [read_timeline(path).header for path in files]

    assert [(header.role, header.rank) for header in headers] == [
        ("attn", 0),
        ("mlp", 0),
        ("mlp", 1),
    ]
    assert [path.stem for path in files] == [header.server_id for header in headers]


def test_each_exchange_is_dispatched_then_run_then_combined(events: list[Event]) -> None:
    exchanges = _exchanges(events)

    assert exchanges
    for dispatch, runs, combine in exchanges:
        at = [dispatch["ts"]]
        for run in runs:
            at += [run["ts"], run["ts"] + run["dur"]]
        at.append(combine["ts"] + combine["dur"])
        assert at == sorted(at), (dispatch, runs, combine)


def test_every_dispatched_exchange_has_its_run_on_every_rank(events: list[Event]) -> None:
    dispatches = [event for event in events if event["name"] == "dispatch"]

    runs_of: defaultdict[tuple[int, float], set[int]] = defaultdict(set)
    for dispatch, runs, _ in _exchanges(events):
        runs_of[dispatch["pid"], dispatch["ts"]] |= {run["pid"] for run in runs}

    assert len(dispatches) > NUM_LAYERS * 24
    assert [runs_of[each["pid"], each["ts"]] for each in dispatches] == [{2, 3}] * len(dispatches)


def test_the_rows_of_each_exchange_are_those_of_its_runs(events: list[Event]) -> None:
    for dispatch, runs, _ in _exchanges(events):
        of_pid: defaultdict[int, int] = defaultdict(int)
        for run in runs:
            of_pid[run["pid"]] += run["args"]["rows"]
        members = [
            member
            for member in runs[0]["args"]["members"]
            if member["step"] == dispatch["args"]["step"]
            and member["micro_batch"] == dispatch["args"]["micro_batch"]
        ]
        assert [member["rows"] for member in members] == [dispatch["args"]["rows"]]
        assert all(rows >= dispatch["args"]["rows"] for rows in of_pid.values())


def test_both_kinds_of_steps_are_there_and_hold_their_layers(events: list[Event]) -> None:
    steps = [event for event in events if event["name"].startswith("step ")]
    attention = [event for event in events if event["name"] == "attention"]

    assert {step["args"]["kind"] for step in steps} == {"decode", "prefill"}
    assert {event["args"]["layer"] for event in attention} == set(range(NUM_LAYERS))
    for event in attention:
        inside = [
            step
            for step in steps
            if step["args"]["step"] == event["args"]["step"]
            and step["ts"] <= event["ts"]
            and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 0.01
        ]
        assert len(inside) == 1


@pytest.mark.parametrize("role", ["attn", "mlp"])
def test_a_file_that_cannot_be_written_is_refused_at_start(
    zygote: Zygote, qwen3: Path, tmp_path: Path, role: str
) -> None:
    place = f"{tmp_path}/missing/trace.json"
    if role == "attn":
        server = fleet.start_attn(zygote, qwen3, 9, "--afd-trace", place)
    else:
        (server,) = fleet.start_mlp(zygote, qwen3, free_ports(1), "--afd-trace", place)

    with running([server]):
        server.wait_ended()

    assert f"sglang-afd: error: --afd-trace {place} cannot be written" in server.text()
