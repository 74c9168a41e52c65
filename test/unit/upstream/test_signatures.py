"""What we rely on in SGLang; a rename there fails here and not in a running server."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sglang_afd
from sglang_afd.attn import scheduler as attn_scheduler
from sglang_afd.attn.remote_moe import RemoteFusedMoE
from sglang_afd.mlp.experts import LocalFusedMoE
from sglang_afd.upstream import (
    attention,
    graph_runner,
    http_server,
    moe,
    requests,
    scheduler,
    server_args,
    weights,
)

PACKAGE = Path(sglang_afd.__file__).parent


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def resolve(target: str) -> Any:
    return pkgutil.resolve_name(target)


WATCHDOG = "sglang.srt.managers.scheduler_components.invariant_checker.create_scheduler_watchdog"
HOOKED = {
    moe.MOE_CLASS_HOOK: ["quant_config"],
    scheduler.EVENT_LOOP_HOOK: ["scheduler"],
    scheduler.IDLE_HOOK: ["self"],
    scheduler.RUN_BATCH_HOOK: ["self", "batch", "pp_proxy_tensors"],
    scheduler.PROCESS_RESULT_HOOK: ["self", "batch", "result"],
    scheduler.LOAD_MODEL_HOOK: ["self"],
    graph_runner.GRAPH_RUNNER_HOOK: ["self"],
    **{target: ["hf_weights_files"] for target in weights.ITERATOR_HOOKS},
}


@pytest.mark.parametrize("target", HOOKED)
def test_a_hook_target_takes_the_arguments_that_its_hook_expects(target: str) -> None:
    expected = HOOKED[target]

    assert parameters(resolve(target))[: len(expected)] == expected


@pytest.mark.parametrize("target", HOOKED)
def test_a_hook_target_needs_no_further_arguments(target: str) -> None:
    signature = inspect.signature(resolve(target))
    further = list(signature.parameters.values())[len(HOOKED[target]) :]

    needed = {p.name for p in further if p.default is inspect.Parameter.empty}
    assert needed <= {"max_workers"}  # of the buffered iterator; ours takes and ignores it


def test_every_hook_of_the_attention_role_is_listed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        read_count = weights.ReadCount()

    monkeypatch.setattr(attn_scheduler.runtime, "current", Runtime)

    assert {hook.target for hook in attn_scheduler.build_hooks()} == set(HOOKED)


def test_the_moe_class_function_answers_with_a_fused_moe() -> None:
    source = inspect.getsource(resolve(moe.MOE_CLASS_HOOK))

    assert "return FusedMoE" in source


def test_the_weight_iterators_are_those_that_the_default_loader_calls() -> None:
    loader = resolve("sglang.srt.model_loader.loader")

    source = inspect.getsource(loader.DefaultModelLoader)

    for target in weights.ITERATOR_HOOKS:
        name = target.rsplit(".", 1)[1]
        assert f" {name}(" in source
        assert getattr(loader, name) is resolve(target)


def test_the_launcher_takes_our_entry_points() -> None:
    assert {
        "server_args",
        "run_scheduler_process_func",
        "execute_warmup_func",
        "launch_callback",
    } <= set(parameters(http_server.launch_server))


def test_the_status_that_a_warm_up_sets_exists() -> None:
    assert http_server.ServerStatus.Up
    assert hasattr(http_server.http_server, "_global_state")


def test_a_scheduler_process_gets_the_arguments_first() -> None:
    assert parameters(scheduler.run_scheduler_process)[0] == "server_args"


def test_arguments_can_be_overridden_under_a_source() -> None:
    assert parameters(server_args.ServerArgs.override) == ["self", "source", "fields"]


def test_a_fused_moe_is_built_from_what_our_subclasses_pass_on() -> None:
    expected = {"num_experts", "hidden_size", "layer_id", "top_k", "quant_config"}

    assert expected <= set(parameters(moe.FusedMoE.__init__))


def test_a_fused_moe_keeps_what_we_read() -> None:
    source = inspect.getsource(moe.FusedMoE.__init__)

    for name in (
        "layer_id",
        "top_k",
        "hidden_size",
        "num_experts",
        "quant_method",
        "dispatcher",
        "should_fuse_routed_scaling_factor_in_topk",
    ):
        assert f"self.{name}" in source


def test_a_fused_moe_runs_what_a_dispatcher_made() -> None:
    assert parameters(moe.FusedMoE.run_moe_core) == ["self", "dispatch_output"]
    assert "self.quant_method.apply(" in inspect.getsource(moe.FusedMoE.run_moe_core)


def test_our_forward_takes_the_arguments_of_sglangs() -> None:
    assert parameters(RemoteFusedMoE.forward) == parameters(moe.FusedMoE.forward)


def test_our_layers_are_fused_moes_to_sglang() -> None:
    assert issubclass(RemoteFusedMoE, moe.FusedMoE)
    assert issubclass(LocalFusedMoE, moe.FusedMoE)


def test_dispatch_and_combine_outputs_have_the_fields_that_we_use() -> None:
    assert moe.StandardTopKOutput._fields[:3] == ("topk_weights", "topk_ids", "router_logits")
    assert moe.StandardDispatchOutput._fields[0] == "hidden_states"
    assert moe.StandardDispatchOutput._fields[2] == "topk_output"


def test_sigterm_reaches_the_handler_that_we_wrap_and_it_only_sets_a_flag() -> None:
    module, _, _ = http_server.SIGTERM_HOOK.rpartition(".SignalHandler.")
    install = inspect.getsource(resolve(f"{module}.TokenizerManager").auto_create_handle_loop)
    handler = inspect.getsource(resolve(http_server.SIGTERM_HOOK))

    assert parameters(resolve(http_server.SIGTERM_HOOK)) == ["self", "signum", "frame"]
    assert "add_signal_handler(signal.SIGTERM, signal_handler.sigterm_handler)" in install
    assert "self.tokenizer_manager.gracefully_exit = True" in handler
    assert "loop" not in handler  # it may be called by any thread


def attributes_of(name: str, file: Path) -> set[str]:
    """What a file reads or writes of the variable `name`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }


