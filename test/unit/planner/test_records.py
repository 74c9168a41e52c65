"""Collections as other people write them: odd numbers, missing fields, results of no use."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.records import Collection, read_collection

ROOT = Path(__file__).parents[3]
DATA = ROOT / "benchmark/planner/fastafd_gb200_qwen3_235b.json"
MODEL = "Qwen3-235B-A22B-FP8"
RESULTS = ("step_ms", "step_ms_cuda", "tok_s_gpu", "tok_s_gpu_cuda")
NAN, INFINITY = math.nan, math.inf

sys.path.append(str(ROOT / "benchmark"))

Record = dict[str, Any]


def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DATA.read_text())
    data["records"] = [item for item in data["records"] if "context" in item][::4]
    return data


def _written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(data))
    return path


def _read(tmp_path: Path, data: object) -> Collection:
    return read_collection(_written(tmp_path, data), strict=False)


def _bench(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    import bench_planner

    code = bench_planner.main(["--data", str(path), "--fit", "8192"])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


@pytest.mark.parametrize("value", [NAN, INFINITY, 2.5, 10**400, "4", True, [4], 0, -1])
@pytest.mark.parametrize("field", ["attn_gpus", "ffn_gpus", "ffn_ep", "num_mb"])
def test_no_odd_number_of_a_description_gets_through(
    tmp_path: Path, field: str, value: object
) -> None:
    data = _data()
    data["records"][0][field] = value

    collection = _read(tmp_path, data)

    assert [item.id for item in collection.skipped] == [data["records"][0]["id"]]


@pytest.mark.parametrize("value", [NAN, INFINITY, 10**400, 1e30, "4", True, [4], None, 0, -1])
def test_no_odd_context_gets_through(tmp_path: Path, value: object) -> None:
    data = _data()
    data["records"][0]["context"] = value

    collection = _read(tmp_path, data)

    assert [item.id for item in collection.skipped] == [data["records"][0]["id"]]


@pytest.mark.parametrize("value", [NAN, INFINITY, 0, -30, 1e-9, 1e9, "30", True])
def test_a_row_without_a_usable_result_is_still_described(tmp_path: Path, value: object) -> None:
    data = _data()
    data["records"][0]["step_ms"] = value

    collection = _read(tmp_path, data)

    assert [item.row.id for item in collection.unmeasured] == [data["records"][0]["id"]]
    assert not collection.skipped


@pytest.mark.parametrize("value", [NAN, INFINITY, 0, -2518, "2518"])
def test_an_odd_rate_is_not_taken_for_a_result(tmp_path: Path, value: object) -> None:
    data = _data()
    del data["records"][0]["step_ms"]
    data["records"][0]["tok_s_gpu"] = value

    collection = _read(tmp_path, data)

    assert [item.row.id for item in collection.unmeasured] == [data["records"][0]["id"]]


def test_a_rate_needs_no_total_of_the_gpus(tmp_path: Path) -> None:
    data = _data()
    del data["records"][0]["step_ms"], data["records"][0]["total_gpus"]

    collection = _read(tmp_path, data)

    assert collection.rows[0].step_us == pytest.approx(33_360, rel=1e-3)


@pytest.mark.parametrize("value", [NAN, INFINITY, 0, -3, "4", 10**40])
@pytest.mark.parametrize("field", ["layers", "experts", "topk", "kv_heads", "hidden"])
def test_a_model_of_odd_sizes_is_refused_by_its_name(
    tmp_path: Path, field: str, value: object
) -> None:
    data = _data()
    data["models"][MODEL][field] = value

    with pytest.raises(ConfigError, match=f"the first: model '{MODEL}'"):
        _read(tmp_path, data)


def test_a_model_without_layers_that_have_a_cache_is_refused(tmp_path: Path) -> None:
    data = _data()
    data["models"][MODEL]["kv_layers"] = 0

    with pytest.raises(ConfigError, match="kv_layers is 0"):
        _read(tmp_path, data)


@pytest.mark.parametrize("key", ["models", "hardware"])
@pytest.mark.parametrize("value", [[], 3, "x"])
def test_a_part_of_the_wrong_type_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"`{key}` is no object"):
        _read(tmp_path, {**_data(), key: value})


@pytest.mark.parametrize("key", ["models", "hardware"])
def test_known_models_and_gpus_need_no_description(tmp_path: Path, key: str) -> None:
    collection = _read(tmp_path, {**_data(), key: None})

    assert len(collection.rows) == len(_data()["records"])


def test_what_is_no_record_is_listed(tmp_path: Path) -> None:
    data = _data()
    data["records"] += [None, 5, [], "x"]

    collection = _read(tmp_path, data)

    assert [item.reason for item in collection.skipped][0] == "a record is None, wanted an object"
    assert len(collection.skipped) == 4


def test_a_file_in_another_unit_says_so(tmp_path: Path) -> None:
    data = _data()
    for record in data["records"]:
        for field in RESULTS:
            record[field] = record[field] * 1000 if "step" in field and field in record else None

    with pytest.raises(ConfigError, match="the first: .* is it another unit"):
        _read(tmp_path, data)


@pytest.mark.parametrize(
    ("mark", "num_skipped"), [("OK", 0), (None, 0), ("", 0), (True, 0), (False, 1), ("suspect", 1)]
)
def test_only_a_mark_leaves_a_row_out(tmp_path: Path, mark: object, num_skipped: int) -> None:
    data = _data()
    data["records"][0]["plausibility"] = mark

    assert len(_read(tmp_path, data).skipped) == num_skipped


def test_experts_that_do_not_divide_leave_out_one_row_and_not_the_file(tmp_path: Path) -> None:
    data = _data()
    data["records"][0].update(ffn_ep=5, ffn_gpus=5)

    collection = _read(tmp_path, data)

    assert "do not divide among 5 GPUs" in collection.skipped[0].reason
    assert len(collection.rows) == len(data["records"]) - 1


@pytest.mark.parametrize(("dtype", "size"), [("fp8", 1.0), ("bf16", 2.0), (None, 1.0)])
def test_a_row_may_name_the_type_of_its_weights(
    tmp_path: Path, dtype: str | None, size: float
) -> None:
    data = _data()
    data["records"][0]["weight_dtype"] = dtype

    assert _read(tmp_path, data).rows[0].row.scenario.shape.weight_bytes == size


def _deleted(record: Record) -> None:
    for field in RESULTS:
        record.pop(field, None)


def _contradicting(record: Record) -> None:
    for number, field in enumerate(RESULTS, start=1):
        if field in record:
            record[field] *= 100.0**number


def _worded(record: Record) -> None:
    for field in RESULTS:
        if field in record:
            record[field] = "nonsense"


def _predicted_column(lines: list[str]) -> dict[str, str]:
    """By row: context, batch, deployment and prediction."""
    rows = [line for line in lines if " ms" in line and "{" not in line]
    return {line.split()[0]: line[: line.index(" ms")] for line in rows}


@pytest.mark.parametrize("spoil", [_deleted, _contradicting, _worded])
def test_no_result_decides_what_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Record], None]
) -> None:
    honest, spoiled = _data(), copy.deepcopy(_data())
    unseen = [item for item in spoiled["records"] if item["context"] != 8192]
    for record in unseen[1:]:
        spoil(record)

    _, before, _ = _bench(_written(tmp_path, honest), capsys)
    code, after, _ = _bench(_written(tmp_path, spoiled), capsys)

    assert code == 0
    assert _predicted_column(after) == _predicted_column(before)
    assert len(_predicted_column(after)) == len(unseen)
    assert json.loads(after[-1])["rows"] == 1
    assert json.loads(after[-1])["skipped"] == len(unseen) - 1


def test_a_file_with_nothing_to_compare_ends_in_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _data()
    data["records"] = [item for item in data["records"] if item["context"] == 8192]

    code, _, error = _bench(_written(tmp_path, data), capsys)

    assert code == 2
    assert "no measured step outside the fit context" in error


def test_the_benchmark_ends_in_finite_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _data()
    data["records"][-1].update(step_ms_cuda=NAN, tok_s_gpu_cuda=None)
    data["records"][-2].update(step_ms_cuda=None, tok_s_gpu_cuda=-INFINITY)

    code, lines, _ = _bench(_written(tmp_path, data), capsys)

    last = json.loads(lines[-1])
    assert code == 0
    assert all(
        math.isfinite(last[key]) for key in ("median_abs_pct", "p90_abs_pct", "worst_pct", "rows")
    )
    assert set(last["by_kind"]) == {"afd_decode", "vllm_decode"}


@pytest.mark.parametrize("field", ["attn_tp", "mlp_tp", "tp"])
def test_a_row_with_tensor_parallelism_is_left_out_with_the_reason(
    tmp_path: Path, field: str
) -> None:
    data = _data()
    data["records"][0][field] = 4

    collection = _read(tmp_path, data)

    assert [item.id for item in collection.skipped] == [data["records"][0]["id"]]
    assert f"{field} is 4" in collection.skipped[0].reason
    assert len(collection.rows) == len(data["records"]) - 1


def test_a_row_that_its_source_doubts_counts_less_in_a_fit(tmp_path: Path) -> None:
    data = _data()
    data["records"][0]["confidence"] = "Medium (outlier)"
    data["records"][1]["confidence"] = "high"

    rows = _read(tmp_path, data).rows

    assert rows[0].observation.noise == pytest.approx(3 * rows[1].observation.noise)
