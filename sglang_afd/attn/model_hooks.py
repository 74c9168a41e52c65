"""The hooks in a process that loads and runs the model, with or without SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from sglang_afd.attn import runtime
from sglang_afd.attn.remote_moe import RemoteFusedMoE
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.split_forward import SplitForward
from sglang_afd.attn.step_graphs import StepGraphs
from sglang_afd.errors import AfdError
from sglang_afd.upstream import graph_runner, hooks, inner_model, scheduler, weights
from sglang_afd.upstream.inner_model import MicroBatchBackends
from sglang_afd.upstream.moe import MOE_CLASS_HOOK

Fail = Callable[[AfdError], NoReturn]


def build_hooks(fail: Fail) -> list[hooks.Hook]:
    """Those on the model, its loader and its runner.

    Args:
        fail: Called when the model cannot be split; SGLang would log what a hook raises, or serve
            on.
    """
    read = weights.without_experts(runtime.current().read_count)
    models = _Models(fail)
    return [
        hooks.Hook(
            target=MOE_CLASS_HOOK, type=hooks.REPLACE, function=lambda quant_config: RemoteFusedMoE
        ),
        *(
            hooks.Hook(target=target, type=hooks.REPLACE, function=read)
            for target in weights.ITERATOR_HOOKS
        ),
        hooks.Hook(
            target=scheduler.LOAD_MODEL_HOOK, type=hooks.AROUND, function=models.around_load_model
        ),
        hooks.Hook(
            target=graph_runner.GRAPH_RUNNER_HOOK,
            type=hooks.AROUND,
            function=models.around_graph_runner,
        ),
    ]


class _Models:
    """The model of this process, from its loading on."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail
        self._graphs: StepGraphs | None = None

    def around_load_model(
        self, load_model: Callable[..., None], runner: scheduler.ModelRunner, *args: Any, **kw: Any
    ) -> None:
        load_model(runner, *args, **kw)
        here = runtime.current()
        try:
            here.adopt_model(
                runner.model,
                architecture=runner.model_config.hf_config.architectures[0],
                dtype=str(runner.model_config.dtype).removeprefix("torch."),
                device_index=runner.gpu_id,
            )
            if not runner.is_draft_worker:
                self._install_split(here, runner)
        except AfdError as error:
            self._fail(error)

    def around_graph_runner(
        self, runner_class: Callable[..., Any], runner: scheduler.ModelRunner
    ) -> Any:
        if self._graphs is None or runner.is_draft_worker:
            return runner_class(runner)
        return partial(graph_runner.StepGraphRunner, self._graphs)

    def _install_split(self, here: Runtime, runner: scheduler.ModelRunner) -> None:
        """The hook that can be named only when the model is there.

        A step on the GPU needs it even uncut: what its exchanges say is staged there.
        """
        is_cut = here.config.num_micro_batches != "1"
        if not is_cut and not here.is_on_device:
            return
        inner = inner_model.find_inner_model(runner.model)
        if is_cut:
            inner_model.keep_on_one_stream(runner.model)
        backends = MicroBatchBackends(runner)
        if here.is_on_device:
            self._graphs = StepGraphs(here, backends)
        hooks.install(
            [
                hooks.Hook(
                    target=inner_model.forward_hook(inner),
                    type=hooks.AROUND,
                    function=SplitForward(here, runner, inner, backends, self._graphs),
                )
            ]
        )
