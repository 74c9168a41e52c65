"""Touch-points inside SGLang's scheduler process."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = [
    "EVENT_LOOP_HOOK",
    "FORWARD_HOOK",
    "IDLE_HOOK",
    "LOAD_MODEL_HOOK",
    "PROCESS_RESULT_HOOK",
    "RUN_BATCH_HOOK",
    "ForwardBatch",
    "GenerationBatchResult",
    "ModelRunner",
    "ScheduleBatch",
    "Scheduler",
    "run_scheduler_process",
]

EVENT_LOOP_HOOK = "sglang.srt.managers.scheduler.dispatch_event_loop"
IDLE_HOOK = "sglang.srt.managers.scheduler.Scheduler.on_idle"
RUN_BATCH_HOOK = "sglang.srt.managers.scheduler.Scheduler.run_batch"
PROCESS_RESULT_HOOK = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
LOAD_MODEL_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


def wait_until_there(result: GenerationBatchResult) -> None:
    """Until a step has ended and its results are in host memory, as far as they are on their way.

    Without the overlap scheduler nothing is on its way; then until the current stream has run dry.
    """
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def forecast_rows(scheduler: Scheduler, batch: ScheduleBatch) -> int | None:
    """Rows of the decode step that follows `batch`, which has just been launched.

    Requests that end by their length are left out one step late, as SGLang itself does; an end by
    a stop token is not foreseen.

    Returns: 0 when nothing goes on, None when a prefill may come first.
    """
    may_admit = bool(scheduler.waiting_queue) and not scheduler.running_batch.batch_is_full
    if may_admit or scheduler.chunked_req is not None:
        return None
    requests = {req.rid: req for req in (*scheduler.running_batch.reqs, *batch.reqs)}
    going_on = [
        req
        for req in requests.values()
        if not req.finished() and len(req.output_ids) + 1 < req.sampling_params.max_new_tokens
    ]
    return len(going_on)


def num_rows_of(batch: ScheduleBatch) -> int:
    """Rows of the forward of a batch: one for each decoding request, or the tokens of a prefill."""
    if batch.forward_mode.is_decode():
        return len(batch.reqs)
    return int(batch.extend_num_tokens or 0)
