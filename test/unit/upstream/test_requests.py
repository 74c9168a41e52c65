from __future__ import annotations

import pkgutil
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.upstream import requests
from sglang_afd.upstream.requests import Req, ScheduleBatch

FINISH_LENGTH = pkgutil.resolve_name("sglang.srt.managers.schedule_batch.FINISH_LENGTH")
ReqKvInfo = pkgutil.resolve_name("sglang.srt.managers.schedule_batch.ReqKvInfo")
SamplingParams = pkgutil.resolve_name("sglang.srt.sampling.sampling_params.SamplingParams")


def make_request(rid: str, outputs: list[int], **more: Any) -> Req:
    """A request that has run: it owns cache and has got some tokens."""
    req = Req(rid, "", array("q", [1, 2, 3]), SamplingParams(max_new_tokens=9), **more)
    req.output_ids.extend(outputs)
    req.send_token_offset = len(outputs)
    req.kv = ReqKvInfo(kv_allocated_len=5, swa_evicted_seqlen=0)
    req.req_pool_idx = 0
    return req


class Emptied:
    """A cache or a pool that counts how often it was emptied."""

    def __init__(self) -> None:
        self.num_times = 0

    def clear(self) -> None:
        self.num_times += 1

    reset = clear


class Scheduler(SimpleNamespace):
    """What `upstream/requests.py` touches of SGLang's scheduler, in the middle of a step."""

    def __init__(self, **batches: list[Req]) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.caches = [Emptied() for _ in range(3)]
        super().__init__(
            running_batch=ScheduleBatch(reqs=batches.get("running", [])),
            last_batch=ScheduleBatch(reqs=batches.get("last", [])),
            cur_batch_for_debug=ScheduleBatch(reqs=batches.get("current", [])),
            result_queue=deque([(ScheduleBatch(reqs=batches.get("results", [])), None)]),
            enable_overlap=True,
            chunked_req=None,
            _pending_chunked_abort_req=None,
            waiting_queue=batches.get("waiting", []),
            grammar_manager=SimpleNamespace(grammar_queue=[], clear=lambda: None),
            tree_cache=self.caches[0],
            req_to_token_pool=self.caches[1],
            token_to_kv_pool_allocator=self.caches[2],
            metrics_reporter=SimpleNamespace(reset_metrics=lambda: None),
            ipc_channels=SimpleNamespace(
                send_to_tokenizer=SimpleNamespace(
                    send_output=lambda message, req: self.sent.append((req.rid, message))
                )
            ),
        )


def retract(
    scheduler: Scheduler, is_hopeless: Callable[[str, int], bool] = lambda rid, num_tokens: False
) -> tuple[int, int]:
    return requests.retract_running_requests(scheduler, is_hopeless)  # type: ignore[arg-type]


def queue_of(scheduler: Scheduler) -> list[str]:
    return [req.rid for req in scheduler.waiting_queue]


def test_running_requests_wait_in_front_in_their_order_with_the_tokens_they_have() -> None:
    a, b, c, new = (make_request(rid, [7, 8]) for rid in ("a", "b", "c", "new"))
    waiting = Req("waits", "", array("q", [1]), SamplingParams())
    scheduler = Scheduler(
        running=[a, b], results=[a, b], last=[a, b, c], current=[new], waiting=[waiting]
    )

    counts = retract(scheduler)

    assert counts == (4, 0)
    assert queue_of(scheduler) == ["a", "b", "c", "new", "waits"]
    for req in (a, b, c, new):
        assert (list(req.output_ids), req.send_token_offset) == ([7, 8], 2)
        assert (req.kv, req.req_pool_idx, req.kv_committed_len) == (None, None, 0)
    assert scheduler.sent == []


def test_nothing_of_the_step_is_left_for_the_next_turn_of_the_event_loop() -> None:
    req = make_request("a", [7])
    scheduler = Scheduler(running=[req], results=[req], last=[req], current=[req])
    scheduler.chunked_req = req

    retract(scheduler)

    assert scheduler.running_batch.reqs == []
    assert not scheduler.result_queue
    assert scheduler.last_batch is scheduler.cur_batch_for_debug is scheduler.chunked_req is None
    assert [cache.num_times for cache in scheduler.caches] == [1, 1, 1]


def test_finished_requests_that_are_still_in_a_batch_are_left_alone() -> None:
    done = make_request("done", [7])
    done.finished_reason = FINISH_LENGTH(length=1)
    scheduler = Scheduler(running=[done], current=[make_request("a", [])])

    assert retract(scheduler) == (1, 0)
    assert queue_of(scheduler) == ["a"]


def test_a_request_that_sglang_has_just_retracted_is_not_queued_twice() -> None:
    req = make_request("a", [7])
    scheduler = Scheduler(results=[req], waiting=[req])

    retract(scheduler)

    assert queue_of(scheduler) == ["a"]


@pytest.mark.parametrize("outputs", [[], [7]])
def test_embeddings_start_over_before_their_first_token_and_fail_after_it(
    outputs: list[int],
) -> None:
    req = make_request("a", outputs, input_embeds=[[0.5]])
    scheduler = Scheduler(running=[req])

    counts = retract(scheduler)

    if outputs:
        [(rid, abort)] = scheduler.sent
        assert (counts, queue_of(scheduler), rid) == ((0, 1), [], "a")
        assert abort.finished_reason["status_code"] == 503
        assert "input_embeds" in abort.finished_reason["message"]
    else:
        assert (counts, queue_of(scheduler), scheduler.sent) == ((1, 0), ["a"], [])


def test_a_request_without_hope_fails_and_the_others_wait() -> None:
    bad, good = make_request("bad", [7, 8]), make_request("good", [7])
    scheduler = Scheduler(running=[bad, good])

    counts = retract(scheduler, lambda rid, num_tokens: num_tokens == 2)

    [(rid, abort)] = scheduler.sent
    assert (counts, queue_of(scheduler), rid) == ((1, 1), ["good"], "bad")
    assert abort.finished_reason["status_code"] == 503
    assert "each time that this request ran" in abort.finished_reason["message"]


def test_a_request_whose_client_left_during_its_prefill_ends_there() -> None:
    left = make_request("left", [])
    scheduler = Scheduler(current=[left])
    scheduler.chunked_req = scheduler._pending_chunked_abort_req = left

    counts = retract(scheduler)

    [(rid, abort)] = scheduler.sent
    assert (counts, queue_of(scheduler), rid) == ((0, 0), [], "left")
    assert abort.rid == "left"


def test_every_request_fails_once_with_503_and_the_message() -> None:
    req, waiting = make_request("a", [7]), make_request("waits", [])
    scheduler = Scheduler(running=[req], results=[req], waiting=[waiting])

    num_failed = requests.fail_all_requests(scheduler, "nobody came")  # type: ignore[arg-type]

    assert num_failed == 2
    assert [rid for rid, _ in scheduler.sent] == ["a", "waits"]
    assert all(
        (abort.finished_reason["status_code"], abort.finished_reason["message"])
        == (503, "nobody came")
        for _, abort in scheduler.sent
    )
    assert queue_of(scheduler) == []
