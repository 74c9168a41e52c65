"""The planner against public measurements; the same numbers stand in docs/results/planner.md."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.constants import NAMES
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.description import DESCRIPTION_FIELDS, VLLM_PIECE_TOKENS, describe
from sglang_afd.planner.fit import Fit, Observation, fit
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.published import afd, colocated
from sglang_afd.planner.records import read_collection
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.speedup import speed_up
from sglang_afd.planner.step import reads, step_of
from sglang_afd.planner.validate import Compared, fit_and_compare, predict_rows, split, summarize

DATA = Path(__file__).parents[3] / "benchmark/planner/fastafd_gb200_qwen3_235b.json"
CONTEXTS = (1024, 4096, 8192)
QWEN = known_shape("Qwen3-235B-A22B-FP8")


Results = dict[int, tuple[Fit, list[Compared]]]


@pytest.fixture(scope="module")
def results() -> Results:
    rows = read_collection(DATA).rows
    return {context: fit_and_compare(rows, context) for context in CONTEXTS}


@pytest.fixture(scope="module")
def fits(results: Results) -> dict[int, Fit]:
    return {context: fitted for context, (fitted, _) in results.items()}


def _scenario(fitted: Fit, context: int) -> Scenario:
    """As the published systems: the colocated one is vLLM."""
    return Scenario(
        shape=QWEN,
        gpu=GPUS["GB200"],
        workload=Workload(context_tokens=context),
        constants=fitted.constants,
        colocated_piece_tokens=VLLM_PIECE_TOKENS,
    )


@pytest.mark.parametrize("context", CONTEXTS)
def test_other_contexts_are_predicted_within_the_aim(results: Results, context: int) -> None:
    result = summarize(results[context][1])

    assert result.rows > 60
    assert result.median_abs_pct <= 3
    assert result.p90_abs_pct <= 8


def _corrupted(data: dict[str, Any], fit_context: int) -> dict[str, Any]:
    """Nonsense for all but the descriptions, in every record that is not fitted."""
    generator = random.Random(3)
    changed = copy.deepcopy(data)
    for record in changed["records"]:
        if record.get("context") == fit_context:
            continue
        factor = generator.uniform(0.1, 10)
        for field, value in record.items():
            if field in DESCRIPTION_FIELDS or isinstance(value, str):
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                record[field] = value * factor if field.startswith("step") else value / factor
    return changed


@pytest.mark.parametrize("context", CONTEXTS)
def test_corrupting_what_is_to_be_predicted_changes_no_prediction(
    results: Results, context: int, tmp_path: Path
) -> None:
    data = json.loads(DATA.read_text())
    corrupted = tmp_path / "corrupted.json"
    corrupted.write_text(json.dumps(_corrupted(data, context)))
    fitted, honest = results[context]

    fitted_again, blind = fit_and_compare(read_collection(corrupted).rows, context)

    assert fitted_again.constants == fitted.constants
    assert [item.predicted_us for item in blind] == [item.predicted_us for item in honest]
    assert [item.measured_us for item in blind] != [item.measured_us for item in honest]


def test_changing_a_fitted_row_changes_predictions(results: Results, tmp_path: Path) -> None:
    """So that the test above can fail."""
    path = _write(tmp_path, step_ms=40.0)

    _, misled = fit_and_compare(read_collection(path).rows, 8192)

    honest = results[8192][1]
    assert [item.predicted_us for item in misled] != [item.predicted_us for item in honest]


def test_rows_to_predict_carry_no_result() -> None:
    observations, rows = split(read_collection(DATA).rows, 8192)

    assert all(not hasattr(row, "step_us") for row in rows)
    assert len(observations) + len(rows) == len(read_collection(DATA).rows)


# Published, not in the file: what the planner has never been fitted on.
ELSEWHERE = [
    ("3:1 at 8K", 8192, afd(12, 96), 32.8),
    ("1:1 at 128K, DeepEP", 131_072, afd(4, 6, fused=False), 30.4),
    ("8:1 at 128K, DeepEP", 131_072, afd(32, 6, fused=False), 30.74),
    ("core-only 1:1 at 128K", 131_072, afd(4, 6, Mode.CORE_ONLY), 25.0),
    ("core-only 15:1 at 128K", 131_072, afd(60, 6, Mode.CORE_ONLY), 31.24),
]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("name", "at", "deployment", "measured_ms"), ELSEWHERE)
def test_other_ratios_modes_and_kernels_are_predicted(
    fits: dict[int, Fit],
    context: int,
    name: str,
    at: int,
    deployment: Deployment,
    measured_ms: float,
) -> None:
    step_ms = predict(_scenario(fits[context], at), deployment).step_us / 1000

    assert step_ms == pytest.approx(measured_ms, rel=0.05), name


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_measured_speed_up_over_wide_expert_parallelism_is_predicted(
    fits: dict[int, Fit], context: int
) -> None:
    scenario = _scenario(fits[context], 8192)

    predicted = speed_up(scenario, colocated(16, 96), afd(28, 96)).total

    assert predicted == pytest.approx(2522.64 / 2331.65, rel=0.04)


@pytest.mark.parametrize(
    ("at", "batch", "afd_rate", "colocated_rate"),
    [(1024, 512, 3980, 6173), (4096, 192, 3282, 3926), (8192, 96, 2465, 2323)],
)
def test_the_sign_of_the_speed_up_is_the_measured_one(
    fits: dict[int, Fit], at: int, batch: int, afd_rate: float, colocated_rate: float
) -> None:
    other = next(context for context in CONTEXTS if context != at)
    scenario = _scenario(fits[other], at)

    predicted = speed_up(scenario, colocated(16, batch), afd(28, batch)).total

    assert (predicted > 1) == (afd_rate > colocated_rate)
    assert predicted == pytest.approx(afd_rate / colocated_rate, rel=0.14)


def _another_model() -> dict[str, Any]:
    """A file of the same schema about a model and hardware name that the planner does not know."""
    data = json.loads(DATA.read_text())
    shape = {**data["models"]["Qwen3-235B-A22B-FP8"], "layers": 48, "hidden": 2048, "experts": 64}
    shape.pop("kv_bytes_per_token_bf16")
    data["models"] = {"Mystery-FP8": shape}
    for record in data["records"]:
        record["model"] = "Mystery-FP8"
    return data


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("vllm_decode", 256), ("colocated_decode", 256), ("sglang_decode", None), (None, 256)],
)
def test_pieces_of_a_colocated_row_are_those_of_its_engine(
    kind: str | None, expected: int | None
) -> None:
    data = _another_model()
    record = next(item for item in data["records"] if item["kind"] == "vllm_wide_ep")
    record["kind"] = kind

    row = describe(record, data["models"], data["hardware"])

    assert row.scenario.colocated_piece_tokens == expected


def test_another_models_file_needs_no_change(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(_another_model()))
    rows = read_collection(path).rows
    observations, unseen = split(rows, 8192)

    predicted = predict_rows(fit(observations[:0]), unseen)

    original = predict_rows(fit(observations[:0]), split(read_collection(DATA).rows, 8192)[1])
    assert all(new < 0.7 * old for new, old in zip(predicted, original, strict=True))


def _write(tmp_path: Path, **changes: Any) -> Path:
    data = json.loads(DATA.read_text())
    record = next(item for item in data["records"] if item["kind"] == "afd_decode")
    for key, value in changes.items():
        if value is None:
            del record[key]
        else:
            record[key] = value
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_per_attn_gpu": None}, "batch_per_attn_gpu"),
        ({"ffn_gpus": None}, "ffn_gpus"),
        ({"attn_gpus": 0}, "attn_gpus is 0"),
        ({"context": -8192}, "context_tokens"),
        ({"step_ms": 33_359.8}, "another unit"),
        ({"step_ms": "33.4"}, "wanted a number"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"hardware": "TPU"}, "not in the planner's list"),
        ({"model": "Nobody-7B"}, "not in the planner's list"),
    ],
)
def test_a_broken_record_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_collection(_write(tmp_path, **changes))


def test_a_row_marked_implausible_is_listed_and_not_compared(tmp_path: Path) -> None:
    collection = read_collection(_write(tmp_path, plausibility="suspect: tail of decode"))

    assert [item.id for item in collection.skipped] == ["pub_afd_Qwen_8192"]
    assert all(item.row.id != "pub_afd_Qwen_8192" for item in collection.rows)


def test_the_benchmark_lists_what_it_cannot_describe(tmp_path: Path) -> None:
    path = _write(tmp_path, hardware="TPU")

    collection = read_collection(path, strict=False)

    assert [item.id for item in collection.skipped] == ["pub_afd_Qwen_8192"]
    assert "TPU" in collection.skipped[0].reason


def test_a_context_without_rows_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="1024, 4096, 8192"):
        split(read_collection(DATA).rows, 3000)


def test_without_rows_the_priors_come_back() -> None:
    fitted = fit([])

    assert fitted.spread("kv_read_efficiency") == pytest.approx(0.04)
    assert fitted.constants.kv_read_efficiency == pytest.approx(0.9)


def test_rows_narrow_the_constants_that_they_show(fits: dict[int, Fit]) -> None:
    assert fits[1024].spread("afd_expert_flops_efficiency") < 0.05  # prior 0.2
    assert fits[1024].spread("core_fixed_us") > 0.4  # hidden in the dense part


def test_a_measured_stage_pins_its_constant() -> None:
    scenario = Scenario(shape=QWEN, gpu=GPUS["GB200"], workload=Workload(context_tokens=8192))
    core = Observation(
        scenario=scenario, deployment=colocated(16, 96), time_us=300, stage="core", noise=0.01
    )
    core_us = predict(scenario, colocated(16, 96)).stages.core_us

    fitted = fit([core])

    refitted = predict(scenario.with_constants(fitted.constants), colocated(16, 96))
    assert abs(refitted.stages.core_us - 300) < 0.2 * abs(core_us - 300)


def test_the_error_band_holds_most_of_the_rows(results: Results) -> None:
    fitted, compared = results[4096]

    inside = [
        abs(item.error_pct) / 100
        < 2 * fitted.relative_error(item.row.scenario, item.row.deployment)
        for item in compared
    ]

    assert sum(inside) / len(inside) > 0.9


def test_repeated_rows_weigh_as_one() -> None:
    """So that a file with many repeats of some rows does not bend the fit to those."""
    observations, unseen = split(read_collection(DATA).rows, 8192)
    observations = [row for row in observations if row.deployment.batch_per_attn_gpu < 64]
    repeated = [row for row in observations[:3] for _ in range(99)]

    again = predict_rows(fit([*observations, *repeated]), unseen)

    assert again == pytest.approx(predict_rows(fit(observations), unseen), rel=1e-3)


def test_a_denser_sweep_adds_no_certainty() -> None:
    scenario = Scenario(shape=QWEN, gpu=GPUS["GB200"], workload=Workload(context_tokens=8192))

    def sweep(step: int) -> list[Observation]:
        rows = [colocated(16, batch) for batch in range(8, 264, step)]
        times = [predict(scenario, row).step_us for row in rows]
        return [
            Observation(scenario=scenario, deployment=row, time_us=time_us)
            for row, time_us in zip(rows, times, strict=True)
        ]

    few, many = fit(sweep(16)), fit(sweep(1))

    for batch in (8, 64, 256):
        known = [fitted.relative_error(scenario, colocated(16, batch)) for fitted in (few, many)]
        assert known[1] >= known[0] * 0.999


@pytest.mark.parametrize("kind", list(Mode))
@pytest.mark.parametrize("kernels", list(ExpertKernels))
def test_a_constant_that_a_step_is_said_not_to_read_does_not_change_it(
    kind: Mode, kernels: ExpertKernels
) -> None:
    scenario = Scenario(shape=QWEN, gpu=GPUS["GB200"], workload=Workload(context_tokens=8192))
    where = colocated(16, 96) if kind is Mode.COLOCATED else afd(28, 96, kind)
    where = replace(where, expert_kernels=kernels)
    unread = [name for name in NAMES if not reads(where, name)]

    other = scenario.with_constants(scenario.constants.scaled(**dict.fromkeys(unread, 1.1)))

    assert unread or kernels is ExpertKernels.GROUPED
    assert step_of(other, where) == step_of(scenario, where)


def test_a_measured_time_in_another_unit_is_refused() -> None:
    scenario = Scenario(shape=QWEN, gpu=GPUS["GB200"], workload=Workload(context_tokens=8192))

    with pytest.raises(ConfigError, match="microseconds"):
        Observation(scenario=scenario, deployment=colocated(16, 96), time_us=41.2)
