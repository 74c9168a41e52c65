"""What an exchange costs beside the experts: dispatch and combine of each layer, against copies.

Two processes on one GPU. The attention process runs a CUDA graph of 48 x (dispatch, wait), the
MLP process one of 48 x (plan, pull, push) that is enqueued ahead of the rows and gives them back as
they came; what came back is checked. Under MPS, which is started if there is none.

Prints one JSON line for each case, times in microseconds for one layer, medians over steps:

exchange_us         rows to the MLP process and their sum back
copy_us             the same bytes there and back, by two plain copies in a graph
flag_round_trip_us  an exchange of one row: the kernels and flags without the bytes
ratio               (exchange_us - flag_round_trip_us) / copy_us
one_way_us, back_us by the GPU's clock, from before the dispatch until the rows lie in the MLP
                    process, and from there until the sum is here; with kernels in between that read
                    the clock, so that both together are more than exchange_us

Cold in L2: hidden states to send, and the sources of the copies, are read from buffers that are
used in turn, 128 MiB apart from their next use. Slots, staging buffers and what copies write to are
the same each time, for exchange and copy alike, as they are in a server.

    python benchmark/bench_exchange.py [--out docs/results/bench_exchange_h200.jsonl] [--quick]

Whoever calls this has no CUDA: both processes end before MPS does, which would take them along.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import provenance

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # where sglang_afd is not installed

LIMIT_S = 300.0  # for all cases
MOST_LAYERS = 64  # units that an MLP rank's host describes ahead
DTYPES = ("bf16", "fp8")
QUICK = {"hidden": [2048], "rows": [512], "steps": 5}


def main(argv: Sequence[str]) -> int:
    """Start what measures, or be one side of it."""
    options = _parse(argv)
    if options.side == "mlp":
        from exchange import mlp_side

        return mlp_side.main(options.channel, options.layers)
    if options.side == "attn":
        return _run(options)

    from sglang_afd.fleet.mps import private_mps

    if not _has_gpu():
        print("bench_exchange needs a CUDA device, and this machine has none", file=sys.stderr)
        return 2
    with private_mps() as mps:
        if mps.environment is None:
            print(f"without MPS, which makes every flag slow: {mps.reason}", file=sys.stderr)
        more = [] if mps.environment is None else ["--has-mps"]
        code = _run_both([*argv, "--side", "attn", *more], os.environ | (mps.environment or {}))
    for problem in mps.problems:
        print(problem, file=sys.stderr)
    return code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="", help="also write the lines to this file")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each case")
    parser.add_argument("--layers", type=int, default=48, help="exchanges of a step")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096], help="hidden sizes")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[128, 256, 512, 1024], help="of an exchange"
    )
    parser.add_argument("--quick", action="store_true", help="one size and few steps")
    parser.add_argument("--side", choices=["attn", "mlp"], help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--has-mps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not 1 <= options.layers <= MOST_LAYERS:
        parser.error(f"--layers {options.layers}; 1 to {MOST_LAYERS} can be described ahead")
    vars(options).update(QUICK if options.quick else {})
    return options


def _has_gpu() -> bool:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU " in listed.stdout


def _run_both(argv: Sequence[str], environment: dict[str, str]) -> int:
    """The attention side, which starts the other; nothing of either is left."""
    command = [sys.executable, __file__, *argv]
    attn = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return attn.wait(LIMIT_S + 60)
    except subprocess.TimeoutExpired:
        print(f"not done within {LIMIT_S + 60:g} s", file=sys.stderr)
        return 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(attn.pid, signal.SIGKILL)
        attn.wait()


def _run(options: argparse.Namespace) -> int:
    import torch
    from exchange.channel import Channel

    from sglang_afd.errors import PeerLost

    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "--side", "mlp", "--channel", str(theirs.fileno())]
    command += ["--layers", str(options.layers)]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    about = {
        "num_layers": options.layers,
        "has_mps": options.has_mps,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "commit": provenance.commit(),
    }
    channel = Channel(ours)
    is_over = threading.Event()
    threading.Thread(target=_end_together, args=(child, is_over), daemon=True).start()
    if options.out:
        Path(options.out).write_text("")
    try:
        for line in _measure(channel, options):
            text = json.dumps(line | about)
            print(text, flush=True)
            if options.out:  # at once, since a later case may fail
                with Path(options.out).open("a") as file:
                    file.write(f"{text}\n")
        channel.say({"do": "stop"})
        return child.wait(60)
    except PeerLost:
        with suppress(subprocess.TimeoutExpired):
            child.wait(10)  # it says why it ends
        raise
    finally:
        is_over.set()  # first, so that what went wrong is told
        child.kill()
        child.wait()


def _end_together(child: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Nothing else would wake a GPU, and a host that waits for it, whose other side is gone."""
    deadline_s, parent = time.monotonic() + LIMIT_S, os.getppid()
    while not is_over.wait(0.5):
        if child.poll() is not None:
            is_over.wait(5.0)  # whoever hears of it from the channel says more
        if child.poll() is not None or time.monotonic() > deadline_s or os.getppid() != parent:
            if is_over.is_set():
                return
            print(f"the MLP process ended with {child.poll()}, or takes too long", file=sys.stderr)
            child.kill()
            os._exit(1)


def _measure(channel: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from exchange.attn_side import AttnSide, Case

    from sglang_afd.transport.cuda_ipc.layout import WaitPolicy

    side = AttnSide(channel, options.layers, options.steps)
    for policy in WaitPolicy:
        for hidden_size in options.hidden:
            for dtype in DTYPES:
                cases = [
                    Case(hidden_size=hidden_size, rows=rows, dtype=dtype, policy=policy)
                    for rows in (1, *options.rows)
                ]
                side.open(cases[0].shape, policy)
                flag = side.exchange(cases[0])
                for case in cases[1:]:
                    exchange, one_ways = side.exchange(case), side.one_ways(case)
                    copy = side.copy(case)
                    yield {
                        "case": f"{hidden_size}x{case.rows}-{dtype}-{policy.value}",
                        "hidden_size": hidden_size,
                        "rows": case.rows,
                        "dtype": dtype,
                        "policy": policy.value,
                        "exchange_us": round(exchange.median, 2),
                        "exchange_us_10_90": [round(exchange.low, 2), round(exchange.high, 2)],
                        "copy_us": round(copy.median, 2),
                        "copy_us_10_90": [round(copy.low, 2), round(copy.high, 2)],
                        "flag_round_trip_us": round(flag.median, 2),
                        "ratio": round((exchange.median - flag.median) / copy.median, 3),
                        "one_way_us": round(one_ways[0], 2),
                        "back_us": round(one_ways[1], 2),
                        "bytes_there": case.bytes_there,
                        "bytes_back": case.bytes_back,
                    }
                side.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
