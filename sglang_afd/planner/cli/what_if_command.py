"""`what-if`: the verdict under other assumptions, one at a time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner import cases, checks
from sglang_afd.planner.cases import Case, Outcome
from sglang_afd.planner.cli import as_json, text
from sglang_afd.planner.cli.inputs import (
    Inputs,
    add_input_arguments,
    add_jitter_argument,
    read_gpu,
    read_inputs,
)
from sglang_afd.planner.cli.search_flags import add_search_arguments, read_space
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.site import Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags."""
    add_input_arguments(parser)
    add_jitter_argument(parser)
    add_search_arguments(parser)
    group = parser.add_argument_group(
        "What if (without any of these: other kernels, contexts of twice and four times, "
        "speculation 4:2.5, free experts)"
    )
    add = group.add_argument
    add("--contexts", metavar="TOKENS,...", help="other mean contexts.")
    add(
        "--speculation",
        metavar="N:X,...",
        help="N tokens verified in a step, X of them kept on average, as in 4:2.5.",
    )
    add(
        "--sram-experts",
        action="store_true",
        help="experts in SRAM accelerators that take no time and are not counted: an upper bound.",
    )
    add("--gpus", metavar="NAME,...", help="everything on another GPU type; names as in --gpu.")
    add("--attn-gpu", metavar="NAME", help="with --mlp-gpu: a GPU type for each role.")
    add("--mlp-gpu", metavar="NAME", help="with --attn-gpu: a GPU type for each role.")
    add(
        "--prices",
        metavar="NAME=P,...",
        help="price of an hour of each GPU type; throughput is then compared per cost.",
    )
    add("--other-kernels", action="store_true", help="the kind that --kernels does not name.")
    add("--json", action="store_true", help="print JSON.")


def run(args: argparse.Namespace) -> int:
    """Print one row a case."""
    inputs = read_inputs(args)
    prices = _prices(args.prices)
    rows = cases.outcomes(inputs.fitted, read_cases(args, inputs, prices))
    if args.json:
        as_json.write_json(
            {"inputs": as_json.inputs_json(inputs), "cases": [_row_json(row) for row in rows]}
        )
        return 0
    report = [*text.inputs_lines(inputs), "", *_table(rows, bool(prices))]
    sys.stdout.write("\n".join(report) + "\n")
    return 0


def read_cases(args: argparse.Namespace, inputs: Inputs, prices: Mapping[str, float]) -> list[Case]:
    """The question as it is, then each case that the flags name.

    Raises: ConfigError.
    """
    price = _price(prices, inputs.scenario.gpu)
    site = Site(scenario=inputs.scenario, attn_price=price, mlp_price=price)
    base = Case(
        name="as given",
        site=site,
        base_sites=(site,),
        space=read_space(args, inputs.scenario),
        model_noise=inputs.model_noise,
    )
    chosen = [base]
    if args.other_kernels:
        chosen.append(cases.kernels_case(base))
    chosen += [
        cases.context_case(base, _number("--contexts", item)) for item in _items(args.contexts)
    ]
    for item in _items(args.speculation):
        chosen.append(cases.speculation_case(base, *_speculation(item)))
    if args.sram_experts:
        chosen.append(cases.free_experts_case(base))
    chosen += _on_other_gpus(args, inputs, base, prices)
    return chosen if len(chosen) > 1 else _usual(base)


def _usual(base: Case) -> list[Case]:
    context = base.site.scenario.workload.context_tokens
    return [
        base,
        cases.kernels_case(base),
        cases.context_case(base, 2 * context),
        cases.context_case(base, 4 * context),
        cases.speculation_case(base, 4, 2.5),
        cases.free_experts_case(base),
    ]


