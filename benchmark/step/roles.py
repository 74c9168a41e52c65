"""Command lines of the three kinds of child."""

from __future__ import annotations

from collections.abc import Sequence

from step.cases import PROBE_PROMPTS, Case, Setup, pool_tokens

_CPU = ("--sampling-backend", "pytorch")
# Above what any role takes beside its key-value cache, which --max-total-tokens sizes.
_MEMORY_FRACTION = "0.88"


def colocated(setup: Setup, cases: Sequence[Case], port: int) -> list[str]:
    """Stock SGLang."""
    return [*_decoding(setup, cases, 1, port), *_experts(setup), *setup.colocated_flags]


def attention(setup: Setup, cases: Sequence[Case], port: int, mlp_url: str) -> list[str]:
    """One of the attention servers."""
    return [
        *("--role", "attn", "--afd-mlp", mlp_url),
        *("--afd-num-micro-batches", setup.micro_batches, "--afd-attach-timeout", "600"),
        *_decoding(setup, cases, setup.num_attn, port),
        *setup.attn_flags,
    ]


def mlp(setup: Setup, port: int, rank: int, leader_url: str, listen: str) -> list[str]:
    """One rank of the MLP servers."""
    return [
        *("--role", "mlp", "--ep-size", str(setup.num_mlp), "--afd-ep-rank", str(rank)),
        *("--afd-listen", listen),
        *(("--afd-leader", leader_url) if rank else ()),
        *_common(setup, port),
        *_experts(setup),
        *setup.mlp_flags,
    ]


def _common(setup: Setup, port: int) -> list[str]:
    return [
        *("--model-path", setup.model_path, "--port", str(port)),
        *("--load-format", "dummy" if setup.is_dummy else "auto"),
        *("--device", setup.device),
        *("--random-seed", "1", "--log-level", "warning"),
    ]


def _experts(setup: Setup) -> list[str]:
    backend = setup.moe_runner_backend
    return ["--moe-runner-backend", backend] if backend else []


def _decoding(setup: Setup, cases: Sequence[Case], num_servers: int, port: int) -> list[str]:
    batches = sorted({case.batch // num_servers for case in cases})
    tokens = pool_tokens(cases, setup.steps_of_case, num_servers)
    flags = [
        *_common(setup, port),
        *("--attention-backend", setup.attention_backend, *_CPU),
        *("--max-total-tokens", str(tokens)),
        *("--max-running-requests", str(max(*batches, PROBE_PROMPTS) + 1)),
        *("--mem-fraction-static", _MEMORY_FRACTION),
        "--disable-radix-cache",
    ]
    if setup.device != "cpu":
        flags += ["--cuda-graph-bs-decode", *map(str, batches)]
        flags += ["--cuda-graph-backend-prefill", "disabled"]
    return flags
