from __future__ import annotations

import subprocess
import sys


def test_the_router_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, sgl_router_afd.launch_router, sgl_router_afd.dataplane.process\n"
        "print(sorted({'torch', 'sglang'} & sys.modules.keys()))"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (ended.stdout, ended.stderr) == ("[]\n", "")
