"""The report as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sglang_afd.planner.causes import describe_binding, factors, kernels_note
from sglang_afd.planner.gpu import GIB
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.report import charts
from sglang_afd.planner.report.contents import Contents
from sglang_afd.planner.report.style import STYLE
from sglang_afd.planner.verdict import Answer, Verdict

_ANSWERS = {
    Answer.PAYS: ("pays", "AFD pays"),
    Answer.DOES_NOT_PAY: ("not", "AFD does not pay"),
    Answer.UNCERTAIN: ("unsure", "Uncertain whether AFD pays"),
}
_ASSUMED = (
    "Decode in steady state: every slot of the batch is taken, no prefill, no arrivals.",
    "Throughput counts all GPUs of a deployment, MLP GPUs too.",
    "The colocated deployment is the best one found over expert parallelism and batch.",
)


def page(shown: Contents, about: Sequence[str], commands: Sequence[str]) -> str:
    """The whole file.

    Args:
        shown: What is drawn.
        about: Model, GPU, workload and where constants come from; a line each.
        commands: Lines that start the disaggregated deployment.
    """
    verdict = shown.answered.verdict
    assert verdict is not None, "contents are made of two deployments only"
    kind, answer = _ANSWERS[verdict.answer]
    pictures = (
        ("Speed-up against the ratio", charts.speed_up_chart(shown), ""),
        ("Step time against the ratio", charts.step_chart(shown), ""),
        ("What the speed-up is made of", charts.waterfall_chart(shown), _causes(shown)),
        ("The first layers of a step", charts.timeline_chart(shown), _waits(shown)),
    )
    figures = "\n".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{picture}{below}</figure>"
        for title, picture, below in pictures
    )
    head = "".join(f"<p>{escape(line)}</p>" for line in about)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(answer)}: {escape(shown.site.scenario.shape.name)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header class="{kind}">
<h1>{escape(answer)}</h1>
<p class="lead">{_lead(verdict)}</p>
<div class="about">{head}</div>
</header>
<section class="sides">
{_side("Best disaggregated", shown.result.disaggregated)}
{_side("Best colocated", shown.result.colocated)}
</section>
<section class="figures">
{figures}
</section>
<section class="rest">
<details><summary>Where the uncertainty comes from</summary>{_uncertainty(verdict)}</details>
<details><summary>How to start the disaggregated deployment</summary>
<pre>{escape(chr(10).join(commands))}</pre></details>
<p class="small">{" ".join(map(escape, _ASSUMED))}</p>
</section>
</main>
</body>
</html>
"""


def _lead(verdict: Verdict) -> str:
    advice = {
        Answer.PAYS: "",
        Answer.DOES_NOT_PAY: " Serve colocated.",
        Answer.UNCERTAIN: " Measure a profile on this GPU, or serve colocated.",
    }[verdict.answer]
    return (
        f"<strong>{verdict.speed_up:.2f} times</strong> the tokens/s per GPU of the best colocated "
        f"deployment; {verdict.low:.2f} to {verdict.high:.2f} in 9 of 10 cases.{advice}"
    )


def _side(title: str, prediction: Prediction) -> str:
    deployment = prediction.deployment
    gpus = (
        f"{deployment.attn_gpus} attention + {deployment.mlp_gpus} MLP GPUs, "
        f"{deployment.micro_batches} micro-batches, {deployment.expert_kernels.value} kernels"
        if deployment.mlp_gpus
        else f"{deployment.attn_gpus} GPUs share the experts"
    )
    memory = "; ".join(
        f"{role.role} {(role.weight_bytes + role.buffer_bytes) / GIB:.0f} of "
        f"{role.usable_bytes / GIB:.0f} GiB before cache"
        for role in prediction.memory.roles
    )
    rows = (
        ("deployment", gpus),
        ("batch", f"{deployment.batch_per_attn_gpu} requests a GPU with a cache"),
        ("throughput", f"{prediction.tokens_per_s_per_gpu:.0f} tokens/s per GPU"),
        ("step", f"{prediction.step_us / 1000:.1f} ms"),
        ("waits for", describe_binding(prediction)),
        ("memory", memory),
    )
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f"<div><h2>{escape(title)}</h2><dl>{cells}</dl></div>"


def _causes(shown: Contents) -> str:
    items = "".join(
        f"<li><b>{escape(name)} {value:.3f}</b>: {escape(cause)}</li>"
        for name, value, cause in factors(shown.result)
    )
    note = kernels_note(shown.result)
    return f"<ul>{items}{f'<li>{escape(note)}</li>' if note else ''}</ul>"


def _waits(shown: Contents) -> str:
    best = shown.result.disaggregated
    stages = best.stages
    return (
        f"<p>Waits for {escape(describe_binding(best))}. A layer of one micro-batch: attention "
        f"{stages.attn_us:.0f} us, experts {stages.mlp_us:.0f} us, exchange "
        f"{stages.exchange_us:.0f} us each way.</p>"
    )


def _uncertainty(verdict: Verdict) -> str:
    items = "".join(
        f"<li>{escape(cause.name)}: {cause.share:.0%}</li>"
        for cause in verdict.causes[:5]
        if cause.share >= 0.01
    )
    return f"<p>Standard deviation {verdict.relative_error:.1%}, of its square:</p><ul>{items}</ul>"
