"""What a router costs: this project's, sglang-router and smg in turn before one fake server.

Every block measures each case directly and through each router (A B C D A B C D ...), so that a
slow minute of the machine hits all. The load generator is an ordinary client without TCP_QUICKACK.
Prints one JSON line; exit code 1 when a token was lost or a request failed, which "failures" names.

ttft_added_ms       by router: time to the first token over that without a router, median, the worse
                    of 1 and 32 streams of 20 ms/token; added_p50_ms and added_p99_ms in "cases"
                    have each
cpu_us_per_chunk    by router: user and system time of its process tree for each streamed token, 256
                    streams of 20 ms/token
cpu_us_per_request  by router: the same for each short request, 32 connections
first_p99_ms        by router: 99th percentile of the time to the first token at 256 streams

    python benchmark/bench_router.py [--quick] [--others-python PYTHON] [--router-flags "..."]

The others are looked for in PYTHON, a virtual environment of their own made with
`pip install sglang-router==0.3.2 smg==1.13.0`; without the flag in this Python and on PATH. One
that is missing is named under "missing".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # where sglang_afd is not installed

import provenance  # noqa: E402
import uvloop  # noqa: E402
from router import processes  # noqa: E402
from router.load import Request, Result, load, short, streamed  # noqa: E402
from router.processes import DIRECT, OTHERS, OURS, Target  # noqa: E402
from router.summary import Series, added_ms  # noqa: E402

import sglang_afd  # noqa: E402

PACE_US = 20_000
CLIENT_LIMIT_CORES = 0.9  # above, the client's own speed may be what was measured


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of load."""

    name: str
    request: Request
    connections: int
    ramp_s: float  # no shorter than a stream, so that starts stay spread in the window
    window_s: float


def cases(*, is_quick: bool) -> list[Case]:
    """The cases of a block."""
    num_tokens = 32 if is_quick else 64
    paced_s = PACE_US / 1e6
    return [
        Case(
            name="streams_1",
            request=streamed(4, PACE_US),
            connections=1,
            ramp_s=0.1,
            window_s=1.0 if is_quick else 2.5,
        ),
        Case(
            name="streams_32",
            request=streamed(16, PACE_US),
            connections=32,
            ramp_s=16 * paced_s,
            window_s=0.7 if is_quick else 2.0,
        ),
        Case(
            name="streams_256",
            request=streamed(num_tokens, PACE_US),
            connections=256,
            ramp_s=num_tokens * paced_s,
            window_s=1.3 if is_quick else 4.0,
        ),
        Case(
            name="short_32",
            request=short(),
            connections=32,
            ramp_s=0.1,
            window_s=0.6 if is_quick else 2.0,
        ),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute, for a first look")
    parser.add_argument("--blocks", type=int, default=0, help="turns of all; default 5, quick 2")
    parser.add_argument("--others-python", default="", metavar="PYTHON")
    parser.add_argument("--only", default="", help="routers to measure, by name, with commas")
    parser.add_argument("--router-flags", default="", help=f"more flags for {OURS}")
    parser.add_argument("--server-flags", default="", help="flags for the fake server")
    options = parser.parse_args(argv)
    options.blocks = options.blocks or (2 if options.quick else 5)
    others = processes.installed(options.others_python)
    wanted = options.only.split(",") if options.only else [OURS, *OTHERS]
    with _targets(wanted, others, options) as targets:
        table = _measure(targets, cases(is_quick=options.quick), options.blocks)
    line = _report(table, targets, [name for name in OTHERS if name not in others], options)
    print(json.dumps(line))
    return 1 if line["failures"] else 0


@contextlib.contextmanager
def _targets(
    wanted: Sequence[str], others: dict[str, tuple[str, list[str]]], options: argparse.Namespace
) -> Iterator[list[Target]]:
    commands = {
        OURS: (sglang_afd.__version__, processes.ours(shlex.split(options.router_flags))),
        **others,
    }
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        server = stack.enter_context(processes.fake_server(*shlex.split(options.server_flags)))
        routers = [
            stack.enter_context(processes.running(name, *commands[name], server, Path(logs) / name))
            for name in wanted
            if name in commands
        ]
        yield [server, *routers]


Table = dict[str, dict[str, Series]]  # by case, then by target


def _measure(targets: Sequence[Target], every: Sequence[Case], blocks: int) -> Table:
    table: Table = {case.name: {t.name: Series() for t in targets} for case in every}
    for target in targets:
        _run(target, targets[0], every[-1], window_s=0.3)  # opens connections, warms caches
    for block in range(blocks):
        for case in every:
            for target in targets if block % 2 == 0 else targets[::-1]:
                table[case.name][target.name].add(*_run(target, targets[0], case))
    return table


def _run(
    target: Target, server: Target, case: Case, window_s: float = 0.0
) -> tuple[Result, float, float]:
    cpu_s: list[tuple[float, float]] = []
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        result = loop.run_until_complete(
            load(
                target.port,
                case.request,
                connections=case.connections,
                ramp_s=case.ramp_s,
                window_s=window_s or case.window_s,
                on_window=lambda _is_start: cpu_s.append((target.cpu_s(), server.cpu_s())),
            )
        )
    (target_start_s, server_start_s), (target_end_s, server_end_s) = cpu_s
    return result, target_end_s - target_start_s, server_end_s - server_start_s


def _report(
    table: Table, targets: Sequence[Target], missing: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    names = [target.name for target in targets if target.name != DIRECT]
    paced = ("streams_1", "streams_32")
    told = {
        case: {
            name: series.describe(None if name == DIRECT else row[DIRECT])
            for name, series in row.items()
        }
        for case, row in table.items()
    }
    return {
        "benchmark": "bench_router",
        "ttft_added_ms": {
            name: max(added_ms(table[case][name], table[case][DIRECT], 0.5) for case in paced)
            for name in names
        },
        "cpu_us_per_chunk": {
            name: round(table["streams_256"][name].cpu_us("num_chunks"), 1) for name in names
        },
        "cpu_us_per_request": {
            name: round(table["short_32"][name].cpu_us("num_requests"), 1) for name in names
        },
        "first_p99_ms": {name: cell["first_p99_ms"] for name, cell in told["streams_256"].items()},
        "tokens_lost": sum(cell["lost"] for row in told.values() for cell in row.values()),
        "client_is_the_limit": [
            f"{case} of {name}"
            for case, row in told.items()
            for name, cell in row.items()
            if cell["client_cores"] > CLIENT_LIMIT_CORES
        ],
        "failures": _failures(table),
        "missing": list(missing),
        "cases": told,
        "quick": options.quick,
        "blocks": options.blocks,
        "router_flags": options.router_flags,
        "date": time.strftime("%Y-%m-%d"),
        "cpu": provenance.cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": {t.name: t.version for t in targets if t.version}
        | {"python": sys.version.split()[0], "uvloop": uvloop.__version__},
        "commit": provenance.commit(),
    }


def _failures(table: Table) -> list[str]:
    return [
        f"{case} of {name}: {what}"
        for case, row in table.items()
        for name, series in row.items()
        for result in series.results
        for what in (
            *result.failures,
            *([f"{result.num_lost} tokens were lost"] if result.num_lost else ()),
        )
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
