"""Watches the micro-batches of a server, and faults in them that a test switches on and off.

A watched server writes what it cut to the file `seen` of the directory in TEST_MICRO_BATCHES, and
has the fault that the file `fault` there names.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any


def capture_hidden_states() -> None:
    """The model returns auxiliary hidden states, as it does for EAGLE-3."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load_model = ModelRunner.load_model

    def load_and_capture(self: Any) -> None:
        load_model(self)
        self.model.set_eagle3_layers_to_capture()

    ModelRunner.load_model = load_and_capture


def watch() -> None:
    """What is cut is written down, faults can be switched on, and hidden states are captured."""
    capture_hidden_states()
    directory = Path(os.environ["TEST_MICRO_BATCHES"])
    _note_children(directory / "seen")
    _wrong_order(directory / "fault")
    _wrong_prefix(directory / "fault")
    _wrong_length(directory / "fault")
    _raise_once(directory / "fault")


def note() -> None:
    """Only what was cut is written down."""
    _note_children(Path(os.environ["TEST_MICRO_BATCHES"]) / "seen")


FAULTS = {
    "capture_hidden_states": capture_hidden_states,
    "note_micro_batches": note,
    "watch_micro_batches": watch,
}


def seen(directory: Path) -> set[str]:
    """What a watched server has cut so far."""
    lines = (directory / "seen").read_text().splitlines()
    return {name for line in lines for name in json.loads(line)}


def _has(fault: Path, name: str) -> bool:
    return fault.exists() and fault.read_text() == name


def _note_children(file: Path) -> None:
    from sglang_afd.attn import micro_batch, split_forward

    make_child, call = split_forward.make_child, split_forward.SplitForward.__call__
    file.touch()
    known: set[str] = set()

    def note(names: set[str]) -> None:
        if names - known:
            known.update(names)
            with file.open("a") as out:
                out.write(json.dumps(sorted(names)) + "\n")

    def make_and_note(batch: Any, rows: Any, part: Any) -> Any:
        child = make_child(batch, rows, part)
        note(
            {
                child.forward_mode.name.lower(),
                *(["cut inside"] if part.num_rows_before else []),
                *(["prefix"] if any(child.extend_prefix_lens_cpu or ()) else []),
            }
        )
        return child

    def call_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "raised" in known and "next step" not in known:
            left = _living_greenlets() + (micro_batch._running is not None)
            note({"next step", *(["something left over"] if left else [])})
        try:
            return call(self, *args, **kwargs)
        except Exception:
            note({"raised"})
            raise

    split_forward.make_child = make_and_note
    split_forward.SplitForward.__call__ = call_and_note  # type: ignore[method-assign]


def _living_greenlets() -> int:
    from greenlet import greenlet

    gc.collect()
    return sum(
        issubclass(type(found), greenlet) and not found.dead and found.parent is not None
        for found in gc.get_objects()
    )


def _wrong_order(fault: Path) -> None:
    """The results of a step's micro-batches are put together in the wrong order."""
    from sglang_afd.attn import split_forward

    run_in_turns = split_forward.run_in_turns

    def run_and_swap(slices: Any) -> Any:
        results = run_in_turns(slices)
        return results[::-1] if _has(fault, "wrong order") else results

    split_forward.run_in_turns = run_and_swap


def _wrong_prefix(fault: Path) -> None:
    """A sequence that was cut does not see the row before the cut."""
    from sglang_afd.attn import split_forward

    make_child = split_forward.make_child

    def make_wrongly(batch: Any, rows: Any, part: Any) -> Any:
        child = make_child(batch, rows, part)
        if part.num_rows_before and _has(fault, "wrong prefix"):
            child.extend_prefix_lens[0] -= 1
            child.seq_lens = child.seq_lens.clone()
            child.seq_lens[0] -= 1
        return child

    split_forward.make_child = make_wrongly


def _wrong_length(fault: Path) -> None:
    """In decode, the last sequence of a micro-batch does not see its own row."""
    from sglang_afd.attn import split_forward

    make_child = split_forward.make_child

    def make_wrongly(batch: Any, rows: Any, part: Any) -> Any:
        child = make_child(batch, rows, part)
        if child.forward_mode.is_decode() and _has(fault, "wrong length"):
            child.seq_lens = child.seq_lens.clone()
            child.seq_lens[-1] -= 1
        return child

    split_forward.make_child = make_wrongly


def _raise_once(fault: Path) -> None:
    """A MoE layer of the second micro-batch raises, once, while the first one waits."""
    from sglang_afd.attn import micro_batch
    from sglang_afd.attn.remote_moe import RemoteDispatcher
    from sglang_afd.errors import PeerLost

    dispatch = RemoteDispatcher.dispatch

    def dispatch_or_raise(self: Any, hidden_states: Any, topk_output: Any) -> Any:
        is_second = micro_batch.current(0).id == 1
        if is_second and self._layer_id == 2 and _has(fault, "raise"):
            fault.unlink()
            raise PeerLost("planted in one micro-batch")
        return dispatch(self, hidden_states, topk_output)

    RemoteDispatcher.dispatch = dispatch_or_raise  # type: ignore[method-assign]