def missing_in(owner: type, names: set[str]) -> set[str]:
    """Those that the class neither has nor sets on itself."""
    source = inspect.getsource(owner)
    return {
        name
        for name in names
        if not hasattr(owner, name)
        and f"self.{name} =" not in source
        and f"self.{name}: " not in source
        and f"self.{name},\n" not in source  # one of several that a call returns
    }


def test_the_scheduler_has_every_attribute_that_we_touch() -> None:
    touched = attributes_of("scheduler", PACKAGE / "upstream" / "scheduler.py")
    touched |= attributes_of("scheduler", PACKAGE / "upstream" / "requests.py")
    touched |= attributes_of("scheduler", PACKAGE / "upstream" / "load.py")
    touched |= attributes_of("scheduler", PACKAGE / "attn" / "recovery.py")
    touched |= attributes_of("owner", PACKAGE / "attn" / "scheduler.py")

    assert len(touched) > 10
    assert missing_in(scheduler.Scheduler, touched) == set()


def test_a_request_has_every_attribute_that_we_touch() -> None:
    touched = attributes_of("req", PACKAGE / "upstream" / "requests.py")
    touched |= attributes_of("req", PACKAGE / "upstream" / "scheduler.py")

    assert len(touched) > 5
    assert missing_in(requests.Req, touched) == set()


def test_flush_cache_empties_what_we_empty_and_nothing_that_we_forgot() -> None:
    source = inspect.getsource(scheduler.Scheduler.flush_cache)

    assert source.count(".clear()") + source.count(".reset()") == 4
    for emptied in (
        "self.tree_cache.reset()",
        "self.req_to_token_pool.clear()",
        "self.token_to_kv_pool_allocator.clear()",
        "self.grammar_manager.clear()",
    ):
        assert emptied in source


def test_an_abort_carries_its_request_and_its_reason() -> None:
    fields = {field.name for field in msgspec.structs.fields(requests.AbortReq)}

    assert {"rid", "finished_reason"} <= fields
    assert parameters(requests.FINISH_ABORT.__init__) == [
        "self",
        "message",
        "status_code",
        "err_type",
    ]


def test_a_batch_knows_its_requests_and_its_mode() -> None:
    fields = set(scheduler.ScheduleBatch.__dataclass_fields__)

    assert {"reqs", "forward_mode", "batch_is_full", "extend_num_tokens"} <= fields
    assert callable(requests.Req.finished)


def test_a_request_can_be_retracted_once_it_owns_no_cache() -> None:
    reset = inspect.getsource(requests.Req.reset_for_retract)
    init = inspect.getsource(requests.Req.__init__)

    assert "assert self.kv is None" in reset
    assert "self.output_ids =" not in reset.split("if self.input_embeds is not None")[0]
    for name in ("kv", "req_pool_idx", "input_embeds", "output_ids", "grammar", "time_stats"):
        assert f"self.{name} =" in init or f"self.{name}: " in init


