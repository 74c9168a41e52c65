"""`python -m sglang_afd.merge_traces OUT IN...`: one trace for Perfetto from several timelines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.trace.merging import Merged, merge
from sglang_afd.trace.reading import Timeline, read_timeline


def main(argv: Sequence[str]) -> int:
    """Merge the files named in `argv`; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        _refuse_own_input(args.out, args.inputs)
        timelines = [read_timeline(path) for path in args.inputs]
        merged = merge(timelines)
        _write(args.out, merged)
    except AfdError as error:
        sys.stderr.write(f"sglang-afd: error: {error}\n")
        return 2
    sys.stdout.write(_summary(args.out, timelines, merged))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_afd.merge_traces",
        description="Merge what servers wrote with --afd-trace into one trace on one clock; open "
        "it at https://ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="Trace to write.")
    parser.add_argument(
        "inputs", metavar="IN", type=Path, nargs="+", help="A file of --afd-trace of one server."
    )
    return parser


def _refuse_own_input(out: Path, inputs: Sequence[Path]) -> None:
    if any(out.exists() and path.exists() and out.samefile(path) for path in inputs):
        raise ConfigError(f"{out} is one of the files to merge; the first argument is the output")


def _write(out: Path, merged: Merged) -> None:
    try:
        out.write_bytes(msgspec.json.encode(merged.trace))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None


def _summary(out: Path, timelines: Sequence[Timeline], merged: Merged) -> str:
    lines = [f"{out}: {len(timelines)} servers, {merged.num_exchanges} exchanges"]
    names = {timeline.header.boot_id: timeline.header.hostname for timeline in timelines}
    for host, offset in merged.offsets.items():
        if offset.num_exchanges:
            lines.append(
                f"clock of {names[host]}: {offset.offset_ns / 1e9:+.6f} s, within "
                f"{offset.round_trip_ns / 2000:.0f} us, from {offset.num_exchanges} exchanges"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
