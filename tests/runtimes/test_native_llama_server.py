"""The Backend suite on a native llama-server, the one that is preferred where it is installed."""

from pathlib import Path
from unittest import SkipTest

import pytest
from native_builds import built_llama_server

from runner_svc.backends.llama_server import LlamaServerBackend, LlamaServerConfig
from weft.host.demo import demo_model_path
from weft.testing.conformance.backend import BackendConformance, Engine

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]


@pytest.fixture(scope="session")
def llama_server() -> Path:
    return built_llama_server()


class TestLlamaServerBackendOverTheNativeServer(BackendConformance):
    stop_seconds = 20.0

    @pytest.fixture(autouse=True)
    def _binary(self, llama_server: Path) -> None:
        self._command = (str(llama_server),)

    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real server has no such fault switch")
        return LlamaServerBackend(
            LlamaServerConfig(
                command=self._command,
                model_path=demo_model_path(),
                alias="smollm2",
                slots=1 if engine is Engine.SLOW else 4,
                context_tokens=4096 if engine is Engine.SLOW else 1024,
            )
        )
