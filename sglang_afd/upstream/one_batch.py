"""Stock SGLang without a server: a model runner whose one batch decodes step by step.

None of our hooks is installed here. A batch gets its context as if a prefix cache had it: a decode
step reads as much, whatever the keys and values are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.benchmark.one_batch import load_model
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args
from torch import Tensor, nn

from sglang_afd.errors import ConfigError, UpstreamMismatch

__all__ = ["FusedMoE", "Layer", "Memory", "StockRunner", "TopK", "chosen", "layers_of"]

PREFILLED_TAIL = 8  # tokens of a context that are really prefilled
_PREFILL_ROWS = 1024  # of one forward
_POOL_LIMIT = 1.0  # random keys and values are uniform within


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A decoder layer with experts, and its parts."""

    number: int
    whole: nn.Module
    attention: RadixAttention
    experts: FusedMoE


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a runner holds."""

    weight_bytes: int
    kv_bytes: int
    kv_pool_tokens: int


class StockRunner:
    """One model, loaded as SGLang loads it; one in a process."""

    def __init__(self, flags: Sequence[str]) -> None:
        server_args = prepare_server_args(list(flags))
        _set_envs_and_config(server_args)
        initialize_moe_config(server_args)
        initialize_fp8_gemm_config(server_args)
        initialize_fp4_gemm_config(server_args)
        ports = PortArgs.init_new(server_args)
        self._bench, _ = load_model(server_args, ports, server_args.base_gpu_id, 0)
        self._runner = self._bench.torch_runner
        self._batch: Any = None
        self._tokens: Any = None
        self._has_random_pool = False

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        model: nn.Module = self._runner.model
        return model

    @property
    def device(self) -> str:
        """cuda or cpu."""
        return str(self._runner.device)

    @property
    def num_graphs(self) -> int:
        """Row buckets of decode graphs; 0 when decoding is eager."""
        graphs = self._runner.decode_cuda_graph_runner
        return 0 if graphs is None else len(graphs.capture_bs)

    @property
    def attention_backend(self) -> str:
        """As SGLang chose it."""
        return str(self._runner.server_args.attention_backend)

    @property
    def moe_runner_backend(self) -> str:
        """As SGLang was told."""
        return str(self._runner.server_args.moe_runner_backend)

    def memory(self) -> Memory:
        """Weights and cache."""
        sizes = self._runner.token_to_kv_pool.get_kv_size_bytes()
        kv_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in self.model.parameters()
        }
        return Memory(
            weight_bytes=sum(storages.values()),
            kv_bytes=int(kv_bytes),
            kv_pool_tokens=int(self._runner.max_total_num_tokens),
        )

    def prepare(self, *, num_rows: int, context: int) -> None:
        """Make a batch of sequences with `context` tokens each.

        Raises:
            ConfigError: The pool does not hold them.
        """
        self._bench.clear()
        cached = max(context - PREFILLED_TAIL, 0)
        if cached and not self._has_random_pool:
            self._fill_pool()
        chunk = max(1, _PREFILL_ROWS // (context - cached))
        vocabulary = self._runner.model_config.vocab_size
        self._batch = None
        for start in range(0, num_rows, chunk):
            rows = range(start, min(start + chunk, num_rows))
            prompts = [_prompt(row, context, vocabulary) for row in rows]
            tokens, _, batch = self._bench.extend([self._request(p, cached) for p in prompts])
            if self._batch is None:
                self._batch, self._tokens = batch, tokens
            else:
                self._batch.merge_batch(batch)
                self._tokens = torch.cat([self._tokens, tokens])
        self.synchronize()

    def step(self) -> None:
        """One decode step of the batch; launched, not waited for."""
        self._tokens, _ = self._bench.decode(self._tokens, self._batch)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._bench.synchronize()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """In here steps run without graphs, so that module hooks see them."""
        graphs, self._runner.decode_cuda_graph_runner = self._runner.decode_cuda_graph_runner, None
        try:
            yield
        finally:
            self._runner.decode_cuda_graph_runner = graphs

    def _request(self, prompt: array[int], cached: int) -> Any:
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
                raise ConfigError(
                    f"the cache of {self._runner.max_total_num_tokens} tokens is too small for "
                    "this batch and context; lower one of them"
                )
            request.prefix_indices = slots.to(torch.int64)
        request.set_extend_range(cached, len(prompt))
        return request

    def _fill_pool(self) -> None:
        for buffer in _buffers(self._runner.token_to_kv_pool):
            buffer.uniform_(-_POOL_LIMIT, _POOL_LIMIT)
        self._has_random_pool = True


def layers_of(model: nn.Module) -> list[Layer]:
    """The decoder layers that have experts, in order.

    Raises:
        UpstreamMismatch: None has both attention and experts in one module.
    """
    attention = {m.layer_id: (n, m) for n, m in model.named_modules() if _is(m, RadixAttention)}
    experts = {m.layer_id: (n, m) for n, m in model.named_modules() if _is(m, FusedMoE)}
    layers = []
    for number in sorted(set(attention) & set(experts)):
        (attention_name, core), (experts_name, moe) = attention[number], experts[number]
        name = _common_parent(attention_name, experts_name)
        if not name.endswith(f".{number}"):
            raise UpstreamMismatch(
                f"layer {number} of {type(model).__name__} has its attention at {attention_name} "
                f"and its experts at {experts_name}, in no module of one layer; profile another "
                "model of the family"
            )
        layers.append(
            Layer(number=number, whole=model.get_submodule(name), attention=core, experts=moe)
        )
    if not layers:
        raise UpstreamMismatch(
            f"{type(model).__name__} has no layer with RadixAttention and FusedMoE; wanted a "
            "mixture-of-experts model"
        )
    return layers


def chosen(ids: Tensor, weights: Tensor) -> StandardTopKOutput:
    """Experts and their weights, as a router hands them to the experts."""
    return StandardTopKOutput(weights, ids, None)


def _buffers(pool: Any) -> list[Tensor]:
    if _is(pool, MHATokenToKVPool):
        buffers = [*pool.k_buffer, *pool.v_buffer]
    elif _is(pool, MLATokenToKVPool):
        buffers = list(pool.kv_buffer)
    else:
        raise ConfigError(
            f"a {type(pool).__name__} holds this model's cache; wanted one whose keys and values "
            "can be filled at random: plain or latent attention in every layer"
        )
    if torch.finfo(buffers[0].dtype).bits < 16:
        raise ConfigError(
            f"the cache holds {buffers[0].dtype}, which cannot be filled at random; leave out "
            "--kv-cache-dtype"
        )
    return buffers


def _is(module: object, kind: type) -> bool:
    return isinstance(module, kind)


def _common_parent(one: str, other: str) -> str:
    shared = []
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        shared.append(left)
    return ".".join(shared)


def _prompt(row: int, num_tokens: int, vocabulary: int) -> array[int]:
    return array("q", np.random.default_rng(row).integers(2, vocabulary, num_tokens).tolist())
