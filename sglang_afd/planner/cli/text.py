"""Predictions, speed-ups and verdicts as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from sglang_afd.planner.causes import describe_binding, factors, kernels_note
from sglang_afd.planner.cli.inputs import Inputs
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.gpu import GIB
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.search import MICRO_BATCHES
from sglang_afd.planner.speedup import SpeedUp
from sglang_afd.planner.verdict import Answer, Verdict

WIDTH = 100
_NAME = 26


def inputs_lines(inputs: Inputs) -> list[str]:
    """What was read, and from where."""
    first, *rest = inputs_sentences(inputs)
    lines = [first]
    for sentence in rest:
        name, _, words = sentence.partition(": ")
        lines += wrapped(name, words)
    return lines


def inputs_sentences(inputs: Inputs) -> list[str]:
    """The same, one thing a line, however long."""
    scenario, workload = inputs.scenario, inputs.scenario.workload
    context = f"{workload.context_tokens:.0f} tokens of context"
    if workload.context_std_tokens:
        context += f" (deviation {workload.context_std_tokens:.0f})"
    if workload.verify_tokens > 1:
        context += (
            f", {workload.verify_tokens} tokens verified and {workload.accepted_tokens:g} "
            "accepted a step"
        )
    if workload.max_tpot_us is not None:
        context += f", at most {workload.max_tpot_us / 1000:g} ms a token"
    sentences = [f"{scenario.shape.name} on {scenario.gpu.name}, {context}"]
    sentences.append(f"constants: {inputs.source.label}")
    if scenario.colocated_piece_tokens is not None:
        sentences.append(
            f"note: the colocated system runs {scenario.colocated_piece_tokens} tokens of a GPU "
            "through its experts at once"
        )
    if scenario.jitter:
        jitter = f"jitter: {scenario.jitter:.1%} of the attention of a layer"
        if not scenario.knows_jitter_of(MICRO_BATCHES[-1]):
            jitter += "; 3 and 4 micro-batches are not known with so much, and left out"
        sentences.append(jitter)
    if inputs.model_noise and inputs.source.kind != "roofline":
        sentences.append("note: they are of another model or GPU: 5 % more uncertainty")
    return [*sentences, *(f"note: {note}" for note in inputs.source.notes)]


def wrapped(name: str, text: str) -> list[str]:
    """A name in a column of its own, and text beside it."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {name:<{_NAME - 2}}",
        subsequent_indent=" " * _NAME,
        break_on_hyphens=False,
    ) or [f"  {name}"]


def prediction_lines(prediction: Prediction, error: float | None = None) -> list[str]:
    """Of one deployment; error is the relative standard deviation of the step."""
    deployment, stages = prediction.deployment, prediction.stages
    about = f" +- {error:.0%}" if error is not None else ""
    lines = [describe_deployment(deployment)]
    lines += wrapped("step", f"{prediction.step_us / 1000:.2f} ms{about}")
    lines += wrapped(
        "throughput",
        f"{prediction.tokens_per_s_per_gpu:.0f} tokens/s per GPU over all "
        f"{deployment.total_gpus}; {prediction.tpot_us / 1000:.2f} ms a token",
    )
    lines += wrapped("waits for", describe_binding(prediction))
    attention = (
        f"attention {stages.attn_us:.0f} = core {stages.core_us:.0f} + dense {stages.dense_us:.0f}"
    )
    experts = stages.experts
    mlp = (
        f"experts {experts.total_us:.0f} = fixed {experts.fixed_us:.0f} + weights "
        f"{experts.weights_us:.0f} + arithmetic {experts.compute_us:.0f}"
    )
    way = "both ways" if deployment.mode is Mode.COLOCATED else "each way"
    exchange = f"exchange {stages.exchange_us:.0f} {way}"
    if stages.wait_us:
        exchange += f"; wait for the slowest GPU {stages.wait_us:.0f}"
    lines += wrapped("us of a layer", f"{attention}; {mlp}; {exchange}")
    lines += wrapped("outside the layers", f"{prediction.outside_layers_us / 1000:.2f} ms")
    for role in prediction.memory.roles:
        parts = f"{role.weight_bytes / GIB:.1f} weights"
        if role.buffer_bytes:
            parts += f" + {role.buffer_bytes / GIB:.1f} buffers"
        if role.kv_needed_tokens:
            parts += (
                f"; cache for {role.kv_capacity_tokens} tokens, "
                f"{role.kv_needed_tokens / max(role.kv_capacity_tokens, 1):.0%} taken"
            )
        lines += wrapped(f"{role.role} GPU", f"{role.usable_bytes / GIB:.1f} GiB: {parts}")
    return lines


def describe_deployment(deployment: Deployment) -> str:
    """In words."""
    batch = f"batch {deployment.batch_per_attn_gpu}"
    if deployment.mode is Mode.COLOCATED:
        copies = deployment.attn_gpus // deployment.expert_parallel
        times = f"{copies} x " if copies > 1 else ""
        return f"colocated, {times}{deployment.expert_parallel} GPUs share the experts, {batch}"
    count = deployment.micro_batches
    kind = "core attention apart" if deployment.mode is Mode.CORE_ONLY else "disaggregated"
    return (
        f"{kind}, {deployment.attn_gpus} attention + {deployment.mlp_gpus} MLP GPUs, "
        f"EP{deployment.expert_parallel}, {count} micro-batch{'es' if count > 1 else ''}, {batch}, "
        f"{deployment.expert_kernels.value} kernels"
    )


def speed_up_lines(result: SpeedUp) -> list[str]:
    """The three factors, a cause each."""
    lines = wrapped(
        f"speed-up {result.total:.3f}",
        f"= {' x '.join(f'{value:.3f}' for _, value, _ in factors(result))}, tokens/s per GPU of "
        "all GPUs",
    )
    for name, value, cause in factors(result):
        lines += wrapped(f"  {name}", f"{value:.3f}  {cause}")
    if note := kernels_note(result):
        lines += wrapped("  note", note)
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    """The answer first."""
    answer = {
        Answer.PAYS: "AFD PAYS",
        Answer.DOES_NOT_PAY: "AFD DOES NOT PAY",
        Answer.UNCERTAIN: "UNCERTAIN whether AFD pays",
    }[verdict.answer]
    lines = [
        f"{answer}: {verdict.speed_up:.2f} times the best colocated deployment "
        f"({verdict.low:.2f} to {verdict.high:.2f} in 9 of 10 cases)"
    ]
    top = [cause for cause in verdict.causes if cause.share >= 0.05][:3]
    named = ", ".join(f"{cause.name} {cause.share:.0%}" for cause in top)
    lines += wrapped("uncertainty", f"{verdict.relative_error:.1%}; of it {named}")
    if verdict.answer is Answer.DOES_NOT_PAY:
        lines += wrapped("do", "serve colocated")
    if verdict.answer is Answer.UNCERTAIN:
        lines += wrapped(
            "do", "measure a profile on this GPU (the command `profile`), or serve colocated"
        )
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as they need; the first to the left, the others to the right."""
    cells = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
