"""Quantises rows as a dispatch does and compares them with the bound of e4m3; run in a process.

e4m3 has 3 bits after the leading one: rounding to the nearest moves a value by at most 2^-4 of
itself, and by at most half of the smallest step, 2^-10, below the normal range; both times the
group's scale, amax / 448. Just below amax the step is 32 of 448, so nothing moves by more than
amax / 28.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW, FP8_GROUP, SlabShape, WaitPolicy
from sglang_afd.transport.cuda_ipc.slab import Slab

HIDDEN_SIZE, NUM_ROWS, TOP_K = 512, 64, 4
LARGEST = 448.0  # of e4m3
ROUNDING = 1 + 2**-20  # of the scale and the division, in float32


def main(argv: Sequence[str]) -> int:
    """Write what was found to the file that is named."""
    shape = SlabShape(
        num_slots=1,
        max_ranks=1,
        max_rows=NUM_ROWS,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        dtype="bfloat16",
        is_fp8=True,
    )
    torch.cuda.set_device(0)
    slab = Slab(shape, 0, WaitPolicy.POLL)
    slab.attach(1, 1)
    rows = _rows().to(torch.bfloat16).cuda()
    ids = torch.zeros(NUM_ROWS, TOP_K, dtype=torch.int32, device="cuda")
    slab.stage_step(step=1, kind=Kind.PREFILL, num_micro_batches=1, num_rows=EVERY_ROW)
    slab.dispatch(0, 0, rows, ids, ids.float(), rings=True)
    torch.cuda.synchronize()
    Path(argv[0]).write_text(json.dumps(_compare(rows.double().cpu(), *_sent(slab, shape))))
    return 0


def _rows() -> torch.Tensor:
    """Normal rows, some with an outlier, tiny and huge ones, zeros, and a sweep of a binade."""
    rows = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    rows[1] *= 1e-4
    rows[2] *= 1e4
    rows[3] = 0
    rows[4:8, ::FP8_GROUP] = 300.0
    rows[8] = torch.linspace(-1, 1, HIDDEN_SIZE)
    rows[9] = torch.logspace(-12, 0, HIDDEN_SIZE, base=2)
    return rows


def _sent(slab: Slab, shape: SlabShape) -> tuple[torch.Tensor, torch.Tensor]:
    def view(area: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        return slab._memory.view(shape.slot_offset(0, area), (NUM_ROWS, width), dtype)

    values = view("hidden_states", HIDDEN_SIZE, torch.float8_e4m3fn)
    scales = view("scales", HIDDEN_SIZE // FP8_GROUP, torch.float32)
    return values.float().double().cpu(), scales.double().cpu()


def _compare(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> dict[str, float]:
    groups = rows.view(NUM_ROWS, -1, FP8_GROUP)
    amax = groups.abs().amax(-1)
    ideal = amax / LARGEST
    off = (values.view_as(groups) * scales.unsqueeze(-1) - groups).abs()
    bound = torch.maximum(groups.abs() * 2**-4, (scales * 2**-10).unsqueeze(-1)) * ROUNDING
    has_values = amax > 0
    of_bound = (off[has_values] / bound[has_values]).max()
    scale_off = ((scales - ideal).abs()[has_values] / ideal[has_values]).max()
    of_amax = (off[has_values].amax(-1) / amax[has_values]).max()
    found = {
        "largest_share_of_bound": float(of_bound),
        "largest_share_of_amax": float(of_amax),
        "largest_relative_error_of_a_scale": float(scale_off),
        "largest_of_zeros": float(off[~has_values].max()),
    }
    return {name: value if math.isfinite(value) else 1e9 for name, value in found.items()}
