"""`weft runner conformance` as a user runs it, against runners of a real mesh."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from mesh_process import WEFT, MeshProcess, fake_runner, running_mesh, user_environment, write_config

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("conformance")
    config = write_config(
        folder, fake_runner("a", slots=2, answer_tokens=0, tokens_per_second=200, prefill_seconds=0.2)
    )
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def conformance(mesh: MeshProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WEFT, "runner", "conformance", *arguments, "--home", str(mesh.home)],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_weft_runner_passes_every_conformance_check(mesh: MeshProcess) -> None:
    done = conformance(mesh, "a", "-o", "json")
    findings: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    assert {finding["check"]: finding["detail"] for finding in findings if finding["verdict"] != "honoured"} == {}
    assert done.returncode == 0
    assert "0 broken" in done.stderr


async def test_checks_are_selectable_and_a_runner_can_be_given_by_address(mesh: MeshProcess) -> None:
    address = (await mesh.runners())[0].address
    done = conformance(mesh, address, "--only", "logs", "--only", "description")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CHECK", "VERDICT", "SECONDS", "DETAIL"]
    assert [line.split()[0] for line in lines[1:]] == ["description", "logs"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nobody",), 3, "there is no runner nobody; there is a"),
        (("a", "--model", "other"), 3, "there is no model other; there is m-a"),
        (("a", "--only", "nonsense"), 2, "--only: must be one of: description"),
    ],
)
def test_invalid_check_arguments_are_errors_that_list_the_choices(
    mesh: MeshProcess, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = conformance(mesh, *arguments)
    assert done.returncode == code
    assert words in done.stderr
