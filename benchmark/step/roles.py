"""Command lines of the three kinds of child."""

from __future__ import annotations

from collections.abc import Sequence

from step.cases import Case, Setup, Variant, cases_of, pool_tokens, probe_sizes

# Above what any role takes beside its key-value cache, which --max-total-tokens sizes.
_MEMORY_FRACTION = "0.88"


def colocated(variants: Sequence[Variant], port: int) -> list[str]:
    """Stock SGLang, for the cases of all variants."""
    setup, cases = variants[0].setup, cases_of(variants)
    steps = max(variant.setup.steps_of_case for variant in variants)
    probed = probe_sizes(variants)
    batches = sorted({*(case.batch for case in cases), *probed})
    tokens = pool_tokens(cases, steps, 1, probed[-1])
    return [
        *_common(setup, port),
        *_decoding(setup, batches, tokens),
        *_experts(setup),
        *setup.colocated_flags,
    ]


def attention(variant: Variant, port: int, mlp_url: str) -> list[str]:
    """One of the attention servers."""
    setup, cases = variant.setup, variant.cases
    batches = sorted({case.batch // setup.num_attn for case in cases})
    tokens = pool_tokens(cases, setup.steps_of_case, setup.num_attn, variant.probe_rows)
    return [
        *("--role", "attn", "--afd-mlp", mlp_url, "--afd-wait-policy", setup.wait_policy),
        *("--afd-max-mlp-ranks", str(setup.num_mlp)),
        *("--afd-num-micro-batches", setup.micro_batches, "--afd-attach-timeout", "600"),
        *("--afd-dispatch-dtype", setup.dispatch_dtype),
        *_common(setup, port),
        *_decoding(setup, batches, tokens),
        *setup.attn_flags,
    ]


def mlp(variant: Variant, port: int, *, rank: int, leader_url: str, listen: str) -> list[str]:
    """One rank of the MLP servers."""
    setup = variant.setup
    return [
        *("--role", "mlp", "--ep-size", str(setup.num_mlp), "--afd-ep-rank", str(rank)),
        *("--afd-listen", listen, "--afd-wait-policy", setup.wait_policy),
        *("--afd-dispatch-dtype", setup.dispatch_dtype),
        *(("--afd-leader", leader_url) if rank else ()),
        *_common(setup, port),
        *_experts(setup),
        *_unit_graphs(setup, variant.cases),
        *setup.mlp_flags,
    ]


def _common(setup: Setup, port: int) -> list[str]:
    return [
        *("--model-path", setup.model_path, "--port", str(port)),
        *("--load-format", "dummy" if setup.is_dummy else "auto"),
        *("--device", setup.device, *(("--dtype", setup.dtype) if setup.dtype else ())),
        *("--random-seed", "1", "--log-level", "warning"),
    ]


def _experts(setup: Setup) -> list[str]:
    backend = setup.moe_runner_backend
    return ["--moe-runner-backend", backend] if backend else []


def _unit_graphs(setup: Setup, cases: Sequence[Case]) -> list[str]:
    if setup.device == "cpu":
        return []
    rows = unit_rows(setup, cases)
    listed = ",".join(map(str, rows))
    return ["--afd-mlp-cuda-graph-bs", listed, "--afd-mlp-cuda-graph-max-bs", str(rows[-1])]


def unit_rows(setup: Setup, cases: Sequence[Case]) -> list[int]:
    """Rows of the units that can come: a whole step or a micro-batch, of one or more servers."""
    cuts = {1} if setup.micro_batches == "1" else {1, 2}
    cuts |= {int(setup.micro_batches)} if setup.micro_batches.isdigit() else set()
    return sorted(
        {
            -(-case.batch // setup.num_attn // cut) * members
            for case in cases
            for cut in cuts
            for members in range(1, setup.num_attn + 1)
        }
    )


def _decoding(setup: Setup, batches: Sequence[int], tokens: int) -> list[str]:
    flags = [
        *("--attention-backend", setup.attention_backend),
        *("--sampling-backend", "pytorch"),
        *("--max-total-tokens", str(tokens)),
        *("--max-running-requests", str(batches[-1] + 1)),
        *("--mem-fraction-static", _MEMORY_FRACTION),
        "--disable-radix-cache",
    ]
    if setup.device != "cpu":
        flags += ["--cuda-graph-bs-decode", *map(str, batches)]
        flags += ["--cuda-graph-backend-prefill", "disabled"]
    return flags
