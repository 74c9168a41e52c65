"""Fleets of tiny real processes: what they print, how they end, and that none is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sglang_afd.ports import free_ports

pytestmark = pytest.mark.multiproc

WAIT_S = 60.0  # of what happens sooner or later
GRACE_S = 600.0  # longer than any test waits

# A server that has a child of its own, as SGLang's servers do, and reports both process numbers.
SERVER = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
{then}
time.sleep(600)
"""

LAUNCHER = """
import asyncio, json, os, sys
from sglang_afd.errors import AfdError
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.run import run_fleet
from sglang_afd.fleet.spares import Spares
from sglang_afd.fleet.spec import ServerSpec

servers = [
    ServerSpec(
        name=name,
        argv=(sys.executable, "-c", code),
        status_url="",
        stop_stage=stage,
        has_spares=name.startswith("mlp"),
    )
    for stage, (name, code) in enumerate(json.loads(sys.argv[1]).items())
]
console = Console(quiet=False)
until, state = sys.argv[2], sys.argv[4]
spares, grace_s = Spares(int(sys.argv[3])), float(sys.argv[5])

async def use():
    if state == "ready":
        spares.open()
    while not os.path.exists(until):
        await asyncio.sleep(0.02)

try:
    sys.exit(asyncio.run(run_fleet(servers, use(), console, grace_s=grace_s, spares=spares)))
except AfdError as error:
    console.progress(f"error: {error}")
    sys.exit(1)
"""


class Launcher:
    """A launcher process over servers given as Python code, in the order in which they stop."""

    def __init__(
        self, directory: Path, servers: dict[str, str], spares: int, state: str, grace_s: float
    ) -> None:
        self.log = directory / "log"
        self._done = directory / "done"
        argv = [sys.executable, "-c", LAUNCHER, json.dumps(servers), str(self._done)]
        argv += [str(spares), state, str(grace_s)]
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(argv, stderr=stderr)

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str) -> None:
        """Until this was printed."""
        wait_until(lambda: words in self.text(), self.text)

    def end_use(self) -> None:
        """Let that end what the servers are for."""
        self._done.touch()

    def pids(self, num_servers: int) -> list[int]:
        """Process numbers of all servers and their children, once all have reported."""

        def reported() -> list[str]:
            return re.findall(r"\| pids (\d+) (\d+)", self.text())

        wait_until(lambda: len(reported()) == num_servers, self.text)
        return [int(pid) for pair in reported() for pid in pair]


StartLauncher = Callable[..., Launcher]


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[StartLauncher]:
    launchers: list[Launcher] = []

    def start(
        servers: dict[str, str], spares: int = 0, state: str = "ready", grace_s: float = GRACE_S
    ) -> Launcher:
        launchers.append(Launcher(tmp_path, servers, spares, state, grace_s))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.process.kill()
        launcher.process.wait()