def test_the_event_loop_reads_its_input_as_we_do_while_no_step_can_run() -> None:
    source = inspect.getsource(scheduler.Scheduler.event_loop_overlap)

    for line in (
        "recv_reqs = self.request_receiver.recv_requests()",
        "self.process_input_requests(recv_reqs)",
    ):
        assert line in source


def test_the_watchdog_rests_while_no_batch_is_shown_to_it() -> None:
    source = inspect.getsource(resolve(WATCHDOG))

    assert "get_counter=lambda: scheduler.forward_ct" in source
    assert "scheduler.is_initializing or scheduler.cur_batch_for_debug is not None" in source


def test_a_step_is_counted_before_its_forward_so_that_a_stall_lies_behind_the_count() -> None:
    source = inspect.getsource(scheduler.Scheduler.run_batch)

    assert source.index("self.forward_ct += 1") < source.index("self.model_worker.forward")


RUNNER = graph_runner.DecodeCudaGraphRunner


def test_the_model_runner_builds_its_decode_graphs_with_the_class_that_it_is_asked_for() -> None:
    setup = resolve("sglang.srt.model_executor.model_runner_components.cuda_graph_setup")

    source = inspect.getsource(setup.capture_decode_graph)

    assert "model_runner._decode_cuda_graph_runner_cls," in source
    assert "graph_runners[model_runner.device](model_runner)" in source


@pytest.mark.parametrize("name", ["capture_one_shape", "can_run_graph", "execute", "capture"])
def test_our_graph_runner_takes_the_arguments_of_sglangs(name: str) -> None:
    ours, theirs = getattr(graph_runner.StepGraphRunner, name), getattr(RUNNER, name)

    assert parameters(ours) == parameters(theirs)


def test_a_graph_runner_reads_its_attention_backend_and_a_graphs_label_anew_each_time() -> None:
    prepare, load, one, run = (
        inspect.getsource(getattr(RUNNER, name))
        for name in ("capture_prepare", "load_batch", "capture_one_shape", "can_run_graph")
    )

    assert "attn_backend = self.attn_backend\n" in prepare
    assert "attn_backend = self.attn_backend\n" in load
    assert "attn_backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)" in one
    assert "attn_backend.init_forward_metadata_in_graph(forward_batch)" in one
    assert "variant_label = self._resolve_lora_variant(forward_batch)" in load
    assert "self._resolve_lora_variant(forward_batch)" in run


def test_a_bucket_is_known_before_a_replay() -> None:
    load = inspect.getsource(RUNNER.load_batch)

    assert "bs = self._pad_to_bucket(raw_bs, self.capture_bs)" in load
    assert "self.capture_bs, self.compile_bs =" in inspect.getsource(RUNNER.__init__)


def test_attention_backends_have_what_micro_batches_call() -> None:
    backend = attention.AttentionBackend

    assert parameters(backend.init_cuda_graph_state) == ["self", "max_bs", "max_num_tokens"]
    for name in ("init_forward_metadata_out_graph", "init_forward_metadata_in_graph"):
        ours = getattr(attention.SplitAttention, name)
        assert parameters(ours) == parameters(getattr(backend, name))


def test_a_part_of_a_batch_has_everything_that_sglang_shows_a_backend_before_a_replay() -> None:
    build = resolve(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view"
    )
    shown = {
        keyword.arg
        for node in ast.walk(ast.parse(inspect.getsource(build)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SimpleNamespace"
        for keyword in node.keywords
    }
    ours = {
        keyword.arg
        for node in ast.walk(ast.parse(inspect.getsource(attention.part_of)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SimpleNamespace"
        for keyword in node.keywords
    }

    assert len(shown) > 10
    assert ours == shown


def test_results_are_looked_at_after_the_event_that_we_wait_for() -> None:
    processor = resolve(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
    ).SchedulerBatchResultProcessor

    for name in ("process_batch_result_decode", "process_batch_result_prefill"):
        source = inspect.getsource(getattr(processor, name))
        assert "result.copy_done.synchronize()" in source
    assert "copy_done" in scheduler.GenerationBatchResult.__dataclass_fields__


def test_every_result_is_processed_through_the_method_that_we_hook() -> None:
    for name in ("event_loop_normal", "event_loop_overlap"):
        source = inspect.getsource(getattr(scheduler.Scheduler, name))
        assert source.count("self.process_batch_result(") == 1
        assert "self.batch_result_processor." not in source
