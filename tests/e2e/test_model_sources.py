"""A model of weft.yaml with a `source`: pulled with its first load, on an empty home, to a real answer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from mesh_process import MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft_testing.model_hub import HubRepository, ModelHub

SOURCE = "hf:acme/tiny-GGUF:Q4_1"
WEIGHTS = bytes(range(256)) * 2_000
NAME = "tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    hub = ModelHub()
    hub.repositories["acme/tiny-GGUF"] = HubRepository(
        files={"tiny-Q4_1.gguf": WEIGHTS, "mmproj-F16.gguf": WEIGHTS[:1000]}
    )
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub.running():
        yield hub


def _config(folder: Path, source: str = SOURCE, **model: Any) -> str:
    runner = fake_runner("a")
    del runner["models"][0]["path"]
    runner["models"][0].update(name=NAME, source=source, **model)
    return str(write_config(folder, runner))


def _chat(url: str, model: str = NAME, **options: Any) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=90) as client:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Say one sentence about the sea."}], **options
        )
    return answer.choices[0].message.content or ""


async def _instance(mesh: MeshProcess) -> InstanceState | None:
    """The only instance, as the registry knows it."""
    runners = await mesh.runners()
    instances = runners[0].capability.instances if runners else ()
    return instances[0] if instances else None


async def test_load_progress_includes_the_pull_and_uses_its_files(hub: ModelHub, tmp_path: Path) -> None:
    hub.faults.chunk_seconds = 0.3
    with running_mesh(tmp_path / "home", "--config", _config(tmp_path, start_asleep=True)) as mesh:
        assert hub.sent_bytes == 0
        answer = asyncio.create_task(asyncio.to_thread(_chat, mesh.url))

        async def pulling() -> InstanceState | None:
            instance = await _instance(mesh)
            # Before the first bytes, the detail says only what is to be pulled.
            is_told = (
                instance is not None and instance.detail.startswith("pulling ") and "of 501 KiB" in instance.detail
            )
            return instance if is_told else None

        seen = await eventually(pulling, 30, "no load shows the progress of a pull")
        assert 0 <= seen.load_progress < 1
        hub.faults.chunk_seconds = 0.0
        assert await answer
        lines = "\n".join((await mesh.describe("a", log_lines=100)).log_lines)
        listed = await run_weft("models", "ls", "--config", _config(tmp_path), home=mesh.home)
    assert listed[0] == 0
    assert listed[1].splitlines()[1].split()[0] == SOURCE
    assert listed[1].splitlines()[1].split()[-1] == NAME
    assert lines


def test_models_with_one_source_pull_it_once_and_restart_without_the_hub(hub: ModelHub, tmp_path: Path) -> None:
    hub.faults.chunk_seconds = 0.02
    with running_mesh(tmp_path / "home", "--config", _config(tmp_path, replicas=2)) as mesh:
        assert _chat(mesh.url, NAME)
        assert _chat(mesh.url, f"{NAME}-2")
    assert hub.sent_bytes == len(WEIGHTS) + 1000
    hub.requests.clear()
    with running_mesh(tmp_path / "home", "--config", _config(tmp_path, replicas=2)) as mesh:
        assert _chat(mesh.url, NAME)
        assert _chat(mesh.url, f"{NAME}-2")
    assert hub.requests == []
