"""What becomes of SGLang's requests when a forward could not be finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from http import HTTPStatus

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler

__all__ = ["fail_all_requests", "read_input", "retract_running_requests"]


def fail_all_requests(scheduler: Scheduler, message: str) -> int:
    """End every request with 503 and bring the scheduler back to where it had none.

    After a forward that raised, nothing of the running requests can be kept: the key-value cache of
    this step and of the one launched after it is incomplete, and the prefix cache may already hold
    it. So the requests are failed, and every cache is emptied as `flush_cache` does when idle.

    Args:
        scheduler: Its event loop has ended with an exception and will be entered again.
        message: What the clients are told.

    Returns: How many requests were failed.
    """
    requests = _unfinished(
        [
            *_running_requests(scheduler),
            *scheduler.waiting_queue,
            *scheduler.grammar_manager.grammar_queue,
        ]
    )
    for req in requests:
        _fail(scheduler, req, message)
    scheduler.waiting_queue.clear()
    scheduler.grammar_manager.grammar_queue.clear()
    scheduler.grammar_manager.clear()
    _forget_running(scheduler)
    return len(requests)


def retract_running_requests(
    scheduler: Scheduler, is_hopeless: Callable[[str, int], bool]
) -> tuple[int, int]:
    """Put every running request back in front of the queue, to be prefilled with its tokens so far.

    What a client has been sent is kept, and goes on where it ended: the results of the steps in
    flight are dropped before anybody has seen them. The key-value cache is emptied, as in
    `fail_all_requests`; so the requests own nothing in it that would have to be given back.

    Args:
        scheduler: Its event loop has ended with an exception and will be entered again.
        is_hopeless: Told a request's id and how many tokens it has: should it be failed instead?

    Returns: How many requests were retracted, and how many had to be failed instead.
    """
    retracted: list[Req] = []
    num_failed = 0
    for req in _unfinished(_running_requests(scheduler)):
        if req is scheduler._pending_chunked_abort_req:  # its client has left
            scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
        elif reason := _why_not_again(req, is_hopeless):
            _fail(scheduler, req, reason)
            num_failed += 1
        else:
            retracted.append(req)
    _forget_running(scheduler)
    for req in retracted:
        req.kv = None
        req.req_pool_idx = None
        req.reset_for_retract()
        req.time_stats.set_wait_queue_entry_time()
    waiting = {id(req) for req in retracted}
    scheduler.waiting_queue[:] = retracted + [
        req for req in scheduler.waiting_queue if id(req) not in waiting
    ]
    return len(retracted), num_failed


def _why_not_again(req: Req, is_hopeless: Callable[[str, int], bool]) -> str:
    if req.input_embeds is not None and req.output_ids:
        # SGLang generates such a request anew after a retraction, perhaps with other tokens.
        return (
            "the MLP servers were away for too long, and a request with input_embeds cannot go on "
            "after that; send it again"
        )
    if is_hopeless(req.rid, len(req.output_ids)):
        return (
            "the MLP servers went away each time that this request ran, so they may not survive it"
        )
    return ""


def read_input(scheduler: Scheduler) -> None:
    """The part of SGLang's event loop that takes requests, aborts and questions, and runs none."""
    scheduler.process_input_requests(scheduler.request_receiver.recv_requests())


def _running_requests(scheduler: Scheduler) -> Iterator[Req]:
    """Those that have been in a batch, in the order of the batches."""
    batches = [scheduler.running_batch]
    if scheduler.enable_overlap:
        batches += [batch for batch, _ in scheduler.result_queue]
    batches += [scheduler.last_batch, scheduler.cur_batch_for_debug]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def _unfinished(requests: Iterator[Req] | list[Req]) -> list[Req]:
    return list({req.rid: req for req in requests if not req.finished()}.values())


def _fail(scheduler: Scheduler, req: Req, message: str) -> None:
    reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError")
    req.finished_reason = reason
    if isinstance(req.grammar, futures.Future):
        req.grammar.cancel()
    abort = AbortReq(rid=req.rid, finished_reason=reason.to_json())
    scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)


def _forget_running(scheduler: Scheduler) -> None:
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.last_batch = None
    scheduler.cur_batch_for_debug = None
    scheduler.chunked_req = None
    scheduler._pending_chunked_abort_req = None
    if scheduler.enable_overlap:
        scheduler.result_queue.clear()
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    scheduler.metrics_reporter.reset_metrics()
