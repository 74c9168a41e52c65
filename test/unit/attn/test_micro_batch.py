from __future__ import annotations

import contextvars
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import greenlet
import pytest
import torch

from sglang_afd.attn import micro_batch
from sglang_afd.attn.micro_batch import Slice, current, let_others_run, run_in_turns
from sglang_afd.errors import PeerLost
from sglang_afd.upstream import forward_state
from sglang_afd.upstream.forward_state import ForwardContext

NUM_LAYERS = 3


def context(name: str) -> ForwardContext:
    return ForwardContext(attn_backend=SimpleNamespace(name=name))


@pytest.fixture(autouse=True)
def step() -> Iterator[ForwardContext]:
    """The forward context of the step; the globals must be as before at its end."""
    before = forward_state.capture()
    outer = context("step")
    forward_state.set_forward_context(outer)
    yield outer
    assert forward_state.capture().context is outer
    assert forward_state.capture().flags == before.flags
    assert micro_batch._running is None
    forward_state.restore(before)


def slices(*forwards: Callable[[], Any], rows: int = 4) -> list[Slice]:
    return [
        Slice(num_rows=rows + index, forward=forward, context=context(f"micro-batch {index}"))
        for index, forward in enumerate(forwards)
    ]


def layers(log: list[tuple[str, int, int]], index: int) -> Callable[[], int]:
    """A forward that notes what it does in which order."""

    def forward() -> int:
        for layer in range(NUM_LAYERS):
            log.append(("send", layer, current(99).id))
            let_others_run()
            log.append(("wait", layer, current(99).id))
        return index

    return forward


def living_greenlets() -> list[greenlet.greenlet]:
    gc.collect()
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), greenlet.greenlet)
        and not found.dead
        and found.parent is not None
    ]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_micro_batches_send_in_turns_and_wait_one_turn_later(number: int) -> None:
    log: list[tuple[str, int, int]] = []

    results = run_in_turns(slices(*(layers(log, index) for index in range(number))))

    expected = [("send", 0, index) for index in range(number)]
    for layer in range(NUM_LAYERS):
        for index in range(number):
            expected.append(("wait", layer, index))
            if layer + 1 < NUM_LAYERS:
                expected.append(("send", layer + 1, index))
    assert log == expected
    assert results == list(range(number))
    assert living_greenlets() == []


def test_outside_a_split_step_everything_is_micro_batch_0_of_1() -> None:
    let_others_run()

    assert current(17) == micro_batch.MicroBatch(id=0, number=1, most_rows=17)


def test_a_micro_batch_knows_how_many_there_are_and_the_largest() -> None:
    seen = run_in_turns(slices(lambda: current(0), lambda: current(0), rows=7))

    assert [(one.id, one.number, one.most_rows) for one in seen] == [(0, 2, 8), (1, 2, 8)]


def test_each_micro_batch_keeps_its_own_attention_backend_and_flags() -> None:
    def forward() -> list[tuple[str, bool]]:
        seen = []
        flags = forward_state.get_forward()
        with flags.scoped(fuse_mlp_allreduce=current(0).id == 1, multi_stream=True):
            for _ in range(NUM_LAYERS):
                let_others_run()
                backend = forward_state.get_forward_context().attn_backend
                seen.append((backend.name, flags.fuse_mlp_allreduce))
        return seen

    first, second = run_in_turns(slices(forward, forward))

    assert first == [("micro-batch 0", False)] * NUM_LAYERS
    assert second == [("micro-batch 1", True)] * NUM_LAYERS
    assert forward_state.get_forward().multi_stream is False


def test_context_variables_are_each_micro_batchs_own() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    def forward() -> int:
        variable.set(variable.get() + current(0).id)
        let_others_run()
        return variable.get()

    assert run_in_turns(slices(forward, forward)) == [5, 6]
    assert variable.get() == 5


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_gradient_mode_of_the_step_holds_in_every_micro_batch(mode: Any) -> None:
    def forward() -> tuple[bool, bool]:
        let_others_run()
        return torch.is_grad_enabled(), torch.zeros(1).is_inference()

    with mode():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        seen = run_in_turns(slices(forward, forward))

    assert seen == [expected, expected]


def test_a_forward_that_holds_a_mode_of_the_thread_across_an_exchange_is_refused() -> None:
    def forward() -> None:
        with torch.inference_mode():
            let_others_run()

    with pytest.raises(AssertionError, match="micro-batch 0 holds .*is_inference=True"):
        run_in_turns(slices(forward, forward))

    assert not torch.is_inference_mode_enabled()


@contextmanager
def noted(log: list[str], name: str) -> Iterator[None]:
    try:
        with forward_state.get_forward().scoped(fuse_mlp_allreduce=True, multi_stream=True):
            yield
    finally:
        log.append(f"{name} left in {forward_state.get_forward_context().attn_backend.name}")


@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 2])
def test_an_exception_in_one_ends_the_others_and_leaves_no_trace(faulty: int, layer: int) -> None:
    log: list[str] = []
    num_ran = 0

    def forward() -> int:
        nonlocal num_ran
        own = current(0).id
        for at in range(NUM_LAYERS):
            with noted(log, str(own)):
                if own == faulty and at == layer:
                    raise PeerLost("planted")
                let_others_run()
        num_ran += 1
        return own

    with pytest.raises(PeerLost, match="planted"):
        run_in_turns(slices(forward, forward, forward))

    assert num_ran == 0
    ended = [entry for entry in log[-3:] if entry]
    assert f"{faulty} left in micro-batch {faulty}" in ended
    assert all(entry.split()[0] == entry.split()[-1] for entry in log)
    assert living_greenlets() == []

    faulty = -1
    assert run_in_turns(slices(forward, forward, forward)) == [0, 1, 2]


def test_an_exception_in_the_cleanup_of_another_does_not_hide_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def careless() -> None:
        try:
            let_others_run()
        finally:
            raise ValueError("in cleanup")

    def faulty() -> None:
        raise PeerLost("first")

    with pytest.raises(PeerLost, match="first"):
        run_in_turns(slices(careless, faulty))

    assert "while micro-batch 0 was ended" in caplog.text
    assert living_greenlets() == []


def test_micro_batches_that_were_never_run_are_ended_too() -> None:
    ran = []

    def faulty() -> None:
        raise PeerLost("at once")

    with pytest.raises(PeerLost):
        run_in_turns(slices(faulty, lambda: ran.append(1)))

    assert ran == []
    assert living_greenlets() == []
