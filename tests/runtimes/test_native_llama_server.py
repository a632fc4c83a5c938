"""The Backend suite on a native llama-server, the one that is preferred where it is installed."""

import asyncio
import re
from pathlib import Path
from unittest import SkipTest

import pytest
from kit.engine_settings import engine_settings
from native_builds import built_llama_server

from runner_svc.backend.port import LoadOrder
from runner_svc.memory.estimate import read_model_facts
from runner_svc.policy.memory_estimate import MEBIBYTE, compute_bytes, context_bytes, settings_for
from runner_svc.runtimes.llama_server.arguments import habits_of
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft_app.compose.demo import demo_model_path
from weft_testing.conformance.backend import BackendConformance, Engine

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]


@pytest.fixture(scope="session")
def llama_server() -> Path:
    return built_llama_server()


class TestLlamaServerBackendOverTheNativeServer(BackendConformance):
    stop_seconds = 20.0

    @pytest.fixture(autouse=True)
    def _binary(self, llama_server: Path, tmp_path: Path) -> None:
        self._command = (str(llama_server),)
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        variant = self._tmp_path / "variant.gguf"
        variant.symlink_to(demo_model_path())
        return variant

    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real server has no such fault switch")
        return LlamaServerBackend(
            *engine_settings(
                LlamaServerModel,
                command=self._command,
                path=demo_model_path(),
                name="smollm2",
                slots=1 if engine is Engine.SLOW else 4,
                context_tokens=4096 if engine is Engine.SLOW else 1024,
            )
        )


_BUFFER = re.compile(r"CPU (KV|compute) buffer size =\s+([0-9.]+) MiB")


@pytest.mark.parametrize(
    "parameters",
    [
        {"context_tokens": 8192, "slots": 1},
        {"context_tokens": 2048, "slots": 4},
        {"context_tokens": 8192, "slots": 1, "ubatch_tokens": 128},
        {"context_tokens": 8192, "slots": 1, "flash_attention": "off"},
        {"context_tokens": 4096, "slots": 2, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ],
)
async def test_header_estimate_matches_what_the_server_reserves(
    llama_server: Path, parameters: dict[str, int | str]
) -> None:
    """Context to the byte, room to compute as an upper bound that is not twice too high."""
    shape = read_model_facts(demo_model_path()).shape
    assert shape is not None
    backend = LlamaServerBackend(
        *engine_settings(
            LlamaServerModel,
            command=(str(llama_server),),
            path=demo_model_path(),
            shape=shape,
            name="smollm2",
        )
    )
    async with asyncio.timeout(60.0):
        facts = await backend.start(LoadOrder(parameters=parameters))
    log = "\n".join(backend.log_lines(10_000))
    load = backend.engine_load
    await backend.stop()
    reserved = {kind: float(size) for kind, size in _BUFFER.findall(log)}
    settings = settings_for(0, 0, parameters, habits_of(backend.model))
    assert (facts.context_tokens, facts.slots) == (settings.context_tokens, settings.slots)
    assert context_bytes(shape, settings) / MEBIBYTE == pytest.approx(reserved["KV"], abs=0.01)
    assert load is not None
    assert load.kv_cache_bytes == round(reserved["KV"] * MEBIBYTE)
    assert load.weight_bytes == pytest.approx(shape.weight_bytes, rel=0.01)
    assert reserved["compute"] <= compute_bytes(shape, settings) / MEBIBYTE < 2 * reserved["compute"]
