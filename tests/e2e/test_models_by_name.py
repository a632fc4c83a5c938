"""A model that no weft.yaml names: loaded by its source, kept over kills and restarts, removed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import openai
import pytest
from kit.demo_answers import WITHOUT_END
from mesh_process import MeshProcess, eventually, run_weft, running_mesh, write_config

from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel
from weft.kernel.values.address import metadata_of
from weft_app.compose.demo import demo_model_path
from weft_testing.model_hub import HubRepository, ModelHub

if TYPE_CHECKING:
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

pytestmark = pytest.mark.nightly("repeats kills and restarts of a mesh")

SOURCE = "hf:acme/smol-GGUF"
NAME = "smol"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    hub = ModelHub()
    hub.repositories["acme/smol-GGUF"] = HubRepository(files={"smol-Q4_1.gguf": demo_model_path().read_bytes()})
    hub.repositories["acme/text"] = HubRepository(files={"text-Q4_0.gguf": b"no model"})
    hub.repositories["acme/gated"] = HubRepository(files={"gated-Q4_0.gguf": b"GGUF"}, gated=True)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub.running():
        yield hub


def _config(folder: Path) -> str:
    """A runner with one model of its own, which is never loaded here."""
    model = {"name": "own", "path": str(demo_model_path()), "start_asleep": True, "context_tokens": 512, "slots": 1}
    return str(write_config(folder, {"name": "real", "models": [model]}))


def _chat(mesh: MeshProcess) -> str:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0, timeout=90) as client:
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Say one sentence about the sea."}],
            max_tokens=16,
            temperature=0,
            extra_body=WITHOUT_END,
        )
    return answer.choices[0].message.content or ""


async def _engines(mesh: MeshProcess) -> list[int]:
    """The processes of the engines that serve the model."""
    (runner,) = await mesh.runners()
    async with open_channel(runner.address) as channel:
        stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        request = runner_service_pb2.DescribeRequest()
        response = await stub.Describe(request, timeout=5.0, metadata=metadata_of(runner.address))
    return [each.process_id for each in response.instances if each.model == NAME and each.process_id]


@pytest.mark.real
async def test_hub_model_loads_by_id_and_survives_kills_and_restarts(hub: ModelHub, tmp_path: Path) -> None:
    config = _config(tmp_path)
    with running_mesh(tmp_path / "home", "--config", config) as mesh:
        code, said, _ = await run_weft("load", SOURCE, "--ctx", "512", home=mesh.home)
        assert (code, said.splitlines()[0]) == (0, f"model/{NAME} loaded")
        assert "llama_server serves it" in said
        first = _chat(mesh)
        assert first
        runners = await mesh.runners()
        instance = next(each for each in runners[0].capability.instances if each.model == NAME)
        assert instance.added_source == SOURCE
        (pid,) = await _engines(mesh)
        os.kill(pid, signal.SIGKILL)

        async def is_started_again() -> bool:
            return await _engines(mesh) not in ([], [pid])

        # A request that reaches the runner before it has noticed ends with the engine's death.
        await eventually(is_started_again, 30.0, "it is not started again")
        assert _chat(mesh) == first
        assert "llama_server serves it" in (await run_weft("describe", "model", NAME, home=mesh.home))[1]
        for source, words in (("hf:acme/text", "is not a GGUF file"), ("hf:acme/gated", "HF_TOKEN")):
            code, _, refused = await run_weft("load", source, home=mesh.home)
            assert (code != 0, words in refused) == (True, True), refused
    hub.requests.clear()
    with running_mesh(tmp_path / "home", "--config", config) as mesh:
        assert _chat(mesh) == first
        assert hub.requests == []
        code, _, refused = await run_weft("models", "rm", SOURCE, "--config", config, home=mesh.home)
        assert (code != 0, f"served as {NAME}" in refused) == (True, True)
        await mesh.weft("delete", "model", NAME, "--force")
        with pytest.raises(openai.NotFoundError):
            _chat(mesh)
        assert await _engines(mesh) == []
        await mesh.weft("models", "rm", SOURCE, "--config", config)
