"""Touch-points inside SGLang's scheduler process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from http import HTTPStatus

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = [
    "EVENT_LOOP_HOOK",
    "LOAD_MODEL_HOOK",
    "RUN_BATCH_HOOK",
    "ModelRunner",
    "ScheduleBatch",
    "Scheduler",
    "fail_all_requests",
    "run_scheduler_process",
]

EVENT_LOOP_HOOK = "sglang.srt.managers.scheduler.dispatch_event_loop"
RUN_BATCH_HOOK = "sglang.srt.managers.scheduler.Scheduler.run_batch"
LOAD_MODEL_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


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
    requests = {req.rid: req for req in _all_requests(scheduler) if not req.finished()}
    reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError")
    for req in requests.values():
        req.finished_reason = reason
        if isinstance(req.grammar, futures.Future):
            req.grammar.cancel()
        abort = AbortReq(rid=req.rid, finished_reason=reason.to_json())
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)
    _forget_everything(scheduler)
    return len(requests)


def _all_requests(scheduler: Scheduler) -> Iterator[Req]:
    batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
    if scheduler.enable_overlap:
        batches += [batch for batch, _ in scheduler.result_queue]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue


def _forget_everything(scheduler: Scheduler) -> None:
    scheduler.waiting_queue.clear()
    scheduler.grammar_manager.grammar_queue.clear()
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
    scheduler.grammar_manager.clear()
    scheduler.metrics_reporter.reset_metrics()
