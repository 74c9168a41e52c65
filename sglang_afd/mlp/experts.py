"""The experts of one rank, built from the model's own class and run by SGLang's own layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_afd.errors import ConfigError
from sglang_afd.fingerprint import safetensors_files
from sglang_afd.topology import ExpertShard
from sglang_afd.transport.base import Rows
from sglang_afd.upstream import environment, hooks
from sglang_afd.upstream.moe import (
    MOE_CLASS_HOOK,
    FusedMoE,
    StandardDispatchOutput,
    StandardTopKOutput,
    limit_deep_gemm,
    prepare_for_device_rows,
)
from sglang_afd.upstream.server_args import ServerArgs
from sglang_afd.upstream.weights import ReadCount, is_expert_tensor, read_tensors


class LocalFusedMoE(FusedMoE):
    """A real `FusedMoE` inside a model whose other modules are on the meta device."""

    device = "cpu"  # where the experts live; set once, before the model is built
    ep_size = 1  # pads the number of experts to a multiple of it

    def __init__(self, *args: Any, num_experts: int, **kwargs: Any) -> None:
        shard = ExpertShard(rank=0, ep_size=self.ep_size, num_experts=num_experts)
        with torch.device(self.device):
            super().__init__(*args, num_experts=shard.num_padded, **kwargs)
        self.num_logical_experts = num_experts


class Experts:
    """Every MoE layer of one rank.

    Args:
        server_args: SGLang's.
        rank: Ours.
        ep_size: Ranks of the group.
        deep_gemm_sms: Multiprocessors for DeepGEMM's kernels; 0 leaves them all.

    Raises:
        ConfigError: No MoE layer went through SGLang's class hook, or the quantisation fuses the
            routed scaling factor into top-k, which the attention side would not know of.
    """

    def __init__(
        self, server_args: ServerArgs, *, rank: int, ep_size: int, deep_gemm_sms: int = 0
    ) -> None:
        self.read_count = ReadCount()
        self._deep_gemm_sms = deep_gemm_sms
        self._device = server_args.device
        hooks.install(
            [
                hooks.Hook(
                    target=MOE_CLASS_HOOK, type=hooks.REPLACE, function=lambda _: LocalFusedMoE
                )
            ]
        )
        model_config = environment.enter_process(server_args)
        LocalFusedMoE.device, LocalFusedMoE.ep_size = self._device, ep_size
        places = ExpertShard(rank=rank, ep_size=ep_size, num_experts=ep_size)
        skeleton = environment.build_skeleton(server_args, model_config, places)
        self.layers = {
            module.layer_id: module
            for module in skeleton.modules()
            if isinstance(module, LocalFusedMoE)
        }
        self._check(skeleton, model_config.hf_config.architectures[0])
        first = next(iter(self.layers.values()))
        self.shard = ExpertShard(rank=rank, ep_size=ep_size, num_experts=first.num_logical_experts)
        self.dtype: torch.dtype = model_config.dtype
        self.architecture: str = model_config.hf_config.architectures[0]
        self.hidden_size: int = first.hidden_size
        self.top_k: int = first.top_k
        self._load(server_args, skeleton)
        self._unfit: str | None = None
        if self._device != "cpu":
            unfit = [prepare_for_device_rows(layer) for layer in self.layers.values()]
            self._unfit = next((runner for runner in unfit if runner is not None), None)
            self._warm_up()

    def run(self, layer_id: int, rows: Rows) -> Tensor:
        """This rank's share of one layer's expert sum.

        Args:
            layer_id: A key of `layers`.
            rows: In host memory, of one or of many peers; only choices of our experts count.

        Returns: [T, H] in the model's dtype, in host memory; zeros where no choice was ours.
        """
        layer = self.layers[layer_id]
        local_ids = rows.topk_ids - self.shard.first
        is_ours = (local_ids >= 0) & (local_ids < self.shard.stop - self.shard.first)
        hidden_states = rows.hidden_states.to(self._device)
        weights = rows.topk_weights.to(self._device)
        if bool(is_ours.all()):
            partial = _run_layer(layer, hidden_states, local_ids.to(self._device), weights)
        elif self._device != "cpu" and self.shard.ep_size > 1:
            # SGLang's GPU kernels skip -1, but only where a rank owns a part of the experts.
            local_ids = local_ids.masked_fill(~is_ours, -1).to(self._device)
            partial = _run_layer(layer, hidden_states, local_ids, weights)
        else:
            partial = _run_pairs(layer, hidden_states, local_ids, weights, is_ours)
        return partial.cpu()

    def run_on_device(self, layer_id: int, rows: Rows) -> Tensor:
        """The same for rows on this rank's GPU; launches kernels, waits for none; capturable.

        Args:
            layer_id: A key of `layers`.
            rows: With ids as this rank counts its experts; -1 goes nowhere.

        Returns: [T, H] in the model's dtype, in memory of its own; rows without a choice are 0.
        """
        with limit_deep_gemm(self._deep_gemm_sms):
            return _run_layer(
                self.layers[layer_id], rows.hidden_states, rows.topk_ids, rows.topk_weights
            )

    def check_device(self) -> None:
        """Can `run_on_device` be used?

        Raises:
            ConfigError: The MoE runner has no way to leave a choice out.
        """
        if self._unfit:
            raise ConfigError(
                f"the MoE runner {self._unfit} cannot leave out rows of other ranks; use "
                f"--moe-runner-backend triton or deep_gemm, or --afd-transport zmq"
            )

    def count_rows(self, rows: Rows) -> Tensor:
        """How many choices went to each of this rank's experts: [num_local] int64."""
        local_ids = rows.topk_ids.flatten() - self.shard.first
        num_ours = self.shard.stop - self.shard.first
        ours = local_ids[(local_ids >= 0) & (local_ids < num_ours)]
        return torch.bincount(ours, minlength=self.shard.num_local)

    def _check(self, skeleton: torch.nn.Module, architecture: str) -> None:
        strays = [
            name
            for name, module in skeleton.named_modules()
            if isinstance(module, FusedMoE) and not isinstance(module, LocalFusedMoE)
        ]
        if strays or not self.layers:
            raise ConfigError(
                f"{architecture} builds its experts without SGLang's class hook "
                f"({strays[0] if strays else 'no MoE layer found'}), so it cannot be split"
            )
        if any(layer.should_fuse_routed_scaling_factor_in_topk for layer in self.layers.values()):
            raise ConfigError(
                "this MoE runner backend folds the routed scaling factor into top-k, which runs on "
                "the attention side; choose another --moe-runner-backend"
            )

    def _load(self, server_args: ServerArgs, skeleton: Any) -> None:
        if server_args.load_format == "dummy":
            for layer in self.layers.values():
                environment.fill_dummy(layer)
        else:
            files = [str(path) for path in safetensors_files(server_args.model_path)]
            skeleton.load_weights(read_tensors(files, self._owns, self.read_count))
        for layer in self.layers.values():
            environment.finish_weights(layer, self._device)

    def _warm_up(self) -> None:
        # Kernels are compiled at their first use, which an attention server should not wait for.
        # Twice, since torch.compile makes one for any number of rows when it sees a second number.
        num_ours = self.shard.stop - self.shard.first
        ids = torch.arange(self.top_k, dtype=torch.int32) % num_ours + self.shard.first
        with torch.inference_mode():
            for num_rows in (1, 2):
                rows = Rows(
                    hidden_states=torch.zeros(num_rows, self.hidden_size, dtype=self.dtype),
                    topk_ids=ids.repeat(num_rows, 1),
                    topk_weights=torch.ones(num_rows, self.top_k),
                )
                self.run(next(iter(self.layers)), rows)

    def _owns(self, name: str) -> bool:
        if not is_expert_tensor(name):
            return False
        following = name.split(".experts.", 1)[1].split(".", 1)[0]
        return not following.isdigit() or self.shard.first <= int(following) < self.shard.stop


def _run_pairs(
    layer: FusedMoE, hidden_states: Tensor, ids: Tensor, weights: Tensor, is_ours: Tensor
) -> Tensor:
    """Run the (row, choice) pairs that are ours, each as a row of its own with one choice."""
    row, choice = (index.to(hidden_states.device) for index in is_ours.nonzero(as_tuple=True))
    total = torch.zeros_like(hidden_states)
    if row.numel():
        pair_ids = ids.to(hidden_states.device)[row, choice].unsqueeze(1)
        pair_weights = weights[row, choice].unsqueeze(1)
        total.index_add_(0, row, _run_layer(layer, hidden_states[row], pair_ids, pair_weights))
    return total


def _run_layer(layer: FusedMoE, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    topk_output = StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=None)
    dispatched = StandardDispatchOutput(hidden_states, None, topk_output)
    partial: Tensor = layer.run_moe_core(dispatched).hidden_states
    return partial
