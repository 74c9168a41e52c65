"""The process that imports SGLang for all servers leaves CUDA to those that it forks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_fleet import START_TIMEOUT_S
from servers import Zygote

pytestmark = pytest.mark.timeout(START_TIMEOUT_S)


def test_a_forked_process_can_use_the_gpu(zygote: Zygote, tmp_path: Path) -> None:
    file = tmp_path / "said.json"

    process = zygote.start("call", ["unborn_cuda", str(file)])

    process.wait_ended(30)
    assert file.exists(), process.text()[-4000:]
    said = json.loads(file.read_text())
    assert said["sum"] == 10
    assert said["properties"]["major"] >= 8
