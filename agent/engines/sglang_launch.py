"""A local SGLang server as a child of this process: started, watched, always ended with its own children."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from agent.engines.base import EngineError
from agent.engines.sglang_server import Server
from envs.errors import UserError

_SCRIPT = Path(__file__).with_name("sglang_start.py")
_GRACE = 15.0
_CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--max-total-tokens", "65536", "--max-running-requests", "256",
)  # fmt: skip
_CPU_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # several threads of several processes on a few cores are far slower than one
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "SGLANG_USE_CPU_ENGINE": "1",
}


class LocalServer:
    """One server on this machine, at a port of its own.

    Args:
        python: interpreter of the environment with SGLang in it.
        model: folder it serves first.
        dtype: of its weights.
        log: file that its output is appended to.
        arguments: further flags; a flag given twice counts as given last.
        device: ``cpu``, ``cuda``, or None for what this machine has.

    Raises:
        UserError: there is no such interpreter.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        dtype: str,
        log: Path,
        arguments: Sequence[str] = (),
        device: str | None = None,
    ) -> None:
        # The path is not resolved: the interpreter of a virtual environment is a link.
        self._python = Path(python).expanduser().absolute()
        if not os.access(self._python, os.X_OK):
            raise UserError(f"no interpreter at {python}: `make sglang-env` makes SGLang's environment")
        self._model, self._dtype, self._log = model.resolve(), dtype, log
        self._arguments = tuple(arguments)
        self._cpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def group(self) -> int:
        """Number of the process group that holds the server and its children, and nobody else."""
        if self._process is None:
            raise ValueError("the server was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; it answers some time later, see `wait`."""
        if self.running:
            return
        self._end_group(signal.SIGKILL)
        atexit.register(self.stop)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            str(self._python), str(_SCRIPT), "--model-path", str(self._model), "--host", "127.0.0.1",
            "--port", str(self._port), "--dtype", self._dtype, "--skip-server-warmup", "--sleep-on-idle",
            *(_CPU_FLAGS if self._cpu else ()), *self._arguments,
        ]  # fmt: skip
        extra = _CPU_ENVIRONMENT if self._cpu else {}
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        environment = {**kept, "HF_HUB_OFFLINE": "1", "MEMPO_END_WITH_STDIN": "1", **extra}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        """Until it answers.

        Raises:
            EngineError: it ended, or did not answer in time; the end of its log is in the message.
        """
        server = Server(self.url, timeout=5.0)
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                if not self.running:
                    raise EngineError(f"the SGLang server ended as it started: {self.last_words()}")
                with contextlib.suppress(EngineError):
                    server.version(timeout=5.0)
                    return
                time.sleep(0.3)
        finally:
            server.close()
        raise EngineError(f"the SGLang server gave no answer for {seconds:.0f} s: {self.last_words()}")

    def kill(self) -> None:
        """End it at once, without a word: what a crash looks like."""
        self._end_group(signal.SIGKILL)

    def stop(self) -> None:
        """End it and all of its children; after `_GRACE` seconds by force."""
        atexit.unregister(self.stop)
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        self._end_group(signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its log that says what went wrong, else the last one."""
        lines = [line.strip() for line in _tail(self._log).splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return f"{(errors or lines or ['no output'])[-1][:300]} (log: {self._log})"

    def _end_group(self, kind: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        # Its session holds nobody but itself and its children, also when it is gone already.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, kind)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._process = None


def _tail(file: Path, size: int = 20_000) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - size))
        return handle.read().decode("utf-8", "replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
