"""Lets SGLang be imported and served on a machine without a CUDA driver.

Importing this module installs the shim when it is needed, and costs next to nothing otherwise. It
must be the first import of every process that will import SGLang; spawned children get it by
importing the launcher module again. What it covers, and why, stands in docs/upstream.md.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence

from sglang_afd.upstream import cpu_bodies

_KERNEL_PACKAGES = ("sgl_kernel", "sgl_kernel.mamba")
_libraries: list[object] = []  # keeps the operator schemas alive


def has_cuda_driver() -> bool:
    """Can the CUDA driver library be loaded?"""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _KernelStub(types.ModuleType):
    """Stands in for `sgl_kernel`, whose wheel needs the CUDA driver to be imported.

    Only names of CPU operators exist, and they fail when called; any other name stays an
    AttributeError, which SGLang's own fallbacks expect.
    """

    def __getattr__(self, name: str) -> object:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def unavailable(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} does not exist on this CPU")

        return unavailable


class _ShimFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the kernel stub, and declares torchvision's operators just before it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            _declare_torchvision_operators()
        if fullname in _KERNEL_PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname in cpu_bodies.BODIES:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _BodyLoader(spec.loader)
            return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _KernelStub(spec.name)
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0+cpu"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


class _BodyLoader(importlib.abc.Loader):
    """Loads a module of SGLang as it is, and then puts our CPU bodies in place."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._inner.exec_module(module)
        cpu_bodies.put_in_place(module)


def _declare_torchvision_operators() -> None:
    # PyPI's torchvision links CUDA libraries. Beside a CPU build of torch they cannot be loaded,
    # and its Python part misses two schemas; beside a CUDA build it declares them itself.
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _install_triton_stub() -> None:
    # SGLang ships a mock of triton; it is loaded by path, since importing sglang imports triton.
    if importlib.util.find_spec("triton") is not None:
        return
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        return
    path = os.path.join(sglang.submodule_search_locations[0], "_triton_stub.py")
    spec = importlib.util.spec_from_file_location("_sglang_afd_triton_stub", path)
    if spec is None or spec.loader is None:
        return
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)
    stub.install()
    # torch's inductor names this class in an annotation that is evaluated at import.
    compiler = importlib.import_module("triton.compiler")
    compiler.CompiledKernel = type("CompiledKernel", (), {})  # type: ignore[attr-defined]


def install() -> bool:
    """Install the shim unless there is a CUDA driver; idempotent.

    Returns: Whether this process runs on the CPU.
    """
    if has_cuda_driver() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return False
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if not any(isinstance(finder, _ShimFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShimFinder())
        _install_triton_stub()
    return True


IS_CPU = install()
