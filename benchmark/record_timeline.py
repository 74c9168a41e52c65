"""Records a timeline of real servers with planted delays: what the picture in docs/ is made of.

    python benchmark/record_timeline.py trace.json [--attn 1] [--micro-batches 2] [--delay-ms 20]
    python benchmark/plot_trace.py trace.json docs/pictures/timeline.png

Servers, transport and protocol are real; attention and experts of a tiny model sleep a little for
each row, so that the picture does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from overlap.counts import Load
from overlap.fleet import Launcher
from overlap.measure import measure

from sglang_afd import merge_traces

NUM_LAYERS = 8
BATCH = 8  # requests of each attention server
NUM_TOKENS = 6


def main(argv: Sequence[str]) -> int:
    """Record, merge; returns the exit code."""
    args = build_parser().parse_args(argv)
    load = Load(
        num_layers=NUM_LAYERS,
        batch=BATCH,
        num_tokens=args.tokens,
        micro_batches=args.micro_batches,
        attn_row_ms=args.delay_ms / BATCH,
        expert_row_ms=args.delay_ms * args.ratio / BATCH,
    )
    with Launcher(NUM_LAYERS) as launcher:
        directory = launcher.directory / "timelines"
        directory.mkdir()
        flags = ("--afd-trace", f"{directory}/")
        numbers = [args.micro_batches] * args.attn
        with launcher.group(numbers, num_mlp=args.mlp, flags=flags) as group:
            found = measure(group, group.attn, load)
        for fault in found.faults:
            print(f"record_timeline: {fault}", file=sys.stderr)
        files = sorted(map(str, directory.glob("*.json")))
        if args.files:
            shutil.copytree(directory, args.files, dirs_exist_ok=True)
        return merge_traces.main([str(args.out), *files]) or bool(found.faults)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="TRACE", type=Path, help="Trace to write.")
    parser.add_argument("--files", type=Path, help="Keep each server's own file here, too.")
    parser.add_argument("--attn", type=int, default=1, help="Attention servers.")
    parser.add_argument("--mlp", type=int, default=1, help="MLP ranks.")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="Of each request.")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="Attention of a whole batch.")
    parser.add_argument("--ratio", type=float, default=1.0, help="Expert over attention delay.")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