def wait_until(is_true: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, f"still waiting after {WAIT_S} s; so far:\n{explain()}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_none_is_left(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), lambda: str([*filter(is_running, pids)]))


def test_every_line_of_a_server_carries_its_name(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    written = tmp_path / "written"
    unended = "os.write(2, b'caf\\xc3\\xa9 \\xff without an end')"
    launcher = start_launcher(
        {
            "attn-0": SERVER.format(then="print('one\\rtwo\\n\\nthree', flush=True)"),
            "mlp-0": SERVER.format(then=f"{unended}; open({str(written)!r}, 'w')"),
        },
    )
    launcher.wait_for("| three")
    wait_until(written.exists, launcher.text)  # it is shown when nothing more can come

    launcher.end_use()
    code = launcher.process.wait(WAIT_S)

    assert code == 0
    lines = launcher.text().splitlines()
    assert [line for line in lines if line.startswith("attn-0 | ")][-3:] == [
        "attn-0 | one",
        "attn-0 | two",
        "attn-0 | three",
    ]
    assert "mlp-0 | caf\u00e9 \ufffd without an end" in lines


def test_the_end_of_the_use_stops_every_server(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"a": SERVER.format(then=""), "b": SERVER.format(then="")})
    pids = launcher.pids(2)

    launcher.end_use()
    code = launcher.process.wait(WAIT_S)

    assert code == 0
    assert_none_is_left(pids)


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        ("sys.exit(7)", "exited with code 7"),
        ("sys.exit(0)", "exited with code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_the_first_server_to_end_stops_all_and_its_last_lines_are_shown(
    start_launcher: StartLauncher, tmp_path: Path, end: str, ended: str
) -> None:
    cue = tmp_path / "cue"
    dying = (
        f"while not os.path.exists({str(cue)!r}): time.sleep(0.02)\n"
        f"print('the reason', flush=True); {end}"
    )
    launcher = start_launcher({"stays": SERVER.format(then=""), "dies": SERVER.format(then=dying)})
    pids = launcher.pids(2)

    cue.touch()
    code = launcher.process.wait(WAIT_S)

    assert code == 1
    error = launcher.text().partition("error: ")[2]
    assert error.startswith(f"dies {ended}; its last lines:\n")
    assert error.endswith("  the reason\n")
    assert_none_is_left(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_every_server(start_launcher: StartLauncher, number: signal.Signals) -> None:
    launcher = start_launcher({"a": SERVER.format(then=""), "b": SERVER.format(then="")})
    pids = launcher.pids(2)

    launcher.process.send_signal(number)

    assert launcher.process.wait(WAIT_S) == 128 + number
    assert_none_is_left(pids)


def test_a_server_is_stopped_after_those_that_use_it(start_launcher: StartLauncher) -> None:
    def ends_after(wait_s: float) -> str:
        at_end = f"lambda *_: (time.sleep({wait_s}), print('end'), sys.exit())"
        return f"signal.signal(signal.SIGTERM, {at_end}); print('set', flush=True)"

    # Asked at once, the one that is used would end first.
    launcher = start_launcher(
        {"user": SERVER.format(then=ends_after(0.5)), "used": SERVER.format(then=ends_after(0.0))}
    )
    launcher.wait_for("user | set")
    launcher.wait_for("used | set")

    launcher.process.terminate()
    launcher.process.wait(WAIT_S)

    assert launcher.text().splitlines()[-2:] == ["user | end", "used | end"]


def test_a_server_that_ignores_the_request_to_stop_is_killed(
    start_launcher: StartLauncher,
) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    launcher = start_launcher({"a": SERVER.format(then=stubborn)}, grace_s=1.0)
    pids = launcher.pids(1)
    launcher.wait_for("deaf")

    launcher.process.terminate()

    assert launcher.process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert_none_is_left(pids)


def test_a_second_signal_kills_at_once(start_launcher: StartLauncher) -> None:
    # It takes the first signal as its cue, and goes on; it has more time than the test.
    slow = "signal.signal(signal.SIGTERM, lambda *_: print('cue', flush=True))"
    launcher = start_launcher({"a": SERVER.format(then=f"{slow}; print('deaf', flush=True)")})
    pids = launcher.pids(1)
    launcher.wait_for("deaf")
    launcher.process.terminate()
    launcher.wait_for("cue")

    launcher.process.terminate()

    assert launcher.process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert_none_is_left(pids)


def test_a_killed_launcher_leaves_no_process(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"a": SERVER.format(then=""), "b": SERVER.format(then="")})
    pids = launcher.pids(2)

    os.kill(launcher.process.pid, signal.SIGKILL)

    assert launcher.process.wait(WAIT_S) == -signal.SIGKILL
    assert_none_is_left(pids)


def _pid_of(launcher: Launcher, name: str) -> int:
    found = re.search(rf"{name} \| pids (\d+)", launcher.text())
    assert found, launcher.text()
    return int(found[1])


def test_a_reader_that_went_away_changes_nothing_but_what_is_read(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    report = f"open({str(pids_file)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')"
    server = SERVER.format(then=f"print('more', flush=True)\n{report}")
    argv = [sys.executable, "-c", LAUNCHER, json.dumps({"mlp-0": server})]
    argv += [str(tmp_path / "never"), "0", "ready", str(GRACE_S)]
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head -1` does, once it has its line
    with subprocess.Popen(argv, stderr=write_end, stdout=write_end) as launcher:
        os.close(write_end)
        wait_until(lambda: pids_file.exists() and "\n" in pids_file.read_text(), lambda: "no pids")
        pids = [int(pid) for pid in pids_file.read_text().split()]
        ran_on = launcher.poll() is None
        launcher.send_signal(signal.SIGINT)

        code = launcher.wait(WAIT_S)

    assert ran_on
    assert code == 128 + signal.SIGINT
    assert_none_is_left(pids)


def test_so_many_mlp_servers_may_end_as_there_are_spares(start_launcher: StartLauncher) -> None:
    names = ("attn-0", "mlp-0", "mlp-1", "mlp-2")
    launcher = start_launcher(dict.fromkeys(names, SERVER.format(then="")), spares=1)
    pids = launcher.pids(len(names))

    os.killpg(_pid_of(launcher, "mlp-1"), signal.SIGKILL)
    launcher.wait_for("a spare takes its place, 0 left")
    assert launcher.process.poll() is None
    os.killpg(_pid_of(launcher, "mlp-2"), signal.SIGKILL)

    assert launcher.process.wait(WAIT_S) == 1
    assert "error: mlp-2 was killed by SIGKILL" in launcher.text()
    assert_none_is_left(pids)


@pytest.mark.parametrize(("victim", "state"), [("attn-0", "ready"), ("mlp-0", "starting")])
def test_a_spare_is_none_for_an_attention_server_and_none_before_all_are_ready(
    start_launcher: StartLauncher, victim: str, state: str
) -> None:
    servers = dict.fromkeys(("attn-0", "mlp-0", "mlp-1"), SERVER.format(then=""))
    launcher = start_launcher(servers, spares=1, state=state)
    pids = launcher.pids(len(servers))

    os.killpg(_pid_of(launcher, victim), signal.SIGKILL)

    assert launcher.process.wait(WAIT_S) == 1
    assert f"error: {victim} was killed by SIGKILL" in launcher.text()
    assert_none_is_left(pids)


def refused(*flags: str) -> subprocess.CompletedProcess[str]:
    """A launch that ends by itself."""
    command = [sys.executable, "-m", "sglang_afd.launch", "--port", str(free_ports(1)[0]), *flags]
    # Name servers may be far away, or none.
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus names GPU 0; no GPU is visible"),
        (["--sm-share", "attn=50"], "--sm-share has no effect here: there is no GPU"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid:"),
        (["--host", "a..b"], "(no host has that name)"),
        (["--mlp", "4"], "rank 3 of --ep-size 4 would own none of the model's 6 experts"),
        (
            ["--mlp", "5", "--", "--json-model-override-args", '{"num_experts": 4}'],
            "rank 4 of --ep-size 5 would own none of the model's 4 experts",
        ),
        (
            ["--", '--json-model-override-args={"num_experts": 0}'],
            "is not a mixture-of-experts model",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_2_before_anything_starts(
    checkpoint: Path, flags: list[str], message: str
) -> None:
    ended = refused("--model-path", str(checkpoint), *flags)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ") and message in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_more_mlp_servers_than_the_embedded_model_has_experts_are_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    ended = refused("--mlp", "5")

    assert ended.returncode == 2
    assert "rank 4 of --ep-size 5 would own none of the model's 4 experts" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_a_port_that_is_taken_is_refused_with_2(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        ended = refused("--model-path", str(checkpoint), "--port", str(taken.getsockname()[1]))

    assert ended.returncode == 2
    assert "cannot be the router's address" in ended.stderr