def _on_other_gpus(
    args: argparse.Namespace, inputs: Inputs, base: Case, prices: Mapping[str, float]
) -> list[Case]:
    shape = inputs.scenario.shape
    chosen = []
    for item in _items(args.gpus):
        gpu = read_gpu(item)
        noise = inputs.source.model_noise(shape, gpu)
        chosen.append(cases.gpu_case(base, gpu, _price(prices, gpu), noise))
    if (args.attn_gpu is None) != (args.mlp_gpu is None):
        raise ConfigError("--attn-gpu and --mlp-gpu: give both, or none")
    if args.attn_gpu is not None:
        attn, mlp = read_gpu(args.attn_gpu), read_gpu(args.mlp_gpu)
        noise = max(inputs.source.model_noise(shape, gpu) for gpu in (attn, mlp))
        chosen.append(
            cases.two_types_case(
                base, (attn, _price(prices, attn)), (mlp, _price(prices, mlp)), noise
            )
        )
    return chosen


def _prices(argument: str | None) -> dict[str, float]:
    prices = {}
    for item in _items(argument):
        name, equals, price = item.partition("=")
        if not equals:
            raise ConfigError(f"--prices {item}: wanted NAME=PRICE, as in H200=3.5")
        value = _number("--prices", price)
        hint = "Wanted: the price of an hour, in one currency for all."
        checks.between("--prices", name, value, 1e-6, 1e6, hint)
        prices[read_gpu(name).name] = value
    return prices


def _price(prices: Mapping[str, float], gpu: Gpu) -> float:
    if not prices:
        return 1.0
    if gpu.name not in prices:
        raise ConfigError(f"--prices: has no price of {gpu.name}; give {gpu.name}=PRICE, too")
    return prices[gpu.name]


def _speculation(item: str) -> tuple[int, float]:
    verify, colon, accept = item.partition(":")
    if not colon or not verify.isdecimal():
        raise ConfigError(f"--speculation {item}: wanted N:X, as in 4:2.5")
    return int(verify), _number("--speculation", accept)


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []


def _number(flag: str, item: str) -> float:
    try:
        return float(item)
    except ValueError as error:
        raise ConfigError(f"{flag}: {item!r} is not a number") from error


def _table(rows: list[Outcome], has_prices: bool) -> list[str]:
    unit = "tokens/s/price" if has_prices else "tokens/s/GPU"
    head = ["what if", "disaggregated", "batch", "ms/token", unit, "colocated", unit, "speed-up"]
    lines = text.table([*head, "in 9 of 10", ""], [_cells(row) for row in rows])
    lines += [f"  {row.case.name}: {row.reason}" for row in rows if row.reason]
    if any(row.case.site.has_free_experts for row in rows):
        lines += ["", *text.wrapped("experts in SRAM", "a bound: they cost no time and no GPU")]
    return lines


def _cells(row: Outcome) -> list[object]:
    if row.answered is None:
        return [row.case.name, *["-"] * 8, "impossible"]
    found, verdict = row.answered.found, row.answered.verdict
    other, base = found.disaggregated.best, found.colocated.best
    label = "-" if other is None else other.deployment.label
    if row.case.site.has_free_experts and other is not None:
        label = f"{other.deployment.attn_gpus}A m{other.deployment.micro_batches}"
    return [
        row.case.name,
        label,
        "-" if other is None else other.deployment.batch_per_attn_gpu,
        "-" if other is None else f"{other.tpot_us / 1000:.1f}",
        "-" if other is None else f"{row.value:.0f}",
        "-" if base is None else f"EP{base.deployment.expert_parallel}",
        "-" if base is None else f"{row.base_value:.0f}",
        "-" if verdict is None else f"{verdict.speed_up:.2f}",
        "-" if verdict is None else f"{verdict.low:.2f}-{verdict.high:.2f}",
        row.answered.answer.value,
    ]


def _row_json(row: Outcome) -> dict[str, Any]:
    answered = row.answered
    if answered is None:
        return {"name": row.case.name, "answer": "impossible", "reason": row.reason}
    other, base = answered.found.disaggregated.best, answered.found.colocated.best
    verdict = answered.verdict
    return {
        "name": row.case.name,
        "answer": answered.answer.value,
        "verdict": None if verdict is None else as_json.verdict_json(verdict),
        "disaggregated": None if other is None else as_json.prediction_json(other),
        "colocated": None if base is None else as_json.prediction_json(base),
        "disaggregated_per_cost": row.value,
        "colocated_per_cost": row.base_value,
    }
