"""Tables of aiconfigurator-core are used only where they are plausible."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.cli import aiconfigurator, sources
from sglang_afd.planner.cli.aiconfigurator import EVEN, UNEVEN, NoTables, Timed
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.fit import fit
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape

QWEN = known_shape("Qwen3-235B-A22B-FP8")
H200 = GPUS["H200"]
is_there = importlib.util.find_spec(aiconfigurator.PACKAGE) is not None


def _row(stage: str, time_us: float, ranks: int = 4, batch: int = 64) -> Timed:
    return Timed(
        stage=stage,
        deployment=Deployment(
            mode=Mode.COLOCATED,
            attn_gpus=ranks,
            expert_parallel=ranks,
            batch_per_attn_gpu=batch,
        ),
        context_tokens=8192,
        time_us=time_us,
    )


# Published queries of the tables, SGLang on H200: core attention 261 us at batch 64 and 8K, experts
# 222 us at 256 tokens on 4 GPUs. A GEMM table of one backend is 20 times off.
@pytest.mark.parametrize(
    ("stage", "time_us", "expected"),
    [
        ("core", 261, True),
        ("core", 200, False),  # less than reading the cache takes
        ("core", 261 * 20, False),
        ("core", 0.261, False),  # ms for us
        ("experts", 222, True),
        ("experts", 60, False),
        ("experts", 222 * 20, False),
    ],
)
def test_times_that_no_hardware_has_do_not_pass(stage: str, time_us: float, expected: bool) -> None:
    assert aiconfigurator.is_plausible(_row(stage, time_us), QWEN, H200) is expected


@pytest.mark.parametrize("stage", ["core", "experts"])
def test_the_roofline_falls_with_bandwidth_and_with_uneven_routing(stage: str) -> None:
    row = _row(stage, 100)
    faster = replace(H200, hbm_bytes_per_us=2 * H200.hbm_bytes_per_us)

    least, most = (aiconfigurator.roofline_us(row, QWEN, H200, skew) for skew in (UNEVEN, EVEN))

    assert least <= most
    assert aiconfigurator.roofline_us(row, QWEN, faster, EVEN) < most


def test_implausible_rows_are_left_out_and_counted() -> None:
    rows = [_row("core", 261), _row("core", 1), _row("experts", 222)]

    tables = aiconfigurator.gated("tables", rows, QWEN, H200)

    assert [item.time_us for item in tables.observations] == [261, 222]
    assert tables.notes[0].startswith("1 of 3 table rows are implausible")


def test_tables_with_nothing_plausible_are_refused() -> None:
    with pytest.raises(NoTables, match="no plausible times for the sizes of"):
        aiconfigurator.gated("tables", [_row("core", 1)], QWEN, H200)


def test_many_rows_of_one_table_do_not_count_as_independent() -> None:
    rows = [replace(_row("core", 261), context_tokens=8192.0 + number) for number in range(64)]
    one = aiconfigurator.gated("tables", rows[:4], QWEN, H200)
    many = aiconfigurator.gated("tables", rows, QWEN, H200)

    spreads = [fit(tables.observations).spread("kv_read_efficiency") for tables in (one, many)]

    assert spreads[1] == pytest.approx(spreads[0], rel=0.01)


@pytest.mark.skipif(is_there, reason="aiconfigurator-core is installed")
def test_without_the_extra_the_roofline_is_used_and_labelled() -> None:
    source = sources.without_a_file("auto", QWEN, H200)

    assert source.label == "roofline: data sheets and priors; nothing is measured"
    assert "pip install aiconfigurator-core" in source.notes[0]
    with pytest.raises(ConfigError, match="--source aiconfigurator: it is not installed"):
        sources.without_a_file("aiconfigurator", QWEN, H200)


@pytest.mark.skipif(not is_there, reason="needs aiconfigurator-core")
@pytest.mark.parametrize("gpu", ["H200", "GB200"])
def test_its_tables_have_this_model_and_nearly_all_of_it_is_plausible(gpu: str) -> None:
    tables = aiconfigurator.read_tables(QWEN, GPUS[gpu])

    assert {item.stage for item in tables.observations} == {"core", "experts"}
    assert len(tables.observations) >= 25


@pytest.mark.skipif(not is_there, reason="needs aiconfigurator-core")
def test_a_gpu_without_tables_falls_back_to_the_roofline() -> None:
    source = sources.without_a_file("auto", QWEN, GPUS["H20"])

    assert source.kind == "roofline"
    assert "it has no tables of H20" in source.notes[0]
