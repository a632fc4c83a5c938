"""The backend port's suite on every implementation, with real processes behind each."""

import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from runner_svc.backends.llama_server import LlamaServerBackend, LlamaServerConfig
from runner_svc.supervise.process import StopGraces
from weft.host.demo import LAUNCHER, demo_model_path
from weft.testing.conformance.backend import BackendConformance, Engine
from weft.testing.conformance.backend_port import ANSWER_TOKENS, MAX_LOG_BYTES
from weft.testing.fake_backend.process import fake_backend_command

SHORT_GRACES = StopGraces(first_term_seconds=0.5, second_term_seconds=0.5)

FAKE_SWITCHES: dict[Engine, dict[str, Any]] = {
    Engine.NORMAL: {"answer_tokens": 2 * ANSWER_TOKENS},
    Engine.SLOW: {"answer_tokens": 0, "tokens_per_second": 20},
    Engine.NEVER_READY: {"never_healthy": True},
    Engine.EXITS_AT_START: {"exit_at_start": 3},
    Engine.IGNORES_SIGTERM: {"ignore_sigterm": True},
    Engine.NOISY: {"stderr_flood_bytes": MAX_LOG_BYTES},
    Engine.WITH_DESCENDANT: {"fork_grandchild": True},
}


class TestLlamaServerBackendOverTheFake(BackendConformance):
    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        return LlamaServerBackend(
            LlamaServerConfig(
                command=tuple(fake_backend_command(**FAKE_SWITCHES[engine])),
                model_path=Path(__file__),
                alias="fake",
                slots=1 if engine is Engine.SLOW else 4,
                load_stall_seconds=1.5,
                graces=SHORT_GRACES,
            )
        )


@pytest.mark.real
class TestLlamaServerBackendOverLlamaCpp(BackendConformance):
    stop_seconds = 20.0

    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real server has no such fault switch")
        return LlamaServerBackend(
            LlamaServerConfig(
                command=(sys.executable, "-m", LAUNCHER),
                model_path=demo_model_path(),
                alias="smollm2",
                slots=1 if engine is Engine.SLOW else 4,
                context_tokens=4096 if engine is Engine.SLOW else 1024,
            )
        )
