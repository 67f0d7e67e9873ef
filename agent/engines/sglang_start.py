"""Runs an SGLang server in SGLang's own environment, also on a machine without a GPU; started by `sglang_launch`.

    python sglang_start.py <the flags of sglang.launch_server>

SGLang imports two packages that exist as CUDA builds only and that a text model on a CPU never calls: `sgl_kernel` and
`torchvision`. Where they are not installed, empty ones are declared, whose functions raise when called; no code of
SGLang is changed. SGLang spawns its processes by importing this file again, so what is declared at the top is declared
in all of them.

With MEMPO_END_WITH_STDIN set the server ends when its standard input does: whoever started it holds the other end, and
a process that is killed cannot end its children, but lets go of its pipes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

# What SGLang imports by name from sgl_kernel on every CPU; names beside these stay absent, and SGLang falls back.
_KERNEL_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
_INTERPOLATION = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS", "NEAREST_EXACT")


def _absent(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not part of this installation without CUDA")

    call.__name__ = name.rpartition(".")[2]
    return call


class _Hollow(types.ModuleType):
    """A package in which every name can be imported."""

    __path__: MutableSequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name == "InterpolationMode":
            value = type(name, (), {mode: mode.lower() for mode in _INTERPOLATION})
        elif name[0].isupper():
            value = type(name, (), {})
        else:
            value = _absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _HollowTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def declare_absent_packages() -> None:
    """Make `import sgl_kernel` and `import torchvision` work where they are not installed."""
    if importlib.util.find_spec("sgl_kernel") is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first sampled token waits for a compiler
        kernel = types.ModuleType("sgl_kernel")
        kernel.__version__ = "0.0.0"  # type: ignore[attr-defined]
        kernel.__path__ = []
        kernel.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
        for name in _KERNEL_NAMES:
            setattr(kernel, name, _absent(f"sgl_kernel.{name}"))
        sys.modules["sgl_kernel"] = kernel
    if importlib.util.find_spec("torchvision") is None:
        from transformers.utils import is_torchvision_available

        is_torchvision_available()  # remembers that it is not, before the hollow one can be seen
        sys.meta_path.append(_HollowTorchvision())


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str]) -> None:
    if os.environ.pop("MEMPO_END_WITH_STDIN", ""):
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(list(arguments)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    # The folder of a script comes first in its path: in this one lies a module that is called sglang, too.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    declare_absent_packages()
if __name__ == "__main__":
    main(sys.argv[1:])
