"""What SGLang's scheduler has to do, by its own accounts."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler

__all__ = ["free_kv_tokens", "num_running", "num_tokens_of", "num_waiting"]


def num_running(scheduler: Scheduler, batch: ScheduleBatch | None) -> int:
    """Requests that have a place in the cache; `batch` was launched last, None when idle."""
    if batch is None:
        return len(scheduler.running_batch.reqs)
    if batch.forward_mode.is_decode() or batch.forward_mode.is_mixed():
        return len(batch.reqs)
    return len(scheduler.running_batch.reqs) + len(batch.reqs)


def num_waiting(scheduler: Scheduler) -> int:
    """Requests that wait for a place, or for their grammar."""
    return len(scheduler.waiting_queue) + len(scheduler.grammar_manager.grammar_queue)


def free_kv_tokens(scheduler: Scheduler) -> int:
    """Tokens that the cache has room for; of a cache in several parts the fullest counts."""
    num_used, _ = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
    return max(0, int(scheduler.max_total_num_tokens - num_used))


def num_tokens_of(scheduler: Scheduler, batch: ScheduleBatch) -> int:
    """Tokens that a step generates: one for each request whose prompt is through."""
    if batch.forward_mode.is_decode():
        return len(batch.reqs)
    return len(batch.reqs) - (scheduler.chunked_req is not None)
