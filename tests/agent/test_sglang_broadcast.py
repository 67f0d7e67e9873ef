"""Weights by broadcast: how an update is framed, groups that end with their server; and senseless settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent.engines.base import EngineError
from agent.engines.settings import SGLangSettings
from agent.engines.sglang_broadcast import BroadcastCarrier
from agent.engines.sglang_server import Server, ServerInfo
from tests.agent.fake_sglang import FakeSGLang
from tests.agent.test_sglang_engine import ask, folder, make_model, training

__all__ = ["folder"]


class Quiet(BroadcastCarrier):
    """Everything but the collective itself, which the tests with a real server have."""

    joined = left = 0

    def _join(self, server: Server, info: ServerInfo) -> tuple[str, Any]:
        self.joined += 1
        return "group", None

    def _broadcast(self, server: Server, group: Any, values: Any, request: Any) -> None:
        request.result(10)

    def forget(self, url: str) -> None:
        self.left += self._groups.pop(url, None) is not None


@pytest.mark.parametrize("sessions", [True, False])
def test_a_broadcast_is_framed_where_the_server_has_sessions(
    folder: Path, tmp_path: Path, sessions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.engines.sglang.BroadcastCarrier", Quiet)
    model = make_model()
    server = FakeSGLang(folder, sessions)
    try:
        with training([server], tmp_path, model, weights="distributed") as engine:
            engine.load_weights(model, 1)
            framed = ["/update_weights_from_distributed", "/end_weight_update"]
            assert server.paths == [
                "/pause_generation",
                "/begin_weight_update",
                *framed[: 2 if sessions else 1],
                "/flush_cache",
                "/model_info",
                "/weights_checker",
                "/continue_generation",
            ]
            body = dict(server.calls)["/update_weights_from_distributed"]
            assert body["names"] == [name for name, _ in model.named_parameters()]
            assert body["shapes"] == [list(value.shape) for _, value in model.named_parameters()]
            assert set(body["dtypes"]) == {"float32"} and body["weight_version"] == server.label
            carrier: Any = engine.pool.carrier
            assert (carrier.joined, carrier.left) == (1, 0)
            server.die()
            server.start()
            assert ask(engine).weight_version == 1  # with a group of its own again
            assert (carrier.joined, carrier.left) == (2, 1)
            server.refuses = True
            with pytest.raises(EngineError, match="status 400: update_weights_from_distributed must run"):
                engine.load_weights(model, 2)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("broken", "said"), [(RuntimeError("closed by peer"), "closed by peer"), (TimeoutError(), "TimeoutError")]
)
def test_a_collective_that_breaks_off_is_the_engines_failure(
    folder: Path, tmp_path: Path, broken: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot be taken back is asked again later; what waits for it must not die of another error."""
    monkeypatch.setattr("agent.engines.sglang.BroadcastCarrier", Quiet)
    model = make_model()
    server = FakeSGLang(folder, True)
    try:
        with training([server], tmp_path, model, weights="distributed") as engine:

            def fail(*arguments: Any) -> None:
                raise broken

            with monkeypatch.context() as patch:
                patch.setattr(Quiet, "_broadcast", fail)
                engine.pool.lose(engine.pool.members[0], "gone")
                assert not engine.pool.take_back(engine.pool.members[0])
                assert f"did not go over: {said}" in engine.pool.losses()
            assert engine.pool.take_back(engine.pool.members[0])
            monkeypatch.setattr(Quiet, "_broadcast", fail)
            with pytest.raises(EngineError, match="did not go over"):
                engine.load_weights(model, 1)
    finally:
        server.close()


def test_a_session_that_a_killed_trainer_left_open_is_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.engines.sglang.BroadcastCarrier", Quiet)
    server = FakeSGLang(folder)
    server.open = True
    try:
        with training([server], tmp_path, make_model(), weights="distributed") as engine:
            assert engine.weight_version == 0 and not server.open
    finally:
        server.close()


def test_settings_that_make_no_sense() -> None:
    for wrong in (
        {"urls": ("host:1",)},
        {"urls": ("http://host:x",)},
        {"urls": ("http://host:99999",)},
        {"urls": ("http://:1",)},
        {"urls": ("http://[",)},
        {"urls": ("http://a", "http://a")},
        {"urls": ("http://a", "http://a/")},
        {"urls": ("http://a",), "launch": True},
    ):
        with pytest.raises(ValidationError):
            SGLangSettings(**wrong)  # type: ignore[arg-type]
