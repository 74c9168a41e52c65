"""What splitting costs on a CPU: decode tokens/s, colocated and split, on the same cores.

Starts stock SGLang and one attention plus one MLP server, each with one and with two threads,
leaves them idle, and measures them in turn, block after block (A B A B ...), so that a slow minute
of the machine hits all. Prints one JSON line: the ratio of the medians, each side at its best
number of threads, whether all outputs were identical, where a layer's time goes, and every raw run.

    python benchmark/bench_cpu_overhead.py [--model-path P] [--blocks 5] [--tokens 24]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where sglang_afd is not installed

# NOTE: must precede every import of SGLang; spawned children import this module first, too.
import sglang_afd.upstream.cpu_shim  # noqa: F401  # isort: skip

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import provenance

from sglang_afd.ports import free_ports

PROMPTS = [
    f"Tell me about the number {number}, and about what people did with it in the past."
    for number in range(16)
]
BATCHES = (1, 16)
START_TIMEOUT_S = 240.0
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.8", "--max-total-tokens", "8192", "--max-running-requests", "16"),
    "--sleep-on-idle",
)


@dataclass
class Deployment:
    """One way to serve the model, and what was measured of it."""

    name: str  # "colocated" or "afd"
    threads: int
    url: str
    mlp_url: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=lambda: {batch: [] for batch in BATCHES})
    outputs: dict[int, list[list[int]]] = field(default_factory=dict)
    layer_us: dict[int, dict[str, float]] = field(default_factory=dict)

    def best(self, batch: int) -> float:
        """Median tokens/s."""
        return statistics.median(self.rates[batch])


def main(argv: Sequence[str]) -> int:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="", help="Default: the embedded model.")
    parser.add_argument("--blocks", type=int, default=5, help="Turns of all deployments.")
    parser.add_argument("--tokens", type=int, default=24, help="Tokens of each request.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args(argv)
    model = args.model_path or _embedded_model()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        deployments = [
            stack.enter_context(_running(name, threads, model, args.dtype, Path(logs)))
            for threads in args.threads
            for name in ("colocated", "afd")
        ]
        for deployment in deployments:
            _wait_ready(deployment)
            _decode(deployment, 16, 4)  # warm-up, and fills the prefix cache
        for block in range(args.blocks):
            order = deployments if block % 2 == 0 else deployments[::-1]
            for deployment in order:
                for batch in BATCHES:
                    _measure(deployment, batch, args.tokens)
    print(json.dumps(_report(deployments, args)))
    return 0


def _report(deployments: list[Deployment], args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {
        "benchmark": "bench_cpu_overhead",
        "date": time.strftime("%Y-%m-%d"),
        "commit": provenance.commit(),
        "cpu": provenance.cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "model": Path(args.model_path).name if args.model_path else "embedded",
        "tokens": args.tokens,
        "blocks": args.blocks,
    }
    for batch in BATCHES:
        best = {
            name: max((d for d in deployments if d.name == name), key=lambda d: d.best(batch))
            for name in ("colocated", "afd")
        }
        report[f"ratio_bs{batch}"] = round(
            best["afd"].best(batch) / best["colocated"].best(batch), 3
        )
        report[f"best_threads_bs{batch}"] = {name: d.threads for name, d in best.items()}
        report[f"afd_layer_us_bs{batch}"] = best["afd"].layer_us[batch]
    first = deployments[0]
    is_steady = all([-1] not in outputs for d in deployments for outputs in d.outputs.values())
    report["identical"] = is_steady and all(d.outputs == first.outputs for d in deployments)
    report["tokens_per_s"] = {
        f"{d.name}, {d.threads} thread(s)": {
            f"bs{batch}": [round(rate, 2) for rate in rates] for batch, rates in d.rates.items()
        }
        for d in deployments
    }
    return report


def _measure(deployment: Deployment, batch: int, tokens: int) -> None:
    before = _mlp_counters(deployment)
    rate, outputs = _decode(deployment, batch, tokens)
    deployment.rates[batch].append(rate)
    known = deployment.outputs.setdefault(batch, outputs)
    if known != outputs:
        deployment.outputs[batch] = [[-1]]  # differs from itself
    if deployment.mlp_url:
        after = _mlp_counters(deployment)
        runs = after["expert_runs_total"] - before["expert_runs_total"]
        deployment.layer_us[batch] = {
            name: round((after[key] - before[key]) / runs * 1e6, 1)
            for name, key in (
                ("expert_run", "expert_run_seconds_total"),
                ("reply", "reply_seconds_total"),
                ("mlp_waits", "wait_seconds_total"),
            )
        }


def _decode(deployment: Deployment, batch: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens/s from the moment when every request has its first token; and the tokens."""
    body = {
        "text": PROMPTS[:batch],
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        deployment.url + "/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    outputs: list[list[int]] = [[] for _ in range(batch)]
    started_s = counted = 0.0
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            outputs[event.get("index", 0)] = event["output_ids"]
            if not started_s and all(outputs):
                started_s, counted = time.monotonic(), sum(map(len, outputs))
    elapsed_s = time.monotonic() - started_s
    return (sum(map(len, outputs)) - counted) / elapsed_s, outputs


def _mlp_counters(deployment: Deployment) -> dict[str, float]:
    if not deployment.mlp_url:
        return {}
    with urllib.request.urlopen(deployment.mlp_url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    prefix = "sglang_afd_mlp_"
    return {
        name.split("{")[0].removeprefix(prefix): float(value)
        for name, value in values
        if "expert=" not in name
    }


@contextlib.contextmanager
def _running(name: str, threads: int, model: str, dtype: str, logs: Path) -> Iterator[Deployment]:
    port, mlp_port = free_ports(2)
    common = ("--model-path", model, "--dtype", dtype)
    deployment = Deployment(name=name, threads=threads, url=f"http://127.0.0.1:{port}")
    if name == "colocated":
        commands = [[str(Path(__file__)), "--serve-stock", *common, *FLAGS, "--port", str(port)]]
    else:
        deployment.mlp_url = f"http://127.0.0.1:{mlp_port}"
        server = ("-m", "sglang_afd.launch_server", *common)
        commands = [
            [*server, "--role", "mlp", "--port", str(mlp_port)],
            [
                *(*server, "--role", "attn", *FLAGS, "--port", str(port)),
                *("--afd-mlp", deployment.mlp_url),
            ],
        ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    try:
        for index, command in enumerate(commands):
            deployment.logs.append(logs / f"{name}-{threads}-{index}.log")
            with deployment.logs[-1].open("wb") as log:
                deployment.processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,
                    )
                )
        yield deployment
    finally:
        for process in deployment.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(deployment: Deployment) -> None:
    path = "/health" if deployment.name == "colocated" else "/afd/v1/status"
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if any(process.poll() is not None for process in deployment.processes):
            break
        try:
            with urllib.request.urlopen(deployment.url + path, timeout=5) as response:
                text = response.read()
            if deployment.name == "colocated" or json.loads(text)["state"] == "ready":
                return
        except OSError:
            pass
        time.sleep(0.5)
    tails = [log.read_text(errors="replace")[-2000:] for log in deployment.logs]
    raise SystemExit("\n".join([f"{deployment.name} did not start", *tails]))


def _embedded_model() -> str:
    from sglang_afd.demo import ensure_embedded_model

    return str(ensure_embedded_model())


def _serve_stock(argv: Sequence[str]) -> int:
    """Stock SGLang in this process, which has the CPU shim and none of our hooks."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(list(argv)))
    return 0


if __name__ == "__main__":
    if "--serve-stock" in sys.argv:
        sys.exit(_serve_stock([item for item in sys.argv[1:] if item != "--serve-stock"]))
    sys.exit(main(sys.argv[1:]))
