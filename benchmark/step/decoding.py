"""A ModelRunner that is driven step by step through SGLang's own one-batch benchmark."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from step.cases import PREFILLED_TAIL, PROBE_STEPS, PROBE_TOKENS, probed_rows
from step.one_ahead import OneAhead
from step.routing import Routing

CHUNK_ROWS = 1024  # of one prefill
PROBE_CHUNK_ROWS = 512  # an MLP server runs them at once, as stock SGLang does
POOL_LIMIT = 1.0  # random keys and values are uniform within

# Entered around every forward with (is it a decode step, its rows, rows of the next or 0).
Around = Callable[[bool, int, int], AbstractContextManager[None]]


def nothing_around(is_decode: bool, num_rows: int, num_next: int) -> AbstractContextManager[None]:
    """Of stock SGLang."""
    return contextlib.nullcontext()


class Decoder:
    """One model, and the batch that decodes."""

    def __init__(self, server_args: Any, around: Around) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs

        one_batch._set_envs_and_config(server_args)
        one_batch.initialize_moe_config(server_args)
        one_batch.initialize_fp8_gemm_config(server_args)
        one_batch.initialize_fp4_gemm_config(server_args)
        ports = PortArgs.init_new(server_args)
        self._one_batch = one_batch
        self._bench, _ = one_batch.load_model(server_args, ports, server_args.base_gpu_id, 0)
        self._runner = self._bench.torch_runner
        self._around = around
        self._vocabulary = self._runner.model_config.vocab_size
        self._batch: Any = None
        self._tokens: Any = None
        self._has_random_pool = False

    @property
    def num_graphs(self) -> int:
        """Row buckets of decode graphs; 0 when decoding is eager."""
        graphs = self._runner.decode_cuda_graph_runner
        return 0 if graphs is None else len(graphs.capture_bs)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the key-value pool holds."""
        return int(self._runner.max_total_num_tokens)

    def prepare(self, *, first_row: int, num_rows: int, context: int, is_cached: bool) -> None:
        """Make a batch whose sequences have `context` tokens.

        Args:
            first_row: Of the whole batch of all servers; seeds the prompts.
            num_rows: Of this server.
            context: Tokens of each sequence.
            is_cached: All but the last tokens are keys and values at random, as if a prefix cache
                had them; a decode step reads as much, and nothing depends on what they are.
        """
        self._bench.clear()
        cached = context - PREFILLED_TAIL if is_cached else 0
        if cached and not self._has_random_pool:
            self._fill_pool()
        chunk = max(1, CHUNK_ROWS // (context - cached))
        for start in range(0, num_rows, chunk):
            rows = range(first_row + start, first_row + min(start + chunk, num_rows))
            prompts = [_prompt(row, context, self._vocabulary) for row in rows]
            self._extend(prompts, cached, is_first=start == 0)
        self._bench.synchronize()

    def decode(self, *, warm: int, steps: int) -> tuple[list[float], list[float]]:
        """Times of `steps` decode steps in ms, after `warm` others: wall clock, and of the device.

        The device is idle before and after each step, so that host and device times add up as they
        do for a step whose result is waited for.
        """
        wall: list[float] = []
        device: list[float] = []
        for number in range(warm + steps):
            is_last = number == warm + steps - 1
            wall_ms, device_ms = self._timed_step(is_last)
            if number >= warm:
                wall.append(wall_ms)
                device += [] if device_ms is None else [device_ms]
        return wall, device

    def decode_plain(self, steps: int) -> None:
        """Decode steps that nobody times."""
        self._launch_ahead(steps)

    def decode_stream(self, steps: int) -> float:
        """Milliseconds of a step when each is launched while the one before runs.

        So SGLang's overlap scheduler runs them: the host's part of a step is hidden. The first step
        does not count, for which the device has nothing to do until it is launched.
        """
        self._bench.synchronize()
        marks = self._launch_ahead(1 + steps)
        return _milliseconds(marks[0], marks[-1]) / steps

    def touched(self) -> list[list[int]]:
        """One more step, without graphs: the experts that got a row, layer by layer."""
        graphs, self._runner.decode_cuda_graph_runner = self._runner.decode_cuda_graph_runner, None
        try:
            with Routing(self._runner.model) as routing:
                self._step(is_last=True)
        finally:
            self._runner.decode_cuda_graph_runner = graphs
        return routing.touched()

    def probe(self, num_rows: int, first: int) -> np.ndarray[Any, Any]:
        """Next-token logits of prompts and of teacher-forced decode steps.

        Args:
            num_rows: Prompts, which decode as one batch; each is the same in every batch.
            first: Which one comes first; those before it come last. So no two servers have the
                same prompt in the same row, and rows that go to the other one do not fit.

        Returns: [1 + PROBE_STEPS, prompts, vocabulary], of the prompts `probed_rows(num_rows)`.
        """
        self._bench.clear()
        self._batch = None
        prompts = [
            _prompt(
                10_000_000 + (first + row) % num_rows, PROBE_TOKENS + PROBE_STEPS, self._vocabulary
            )
            for row in range(num_rows)
        ]
        chunk = max(1, PROBE_CHUNK_ROWS // PROBE_TOKENS)
        prefilled = []
        for start in range(0, num_rows, chunk):
            part = [prompt[:PROBE_TOKENS] for prompt in prompts[start : start + chunk]]
            prefilled.append(self._extend(part, 0, is_first=start == 0).clone())
        rows = [(prompt - first) % num_rows for prompt in probed_rows(num_rows)]
        found = [torch.cat(prefilled)[rows].float().cpu().numpy()]
        for number in range(PROBE_STEPS):
            tokens = [prompt[PROBE_TOKENS + number] for prompt in prompts]
            self._tokens = torch.tensor(tokens, device=self._runner.device)
            logits = self._step(is_last=number == PROBE_STEPS - 1)
            found.append(logits[rows].float().cpu().numpy())
        return np.stack(found)

    def _extend(self, prompts: list[array[int]], cached: int, *, is_first: bool) -> Any:
        requests = [self._request(prompt, cached) for prompt in prompts]
        num_rows = sum(len(prompt) - cached for prompt in prompts)
        with self._around(False, num_rows, 0):
            tokens, logits, batch = self._bench.extend(requests)
        if is_first:
            self._batch, self._tokens = batch, tokens
        else:
            self._batch.merge_batch(batch)
            self._tokens = torch.cat([self._tokens, tokens])
        return logits

    def _request(self, prompt: array[int], cached: int) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        request = Req(
            rid=str(id(prompt)),
            origin_input_text="",
            origin_input_ids=prompt,
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        if cached:
            slots = self._runner.token_to_kv_pool_allocator.alloc(cached)
            if slots is None:
                raise RuntimeError(f"the key-value pool of {self.pool_tokens} tokens is too small")
            request.prefix_indices = slots.to(torch.int64)
        request.set_extend_range(cached, len(prompt))
        return request

    def _fill_pool(self) -> None:
        pool = self._runner.token_to_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.uniform_(-POOL_LIMIT, POOL_LIMIT)
        self._has_random_pool = True

    def _launch_ahead(self, steps: int) -> list[Any]:
        """Marks of the ends of steps that are over when this returns."""
        ahead = OneAhead()
        marks = []
        for number in range(steps):
            self._step(is_last=number == steps - 1)
            marks.append(self._mark())
            if self._runner.device == "cuda":
                ahead.launched(marks[-1])
        self._bench.synchronize()
        return marks

    def _timed_step(self, is_last: bool) -> tuple[float, float | None]:
        self._bench.synchronize()
        started_s = time.perf_counter()
        began = self._mark()
        self._step(is_last=is_last)
        ended = self._mark()
        self._bench.synchronize()
        wall_ms = (time.perf_counter() - started_s) * 1e3
        return wall_ms, None if self._runner.device == "cpu" else _milliseconds(began, ended)

    def _mark(self) -> Any:
        """This place in the device's stream; now, on a CPU."""
        if self._runner.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _step(self, *, is_last: bool) -> Any:
        num_rows = len(self._batch.reqs)
        with self._around(True, num_rows, 0 if is_last else num_rows):
            self._tokens, logits = self._bench.decode(self._tokens, self._batch)
        return logits


def _milliseconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float((ended - began) * 1e3)
    return float(began.elapsed_time(ended))


def _prompt(row: int, num_tokens: int, vocabulary: int) -> array[int]:
    return array("q", np.random.default_rng(row).integers(2, vocabulary, num_tokens).tolist())
