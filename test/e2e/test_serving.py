"""The OpenAI client against the router, two attention servers and two MLP ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fleet
import openai
import pytest
from compare import PROMPTS, ask_at_once, differences
from fleet import AttnPair
from servers import START_TIMEOUT_S, Server, Zygote, fetch, running, wait_until

from sglang_afd.ports import free_ports

LONG_STREAM = 1900  # tokens
NUM_ATTEMPTS = 3
NUM_LAYERS = 4  # each decodes one row for a token
MESSAGES = [{"role": "user", "content": "tell me of the experts"}]


@pytest.fixture(scope="module")
def router(
    zygote: Zygote, qwen3_pair: AttnPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A router before two ready attention servers."""
    ranks = fleet.start_mlp(zygote, qwen3_pair.oracle.model, qwen3_pair.mlp_ports[:2])
    port, log = free_ports(1)[0], tmp_path_factory.mktemp("router") / "router.log"
    command = [
        *(sys.executable, "-m", "sgl_router_afd.launch_router", "--port", str(port)),
        *("--attn", *(attn.url for attn in qwen3_pair.attn)),
    ]
    with log.open("wb") as output, running(ranks):
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        router = Server(process.pid, port, log)
        try:
            router.wait("/health", lambda body: body["num_ready"] == 2)
            yield router
        finally:
            process.terminate()
            process.wait(START_TIMEOUT_S)
    for attn in qwen3_pair.attn:
        attn.wait("/afd/v1/status", lambda body: body["state"] != "ready")


@pytest.fixture(scope="module")
def client(router: Server) -> Iterator[openai.OpenAI]:
    """The official client, without retries, so that nothing is hidden."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model_name(client: openai.OpenAI) -> str:
    """What /v1/models lists."""
    return client.models.list().data[0].id


def test_chat_answers_and_streams_the_same(client: openai.OpenAI, model_name: str) -> None:
    whole = client.chat.completions.create(
        model=model_name, messages=MESSAGES, temperature=0, max_tokens=16
    )
    pieces = client.chat.completions.create(
        model=model_name, messages=MESSAGES, temperature=0, max_tokens=16, stream=True
    )

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)

    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.completion_tokens == 16


def test_logprobs_of_a_completion_are_there(client: openai.OpenAI, model_name: str) -> None:
    answer = client.completions.create(
        model=model_name, prompt="experts", temperature=0, max_tokens=5, logprobs=2
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 5
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, model_name: str) -> None:
    free = client.completions.create(
        model=model_name, prompt="experts", temperature=0, max_tokens=24
    )
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]

    stopped = client.completions.create(
        model=model_name, prompt="experts", temperature=0, max_tokens=24, stop=stop
    )

    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]


def test_n_gives_so_many_choices(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.create(
        model=model_name, messages=MESSAGES, temperature=1.0, max_tokens=8, n=3
    )

    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]


def test_leaving_a_stream_frees_its_slot(
    client: openai.OpenAI, model_name: str, qwen3_pair: AttnPair
) -> None:
    for attn in qwen3_pair.attn:
        fleet.forget_prefixes(attn)  # as soon as nothing runs
    num_rows_before = _num_decode_rows(qwen3_pair)
    stream = client.chat.completions.create(
        model=model_name,
        messages=MESSAGES,
        max_tokens=LONG_STREAM,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_until(lambda: _num_running(qwen3_pair) == 1, "one slot is taken")

    stream.close()
    wait_until(lambda: _num_running(qwen3_pair) == 0, "the slot is free")

    # Counted, since any stream has ended at some time: this one long before its last token.
    assert _num_decode_rows(qwen3_pair) - num_rows_before < (LONG_STREAM // 2) * NUM_LAYERS


def test_unknown_fields_and_native_generate_pass_the_router(router: Server) -> None:
    body = {"text": "experts", "sampling_params": {"max_new_tokens": 3}, "rid": "chosen-here"}

    status, answer = fetch(f"{router.url}/generate", body)

    assert status == 200
    assert answer["meta_info"]["id"] == "chosen-here"


def test_sixteen_at_once_through_the_router_are_identical(
    router: Server, qwen3_pair: AttnPair
) -> None:
    got = ask_at_once([router.url], PROMPTS)

    assert differences(qwen3_pair.oracle.at_once, got) == []


def test_a_bad_request_is_the_clients_fault(
    client: openai.OpenAI, model_name: str, router: Server
) -> None:
    num_ready = []
    while 2 not in num_ready and len(num_ready) < NUM_ATTEMPTS:
        router.wait("/health", lambda body: body["num_ready"] == 2)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model=model_name, messages=MESSAGES, temperature=-3.0, max_tokens=4
            )
        num_ready.append(router.get("/health")[1]["num_ready"])

    # On a busy machine a server may lose its MLP servers just then, but not each time.
    assert num_ready[-1] == 2, num_ready


def test_metrics_of_the_mlp_ranks_count_what_was_served(
    router: Server, qwen3_pair: AttnPair
) -> None:
    peers = 'sglang_afd_mlp_attached_peers{rank="1"}'
    wait_until(lambda: float(_metrics(qwen3_pair)[peers]) == 2, "both are attached")

    values = _metrics(qwen3_pair)

    assert float(values['sglang_afd_mlp_decode_rows_total{rank="1"}']) > 0
    assert float(values['sglang_afd_mlp_prefill_rows_total{rank="1"}']) > 0
    assert float(values['sglang_afd_mlp_expert_rows_total{expert="15",rank="1"}']) > 0


def _metrics(pair: AttnPair) -> dict[str, str]:
    """Of MLP rank 1."""
    status, text = fetch(f"http://127.0.0.1:{pair.mlp_ports[1]}/metrics")
    assert status == 200, text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def _num_decode_rows(pair: AttnPair) -> float:
    return float(_metrics(pair)['sglang_afd_mlp_decode_rows_total{rank="1"}'])


def _num_running(pair: AttnPair) -> int:
    """On both attention servers."""
    number = 0
    for attn in pair.attn:
        status, loads = attn.get("/v1/loads")
        assert status == 200
        number += loads["loads"][0]["num_running_reqs"] + loads["loads"][0]["num_waiting_reqs"]
    return number


def test_logs_hold_no_traceback(router: Server, qwen3_pair: AttnPair) -> None:
    logs: list[Path] = [router.log, *(attn.log for attn in qwen3_pair.attn)]

    assert [log.name for log in logs if "Traceback" in log.read_text(errors="replace")] == []


def test_a_regular_expression_shapes_the_answer(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.create(
        model=model_name,
        messages=MESSAGES,
        temperature=0,
        max_tokens=64,
        extra_body={"regex": "(yes|no) (yes|no)"},
    )

    assert answer.choices[0].message.content in {"yes yes", "yes no", "no yes", "no no"}
