"""Faults on the GPU's way, and poison where nothing may be read; see faults.py."""

from __future__ import annotations

import json
import os
from typing import Any

_HUGE = 0x7F7F7F7F  # 3.4e38 in float32 and bfloat16; an expert that does not exist
_NAN = 0xFFFFFFFF  # in every float; -1 as an expert


def swap_micro_batches() -> None:
    """The results of a step's micro-batches are put together in the wrong order."""
    from sglang_afd.attn import split_forward

    run_in_turns = split_forward.run_in_turns
    split_forward.run_in_turns = lambda slices: run_in_turns(slices)[::-1]  # type: ignore[assignment]


def poison_slots() -> None:
    """Whatever a slot holds beyond a step's rows is no number, and so are rows that are padding.

    The whole slot is overwritten before each step, and padded rows of a captured step just before
    they would be sent. The rows that SGLang ran are written to the file in TEST_ROWS.
    """
    from sglang_afd.transport.cuda_ipc import driver, layout
    from sglang_afd.transport.cuda_ipc.slab import Slab

    stage_step, dispatch = Slab.stage_step, Slab.dispatch
    seen = _Seen()
    rows_of_step: list[Any] = []  # the word of the only slab of this process

    def stage_poisoned(self: Any, *, num_rows: int, **more: Any) -> None:
        stream = _current_stream()
        for slot in range(self.shape.num_slots):
            for area, word in _poison(self.shape):
                _fill(driver, stream, self, slot, area, word)
        seen.staged(num_rows, is_padded=num_rows < layout.EVERY_ROW)
        stage_step(self, num_rows=num_rows, **more)

    def dispatch_poisoned(
        self: Any, slot: int, layer_id: int, states: Any, ids: Any, weights: Any, **more: Any
    ) -> None:
        import torch

        if not rows_of_step:  # in a warm-up, not while a graph is captured
            offset = (layout.STEP_WORDS + layout.NUM_STEP_WORDS - 1) * 4
            rows_of_step.append(self._memory.view(offset, (1,), torch.int32))
        places = torch.arange(states.shape[0], device=states.device) + more.get("first_row", 0)
        is_padding = (places >= rows_of_step[0]).unsqueeze(1)
        states = states.masked_fill(is_padding, float("nan"))
        ids = ids.masked_fill(is_padding, _HUGE)
        weights = weights.masked_fill(is_padding, float("inf"))
        dispatch(self, slot, layer_id, states, ids, weights, **more)

    Slab.stage_step = stage_poisoned  # type: ignore[method-assign]
    Slab.dispatch = dispatch_poisoned  # type: ignore[method-assign]
    _count_rows(seen)


def poison_staging() -> None:
    """What an MLP rank's staging buffers hold beyond a unit's rows is no number."""
    from sglang_afd.transport.cuda_ipc.units import UnitExchange

    init = UnitExchange.__init__

    def init_poisoned(self: UnitExchange, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.hidden_states.fill_(float("nan"))
        self.topk_weights.fill_(float("nan"))

    UnitExchange.__init__ = init_poisoned  # type: ignore[method-assign]


def forget_a_row() -> None:
    """The last row of a captured step never leaves."""
    poison_slots()
    _stage_other_rows(-1)


def send_a_padded_row() -> None:
    """One row of padding leaves with a captured step."""
    poison_slots()
    _stage_other_rows(1)


def drop_partial_sum() -> None:
    """The last rank answers with zeros, in kernels as well."""
    from sglang_afd.mlp.experts import Experts

    for name in ("run", "run_on_device"):
        _answer_zeros(Experts, name)


FAULTS = {
    "swap_micro_batches": swap_micro_batches,
    "poison_slots": poison_slots,
    "poison_staging": poison_staging,
    "forget_a_row": forget_a_row,
    "send_a_padded_row": send_a_padded_row,
    "drop_partial_sum": drop_partial_sum,
}


def _answer_zeros(experts: Any, name: str) -> None:
    run = getattr(experts, name)

    def run_and_drop(self: Any, layer_id: int, rows: Any) -> Any:
        partial = run(self, layer_id, rows)
        is_last = self.shard.rank == self.shard.ep_size - 1
        return partial.zero_() if is_last else partial

    setattr(experts, name, run_and_drop)


def _stage_other_rows(difference: int) -> None:
    from sglang_afd.protocol.messages import Kind
    from sglang_afd.transport.cuda_ipc import layout
    from sglang_afd.transport.cuda_ipc.slab import Slab

    stage_step = Slab.stage_step

    def stage_wrongly(self: Any, *, kind: Kind, num_rows: int, **more: Any) -> None:
        is_captured = kind is Kind.DECODE and num_rows < layout.EVERY_ROW
        # One alone would send nothing, or wait for what is never answered.
        changed = num_rows + difference if is_captured and num_rows > 1 else num_rows
        stage_step(self, kind=kind, num_rows=changed, **more)

    Slab.stage_step = stage_wrongly  # type: ignore[method-assign]


class _Seen:
    """What ran, in a file that a test reads."""

    def __init__(self) -> None:
        path = os.environ.get("TEST_ROWS")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600) if path else -1
        self._counts = {"rows": 0, "captured_steps": 0}

    def ran(self, num_rows: int) -> None:
        self._counts["rows"] += num_rows
        self._write()

    def staged(self, num_rows: int, *, is_padded: bool) -> None:
        self._counts["captured_steps"] += is_padded
        self._write()

    def _write(self) -> None:
        if self._file >= 0:
            os.pwrite(self._file, json.dumps(self._counts).ljust(80).encode(), 0)


def _count_rows(seen: _Seen) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def forward_and_count(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.ran(int(forward_batch.input_ids.shape[0]))  # before SGLang pads it
        return forward(self, forward_batch, *args, **kwargs)

    ModelRunner.forward = forward_and_count


def _poison(shape: Any) -> list[tuple[str, int]]:
    areas = [("hidden_states", _NAN), ("topk_ids", _HUGE), ("topk_weights", _NAN)]
    return [*areas, ("replies", _NAN), *([("scales", _NAN)] if shape.is_fp8 else [])]


def _fill(driver: Any, stream: int, slab: Any, slot: int, area: str, word: int) -> None:
    names = list(slab.shape.areas)
    start = slab.shape.slot_offset(slot, area)
    stop = slab.shape.slot_offset(slot, names[names.index(area) + 1])
    if stop > start:
        driver.set_words(stream, slab._memory.address + start, word, (stop - start) // 4)


def _current_stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)
