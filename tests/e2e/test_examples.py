"""The examples and the README's quick start, run against a mesh with the real model."""

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.demo_answers import demo_runner_without_end
from mesh_process import MeshProcess, running_mesh, write_config

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """The demo model, whose answers have as many tokens as they may have."""
    folder = tmp_path_factory.mktemp("examples")
    config = write_config(folder, demo_runner_without_end(default_max_tokens=48))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


async def _run(mesh: MeshProcess, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env={**os.environ, "WEFT_HOME": str(mesh.home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def _program_of(section: str) -> str:
    text = (ROOT / "docs" / "api.md").read_text().partition(f"# {section}\n")[2]
    programs: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return programs[0]


@pytest.mark.parametrize(("example", "address"), [("openai_chat.py", "url"), ("grpc_chat.py", "")])
async def test_example_prints_an_answer(mesh: MeshProcess, example: str, address: str) -> None:
    words = [getattr(mesh, address)] if address else []
    assert len((await _run(mesh, str(ROOT / "examples" / example), *words)).split()) >= 3


async def test_bare_stub_example_prints_an_answer_and_its_receipt(mesh: MeshProcess) -> None:
    out = await _run(mesh, str(ROOT / "examples/grpc_chat_stubs.py"), mesh.grpc)
    assert 'request_id: "example-1"' in out
    assert "OUTCOME_COMPLETED" in out


@pytest.mark.parametrize("section", ["API", "gRPC"])
async def test_first_program_of_each_section_runs_as_printed(mesh: MeshProcess, section: str) -> None:
    code = _program_of(section).replace("http://127.0.0.1:8080", mesh.url)
    assert len(code.strip().splitlines()) <= 10
    assert len((await _run(mesh, "-c", code)).split()) >= 3
