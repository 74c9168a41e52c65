from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_router_afd.config import DEFAULTS, RouterConfig
from sgl_router_afd.endpoints import OWN, RELAYED
from sgl_router_afd.flags import FLAGS, parse_args
from sgl_router_afd.keys import Key
from sglang_afd.errors import ConfigError

URL = "http://127.0.0.1:30001"


def test_the_defaults_of_the_flags_are_those_of_the_dataclass() -> None:
    assert parse_args(["--attn", URL]) == RouterConfig(attn_urls=(URL,))


def test_attn_takes_several_urls_and_may_be_repeated() -> None:
    config = parse_args(["--attn", "http://a:1", "http://b:2/", "--attn", "https://[::1]:3"])

    assert config.attn_urls == ("http://a:1", "http://b:2", "https://[::1]:3")


def test_the_port_of_http_itself_stays_since_servers_are_told_the_address() -> None:
    config = RouterConfig(attn_urls=("http://a:80",), mlp_urls=("https://[::1]:443",))

    assert (config.attn_urls, config.mlp_urls) == (("http://a:80",), ("https://[::1]:443",))


@pytest.mark.parametrize("flag", ["--host", "--state-file"])
def test_a_name_that_is_no_text_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([flag, "\udcff"])

    assert f"{flag} got '\\udcff', which is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["", "a:1", "http://a", "ftp://a:1", "http://:1", "http://a:1/v1", "http://a:1?x=1"]
    + ["http://a:1#x", "http://user@a:1", "http://a:port", "http://a:70000"]
    + ["http://a..b:1", "http://a:0", f"http://{'a' * 64}:1", "http://[fe80::1%eth0]:1"],
)
def test_a_url_that_names_no_server_is_refused_with_the_wanted_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--attn got .*wanted http://host:port"):
        RouterConfig(attn_urls=(url,))


def test_the_same_server_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="name http://a:1 twice"):
        RouterConfig(attn_urls=("http://a:1", "http://b:1", "http://A:1/"))


def test_the_same_server_in_both_roles_is_refused() -> None:
    with pytest.raises(ConfigError, match="--attn and --mlp name http://a:1 twice"):
        RouterConfig(attn_urls=("http://a:1",), mlp_urls=("http://a:1",))


def test_a_router_without_servers_waits_for_those_that_register() -> None:
    assert parse_args([]) == RouterConfig(attn_urls=(), mlp_urls=())


@pytest.mark.parametrize("ratio", ["7", "0:1", "a:b", "7:1:1"])
def test_a_ratio_that_is_none_is_refused(ratio: str) -> None:
    with pytest.raises(ConfigError, match="--ratio got"):
        RouterConfig(ratio=ratio)


def test_the_secret_of_registrations_is_that_of_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * 16 + "\n")
    path.chmod(0o600)

    config = parse_args(["--afd-secret-file", str(path)])

    assert config.afd_secret == Key(b"x" * 16)
    assert "x" * 16 not in repr(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "best"),
        ("log_level", "loud"),
        ("port", -1),
        ("port", 65536),
        ("status_interval_s", 0.0),
        ("status_timeout_s", float("nan")),
        ("lease_s", 0.0),
        ("data_plane", "envoy"),
        ("connect_timeout_s", float("inf")),
        ("shutdown_timeout_s", -1.0),
        ("max_body_bytes", 0),
        ("relay_processes", 65),
        ("relay_timeout_s", 0.5),
        ("hold_timeout_s", -1.0),
        ("retry_budget", 1.5),
        ("max_concurrent_requests", 0),
        ("queue_size", -1),
        ("queue_timeout_s", -1.0),
        ("header_timeout_s", 0.0),
        ("body_timeout_s", 0.0),
        ("keep_alive_timeout_s", 0.0),
        ("max_headers", 0),
        ("max_header_bytes", 1),
        ("max_replay_body_bytes", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_flag(
    field: str, value: float | str
) -> None:
    flag = FLAGS.get(field, "--" + field.replace("_", "-"))

    with pytest.raises(ConfigError, match=rf"{flag} got .*; choose"):
        RouterConfig(attn_urls=(URL,), **{field: value})  # type: ignore[arg-type]


def test_help_names_every_flag_with_its_default_and_every_endpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help"])

    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for name, default in DEFAULTS.items():
        if isinstance(default, str | int | float):
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            assert f"{flag} " in shown
            assert f"(default: {default})" in shown
    for flag in ("--attn", "--mlp", "--afd-secret-file", "--api-key", "--api-key-file"):
        assert f"{flag} " in shown
    assert "--admin-api-key KEY" in shown and "--admin-api-key-file FILE" in shown
    for endpoint in (*OWN, *RELAYED):
        assert endpoint in shown


def test_one_relay_process_for_each_core_but_not_more_than_four_unless_asked_for() -> None:
    unasked = RouterConfig(attn_urls=(URL,)).num_relays

    assert unasked == min(4, len(os.sched_getaffinity(0)))
    assert RouterConfig(attn_urls=(URL,), relay_processes=7).num_relays == 7
