"""What SGLang's layers expect of their process, set up without a scheduler or a model runner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.model_loader.loader import (
    _get_quantization_config,
    _initialize_model,
    device_loading_context,
)
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs
from torch import distributed, nn

from sglang_afd.topology import ExpertShard

__all__ = [
    "ModelConfig",
    "build_skeleton",
    "enter_process",
    "fill_dummy",
    "finish_weights",
    "import_model",
]


def import_model(server_args: ServerArgs) -> None:
    """Import the model's class, which takes seconds, before there is anything to load."""
    get_model_architecture(ModelConfig.from_server_args(server_args))


def enter_process(server_args: ServerArgs) -> ModelConfig:
    """Publish the arguments, choose the GPU and make SGLang's process groups; once in a process.

    The groups have one rank and an in-process store, so no rendezvous port is taken.
    """
    publish(server_args, role="scheduler")
    if server_args.device != "cpu":
        torch.get_device_module(server_args.device).set_device(server_args.base_gpu_id)
    model_config = ModelConfig.from_server_args(server_args)
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=server_args.base_gpu_id,
        distributed_init_method="env://",
        backend="gloo",
    )
    initialize_model_parallel(tensor_model_parallel_size=1)
    initialize_dp_attention(server_args, model_config)
    initialize_moe_config(server_args)
    initialize_fp8_gemm_config(server_args)
    if server_args.enable_deterministic_inference:
        enable_batch_invariant_mode()
    return model_config


@contextmanager
def _expert_parallel(shard: ExpertShard) -> Iterator[None]:
    with get_parallel().override(
        moe_ep_size=shard.ep_size, moe_ep_rank=shard.rank, moe_tp_size=1, moe_tp_rank=0
    ):
        yield


def build_skeleton(
    server_args: ServerArgs, model_config: ModelConfig, shard: ExpertShard
) -> nn.Module:
    """The model's own class on the meta device; only what a hook makes real has memory.

    Args:
        server_args: As published.
        model_config: Of `enter_process`.
        shard: Makes SGLang's layers think that they are one of `ep_size` ranks.
    """
    # NOTE: the registry imports every model's module on first use, which fails on the meta device.
    get_model_architecture(model_config)
    load_config = LoadConfig(load_format=server_args.load_format)
    with (
        _expert_parallel(shard),
        set_default_torch_dtype(model_config.dtype),
        torch.device("meta"),
    ):
        quantization = _get_quantization_config(model_config, load_config)
        model: nn.Module = _initialize_model(model_config, load_config, quantization)
        return model


def fill_dummy(layer: nn.Module) -> None:
    """SGLang's dummy weights for one layer."""
    initialize_dummy_weights(layer)


def finish_weights(layer: FusedMoE, device: str) -> None:
    """What SGLang does with a layer's weights once they are loaded."""
    with device_loading_context(layer, torch.device(device)):
        layer.quant_method.process_weights_after_loading(layer)
