"""Each process of a mesh is ended by SIGTERM under load and started again: no request is lost, each answer is whole."""

import asyncio
from pathlib import Path

import pytest
from mixed_mesh import GATEWAYS, ORDER, RUNNERS, MixedMesh, running_mixed, under_load

ROUNDS = 3


def _start(mesh: MixedMesh) -> None:
    for name in ORDER:
        mesh.start(name)


@pytest.mark.parametrize(
    "names",
    [
        *(
            pytest.param(names, marks=pytest.mark.nightly("a matrix of drains"))
            for names in (("registry",), ("router",), GATEWAYS)
        ),
        RUNNERS,
    ],
    ids=lambda names: names[0],
)
async def test_graceful_shutdown_of_a_process_loses_no_request(tmp_path: Path, names: tuple[str, ...]) -> None:
    with running_mixed(tmp_path) as mesh:
        await asyncio.to_thread(_start, mesh)
        async with under_load(mesh) as callers:
            await callers.wait_served()
            for _ in range(ROUNDS):
                for name in names:
                    await mesh.replace(name)
                    await callers.wait_served()
        assert callers.lost == []
