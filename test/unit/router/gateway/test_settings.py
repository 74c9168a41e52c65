from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.policy import POLICIES
from sgl_router_afd.gateway import installed, settings
from sgl_router_afd.keys import Key
from sglang_afd.errors import ConfigError


def config(**fields: Any) -> RouterConfig:
    return RouterConfig(data_plane="smg", **fields)


def flags(**fields: Any) -> str:
    given = settings.flags(
        config(**fields),
        host="::1",
        port=5,
        metrics_port=6,
        manifest=Path("/tmp/servers.json"),
        own_key="own",
    )
    return " ".join(given)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("least_load", "--policy least_load --host"),
        ("round_robin", "--policy round_robin --host"),
        ("power_of_two", "--policy power_of_two --power-of-two-load-metric least_requests"),
        ("prefix", "--policy prefix_hash --prefix-token-count 64 --prefix-hash-load-factor 1.25"),
    ],
)
def test_each_policy_has_its_counterpart(policy: str, wanted: str) -> None:
    assert wanted in flags(policy=policy)


def test_no_policy_is_without_a_counterpart() -> None:
    assert settings.POLICIES.keys() == POLICIES.keys()


def test_limits_are_smgs_in_whole_seconds_and_never_the_0_that_means_none() -> None:
    given = flags(queue_size=3, queue_timeout_s=0.2, header_timeout_s=1.5, max_body_bytes=9, port=1)

    assert "--queue-size=3 --queue-timeout-secs=1 --header-read-timeout-secs=2" in given
    assert "--max-payload-size=9" in given and "--port=5" in given and "--host=::1" in given


def test_smg_judges_no_server_itself_and_guesses_no_model() -> None:
    given = flags()

    for flag in ("--disable-health-check", "--disable-circuit-breaker", "--enable-igw"):
        assert flag in given
    assert "--discovery-file=/tmp/servers.json" in given


def test_keys_are_those_of_clients_and_one_that_only_this_router_knows() -> None:
    given = flags(api_key=Key(b"-k"))

    assert "--api-key=-k" in given
    assert "--control-plane-api-keys=router:router:admin:own" in given


def test_nothing_is_sent_again_without_a_budget() -> None:
    assert "--disable-retries" in flags(retry_budget=0.0)
    assert "--disable-retries" not in flags()


def test_flags_of_ones_own_come_before_those_that_must_hold() -> None:
    given = flags(smg_args="--log-level debug --tool-call-parser 'qwen'")

    assert given.index("--log-level=warn") < given.index("--log-level debug")
    assert given.index("--tool-call-parser qwen") < given.index("--enable-igw")


@pytest.mark.parametrize("word", ["--tls-cert-path a.pem", "--tls-cert-path=a.pem"])
def test_smg_with_a_certificate_is_spoken_to_accordingly(word: str) -> None:
    assert settings.scheme(config(smg_args=word)) == "https"
    assert settings.scheme(config()) == "http"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hold_timeout_s", 1.0, "--hold-timeout has no effect with --data-plane smg"),
        ("relay_processes", 2, "--relay-processes has no effect"),
        ("max_headers", 5, "--max-headers has no effect"),
        ("max_header_bytes", 512, "--max-header-bytes has no effect"),
        ("retry_budget", 0.5, "--retry-budget has no effect .* but for 0"),
        ("smg_args", "--port 5", "--smg-args got --port, which this router sets itself"),
        ("smg_args", "--policy=random", "--smg-args got --policy"),
        ("smg_args", "'", "--smg-args has flags that no shell could read: No closing quotation"),
    ],
)
def test_what_smg_has_no_counterpart_for_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check(config(**{field: value}))


def test_the_defaults_are_fine() -> None:
    settings.check(config(retry_budget=0.0, smg_args="--enable-mesh"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_plane": "relay", "control_port": 5}, "--control-port got 5, and means nothing"),
        ({"data_plane": "smg", "port": 5, "control_port": 5}, "got 5, which is --port"),
        ({"data_plane": "smg", "port": 65535}, "which no port follows; give --control-port"),
        ({"data_plane": "smg", "control_port": 65536}, "--control-port got 65536; choose"),
    ],
)
def test_ports_that_clash_or_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**fields)


def test_flags_for_smg_are_refused_without_smg_and_not_shown_since_keys_may_be_among_them() -> None:
    with pytest.raises(ConfigError, match="--smg-args has no effect with --data-plane relay") as it:
        RouterConfig(smg_args="--jwt-secret s3cret")
    with pytest.raises(ConfigError) as broken:
        settings.check(config(smg_args="--jwt-secret 's3cret"))

    assert "s3cret" not in f"{it.value} {broken.value}"


@pytest.mark.parametrize("version", ["1.12.0", "2.0.0", "2.0.0rc1", "0.9"])
def test_another_version_of_smg_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    monkeypatch.setattr(installed.importlib.metadata, "version", lambda name: version)

    with pytest.raises(ConfigError, match=f"got smg {version}, wanted 1.13 or a later 1.x"):
        installed.check_version()


def test_the_lack_of_smg_is_told_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="pip install 'smg>=1.13,<2'"):
        installed.check_version()
