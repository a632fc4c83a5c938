"""vLLM itself and llama.cpp's server take turns on two declared devices: nothing is ever booked twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh_process import MeshProcess, running_mesh, write_config
from native_builds import built_vllm
from two_devices import (
    MODELS,
    QUICK,
    SECTIONS,
    SERVED,
    WIDE,
    mixed_load,
    runner_of_llama,
    runner_of_vllm,
    watched,
)

from weft_app.compose.demo import demo_model_path

pytestmark = [
    pytest.mark.runtimes,
    pytest.mark.timeout(3700),
    pytest.mark.nightly("many starts of vLLM: 40 s of both processors each"),
]

START_SECONDS = 600.0
REQUESTS = 3
TURNS = 2


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[MeshProcess]:
    program, model = built_vllm()
    served = runner_of_vllm(str(model), [str(program)], load_stall_seconds=START_SECONDS)
    quantized = runner_of_llama(str(demo_model_path()))
    router = {"max_cold_wait_seconds": 5.0, "queue_timeout_seconds": START_SECONDS}
    config = write_config(tmp_path, served, quantized, router=router, **SECTIONS)
    with running_mesh(tmp_path / "home", "--config", str(config), within=QUICK) as running:
        yield running


async def test_engines_swapping_under_mixed_load_never_share_memory_and_every_request_ends(mesh: MeshProcess) -> None:
    async with watched(mesh) as stage:
        await mixed_load(stage, requests=REQUESTS, turns=TURNS)
    assert stage.outcomes.failed == {}
    assert all(stage.outcomes.answered[model] >= 2 * REQUESTS for model in MODELS)
    assert all(len(stage.checker.granted(model)) >= TURNS for model in MODELS)
    assert {tuple(lease.shares) for lease in stage.checker.granted(WIDE)} == {(0, 1)}, "it is split over both"


async def test_lease_of_a_killed_vllm_runner_ends_only_after_its_engine_exits(mesh: MeshProcess) -> None:
    """The runner of llama.cpp is killed in tests/e2e/test_two_devices.py, with the same real server."""
    async with watched(mesh) as stage:
        await stage.kill_under_load(SERVED, WIDE, REQUESTS)
        assert stage.outcomes.answered.keys() == set(MODELS), "all models answer after it"
