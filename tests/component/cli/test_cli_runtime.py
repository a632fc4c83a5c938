"""`weft runtime` as a process: what it prints, and how it ends when it is interrupted, killed, or not alone."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_harness import scripted_mesh
from cli_samples import some_runner
from kit.copied_python import write_copied_python
from kit.gravel_runtime import CONFIGURATION, NAME, install_gravel, lock_of, write_wheel
from kit.package_index import Behaviour, PackageIndex, package_index
from kit.warm_python import warm

pytestmark = pytest.mark.slow("makes environments with pip")

COLD_WEFT = (sys.executable, "-m", "weft_app.cli.main")
WAIT_SECONDS = 60.0


class Stage:
    """A home, an index, and an installed runtime of another package whose environment the index has."""

    def __init__(self, folder: Path, index: PackageIndex, python: Path) -> None:
        self.index = index
        self.folder = folder
        self.home = folder / "home"
        self.python = python
        self.wheel = write_wheel(index.wheels)
        self.lock = install_gravel(folder / "site", lock_of(self.wheel))
        self.weft = (*warm("kit.with_site"), str(folder / "site"), *COLD_WEFT)
        self.environment = {**os.environ, **index.variables(), "WEFT_HOME": str(self.home)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.weft, *words],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def install(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("runtime", "install", NAME, "--variant", "cpu", "--python", str(self.python), *words)

    def start_slow_install(self) -> subprocess.Popen[str]:
        """Returns an installation that has begun to load the package, and never ends by itself."""
        self.index.behaviour = Behaviour.DRIPS
        process = self.start("runtime", "install", NAME, "--variant", "cpu", "--python", str(self.python))
        assert self.index.dripping.wait(WAIT_SECONDS)
        return process

    def row(self) -> dict[str, Any]:
        listed = self.run("runtime", "list", "-o", "json")
        (row,) = [each for each in json.loads(listed.stdout)["items"] if each["name"] == NAME]
        assert isinstance(row, dict)
        return row

    def versions(self) -> list[str]:
        folder = self.home / "runtimes" / ".versions" / NAME
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copied_python(tmp_path_factory.mktemp("python"))


@pytest.fixture
def stage(tmp_path: Path, python: Path) -> Iterator[Stage]:
    with package_index(tmp_path / "wheels") as index:
        yield Stage(tmp_path, index, python)


def test_runtime_is_installed_listed_replaced_and_removed(stage: Stage) -> None:
    before = stage.row()
    assert (before["state"], before["variants"], before["runtimes"]) == ("not_installed", ["cpu", "cuda"], [NAME])
    assert before["detail"] == f"weft runtime install gravel --home {stage.home}"
    assert "installed" not in before

    first = stage.install("-o", "json")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert (document["kind"], document["state"], document["installed"]["variant"]) == (
        "EngineEnvironment",
        "installed",
        "cpu",
    )
    assert "weft: packages: installed\n" in first.stderr
    again = stage.install()
    assert (again.returncode, again.stdout, again.stderr) == (0, "gravel (cpu) is installed\n", "")

    write_wheel(stage.index.wheels, filling_bytes=10)
    stage.lock.write_text(lock_of(stage.wheel), "utf-8")
    assert stage.row()["state"] == "outdated"
    (old,) = stage.versions()
    assert stage.install().returncode == 0
    assert stage.row()["state"] == "installed"
    assert old not in stage.versions()

    assert stage.run("runtime", "remove", NAME).stdout == "gravel removed\n"
    assert stage.run("runtime", "remove", NAME).stdout == "gravel is not installed\n"
    assert stage.versions() == []


def test_unknown_runtime_is_rejected_with_the_available_names(stage: Stage) -> None:
    refused = stage.run("runtime", "install", "gravle")
    assert refused.returncode == 3
    assert refused.stderr == "weft: there is no environment 'gravle'; did you mean gravel?\n"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--variant cpu --cuda-architectures 8.6", "--cuda-architectures: is for programs that are built"),
        ("--variant cuda --cuda-architectures 86", "--cuda-architectures: compute capabilities are written like"),
        ("--url https://example.com/llama-server", "--sha256: the 64 hexadecimal digits"),
        (f"--sha256 {'0' * 64}", "--url: the URL of a program"),
        (f"--url http://example.com/llama-server --sha256 {'0' * 64}", "http://example.com is not encrypted"),
    ],
)
def test_option_of_a_program_that_does_not_fit_is_refused(stage: Stage, words: str, fault: str) -> None:
    refused = stage.run("runtime", "install", "llama_server", *words.split())
    assert (refused.returncode != 0, refused.stdout) == (True, "")
    assert refused.stderr.startswith(f"weft: {fault}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signal_stops_an_installation_and_its_processes(stage: Stage, number: signal.Signals, code: int) -> None:
    installing = stage.start_slow_install()
    children = psutil.Process(installing.pid).children(recursive=True)
    assert children
    installing.send_signal(number)
    installing.communicate(timeout=WAIT_SECONDS)
    assert (installing.returncode, stage.versions()) == (code, [])
    _, left = psutil.wait_procs(children, timeout=WAIT_SECONDS)
    assert left == []


def test_files_of_a_killed_installation_are_never_used_and_the_next_one_works(stage: Stage) -> None:
    installing = stage.start_slow_install()
    children = psutil.Process(installing.pid).children(recursive=True)
    installing.kill()
    installing.communicate(timeout=WAIT_SECONDS)
    psutil.wait_procs(children, timeout=WAIT_SECONDS)
    assert not any(child.is_running() for child in children)
    left = stage.versions()
    assert left
    assert stage.row()["state"] == "not_installed"

    stage.index.behaviour = Behaviour.SERVES
    assert stage.install().returncode == 0
    assert stage.row()["state"] == "installed"
    assert not set(left) & set(stage.versions())


def test_mesh_with_a_missing_runtime_does_not_start_and_suggests_the_install_command(stage: Stage) -> None:
    (stage.folder / "weft.yaml").write_text(CONFIGURATION, "utf-8")
    refused = stage.run("up", "--port", "0")
    assert refused.returncode == 2
    command = f"weft runtime install gravel --home {stage.home}"
    assert refused.stderr == f"weft: runners.box: the environment gravel is not installed; run: {command}\n"


def test_runtime_used_by_a_running_runner_is_not_removed(stage: Stage) -> None:
    with scripted_mesh(stage.home) as mesh:
        user = some_runner("unix:/nowhere")
        user.runtime, user.host = "ctranslate2", socket.gethostname()
        mesh.add(user)
        mesh.serve()
        refused = stage.run("runtime", "remove", "ctranslate2")
        assert refused.returncode == 4
        assert f"weft: ctranslate2 is used by {user.name} of the mesh on {stage.home}; stop it" in refused.stderr
        assert stage.run("runtime", "remove", "ctranslate2", "--force").stdout == "ctranslate2 is not installed\n"
        # The control: another environment, which no runner of this mesh needs.
        assert stage.run("runtime", "remove", NAME).stdout == "gravel is not installed\n"
