"""An environment whose program is built from a source distribution: with real pip, and a CMake of ours."""

import hashlib
import io
import platform
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from kit.copied_python import write_copied_python
from kit.gravel_runtime import lock_of
from kit.presence import present

from runner_svc.environments.environment import (
    BuildTool,
    EngineEnvironment,
    EnvironmentVariant,
    HeaderPackage,
    Interpreter,
    SourceBuild,
    ToolPackages,
    Variant,
)
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import status_of, variant_of, versions_of
from runner_svc.environments.installer import (
    KEPT_PER_VARIANT,
    EnvironmentInstaller,
    InstallOrder,
    InstallProgress,
    InstallStep,
)
from runner_svc.environments.prebuilt import PrebuiltProgram
from runner_svc.environments.program_build import unpack_headers
from runner_svc.environments.removal import remove_environment, remove_version, use_version
from weft.api.runner.v1 import environment_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock

pytestmark = pytest.mark.slow("makes environments with pip")

CMAKE = """
import os, sys
from pathlib import Path

def main():
    words = sys.argv[1:]
    if "--build" not in words:
        made = Path(words[words.index("-B") + 1])
        made.mkdir(exist_ok=True)
        (made / "options").write_text(" ".join(words))
        assert Path(words[words.index("-S") + 1], "main.c").is_file()
        return
    made = Path(words[words.index("--build") + 1])
    print("[1/3] Building C object main.c.o")
    if "WEFT_TEST_BROKEN" in os.environ:
        sys.exit("main.c:1: error: a stone")
    (made / "bin").mkdir(exist_ok=True)
    variant = "vulkan" if "-DVULKAN=ON" in (made / "options").read_text() else "cpu"
    program = made / "bin" / "pebble"
    program.write_text(f"#!/bin/sh\\necho a pebble for {variant}\\n")
    program.chmod(0o755)
    print("[2/3] Building C object more.c.o")
    print("[1/1] Linking C executable generator")
    print("[3/3] Linking C executable bin/pebble")
"""
BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder, "pebble_source-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: pebble-source\\nVersion: 1.0\\n")
    return info.name
"""
CHECK = """
import subprocess, sys
said = subprocess.run([sys.argv[1]], capture_output=True, text=True, check=True).stdout
sys.exit(0 if said == f"a pebble for {sys.argv[2]}\\n" else "it is a stone")
"""


def _write_wheel(folder: Path) -> Path:
    info = "cmake-1.0.dist-info"
    files = {
        "cmake/__init__.py": CMAKE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: cmake\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: weft\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ncmake = cmake:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / "cmake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def _write_source(folder: Path) -> Path:
    build_system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: pebble-source\nVersion: 1.0\n",
        "pyproject.toml": build_system,
        "backend.py": BACKEND,
        "vendor/pebble/main.c": "int main(void) { return 0; }\n",
    }
    path = folder / "pebble_source-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"pebble_source-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


class Stage:
    """A home, a folder of packages, and the environment `pebble` with a program for processors or for Vulkan."""

    def __init__(self, folder: Path, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        packages, declared = folder / "packages", folder / "declared" / "pebble"
        packages.mkdir()
        declared.mkdir(parents=True)
        self.source = _write_source(packages)
        digest = hashlib.sha256(self.source.read_bytes()).hexdigest()
        (declared / "source.lock").write_text(f"pebble-source==1.0 --hash=sha256:{digest}\n")
        (declared / "tools.lock").write_text(lock_of(_write_wheel(packages)))
        (declared / "check.py").write_text(CHECK)
        self.declared = declared
        self.environment = EngineEnvironment(
            folder=declared,
            summary="A pebble",
            variants={Variant.CPU: self.variant(), Variant.VULKAN: self.variant("-DVULKAN=ON")},
            program="pebble",
            newest_python=(3, 14),
            machine="",
        )
        self.folder = EnvironmentFolder(folder / "home" / "runtimes")
        self.progress: list[InstallProgress] = []

    def variant(self, *options: str, tool: str = "sh") -> EnvironmentVariant:
        build = SourceBuild(
            source="source.lock",
            inside="vendor/pebble",
            options=options,
            tools=(BuildTool((tool,), f"apt install {tool}"),),
            check=self.declared / "check.py",
            work_bytes=1,
        )
        return EnvironmentVariant(locks=("tools.lock",), installed_bytes=1, download_bytes=1, build=build)

    async def install(
        self, variant: Variant = Variant.CPU, prebuilt: PrebuiltProgram | None = None
    ) -> pb.InstalledEnvironment:
        installer = EnvironmentInstaller(self.folder, SystemClock(), self.progress.append, lambda _: None)
        order = InstallOrder(
            environment=self.environment,
            variant=variant,
            interpreter=self.interpreter,
            seconds=60.0,
            jobs=1,
            options=("-DSTONES=2",),
            prebuilt=prebuilt,
        )
        return await installer.install(order)

    def declare(self, build: EnvironmentVariant) -> None:
        self.environment.variants[Variant.CPU] = build  # type: ignore[index]  # it is a dict

    def state(self) -> str:
        state = status_of(self.environment, self.folder).state
        return pb.EnvironmentState.Name(state).removeprefix("ENVIRONMENT_STATE_")

    def says(self) -> str:
        program = self.folder.environment_program(self.environment, "pebble")
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout

    def kept(self) -> list[Variant | None]:
        return [variant_of(receipt) for receipt in versions_of(self.environment, self.folder).values()]

    def version(self, variant: Variant) -> Path:
        found = versions_of(self.environment, self.folder)
        return next(version for version, receipt in found.items() if variant_of(receipt) is variant)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return Interpreter(write_copied_python(tmp_path_factory.mktemp("python")), platform.python_version())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> Stage:
    made = Stage(tmp_path, interpreter)
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(made.source.parent),
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return made


async def test_program_is_built_checked_and_moved_into_place(stage: Stage) -> None:
    assert stage.state() == "NOT_INSTALLED"
    receipt = await stage.install()
    assert stage.says() == "a pebble for cpu\n"
    assert (stage.state(), receipt.python_version) == ("INSTALLED", "")
    assert list(dict.fromkeys(each.step for each in stage.progress)) == list(InstallStep)
    counts = [(each.done, each.total) for each in stage.progress if each.step is InstallStep.BUILD]
    assert counts == [(0, 1), (1, 3), (2, 3), (3, 3), (1, 1)], "without the steps of a build within"
    assert not stage.folder.work(stage.environment).exists()


async def test_failed_build_continues_without_another_download(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TEST_BROKEN", "yes")
    with pytest.raises(WeftError, match=r"main\.c:1: error: a stone") as refused:
        await stage.install()
    assert (refused.value.reason, stage.state()) == (Reason.BACKEND_ERROR, "NOT_INSTALLED")
    monkeypatch.delenv("WEFT_TEST_BROKEN")
    stage.source.unlink()
    await stage.install()
    assert stage.says() == "a pebble for cpu\n"


async def test_other_builds_are_kept_chosen_and_removed(stage: Stage) -> None:
    await stage.install()
    await stage.install(Variant.VULKAN)
    await stage.install(Variant.VULKAN)
    assert stage.says() == "a pebble for vulkan\n"
    assert stage.kept() == [Variant.VULKAN, Variant.CPU]
    use_version(stage.environment, stage.folder, stage.version(Variant.CPU))
    assert stage.says() == "a pebble for cpu\n"
    assert stage.state() == "INSTALLED"
    remove_version(stage.environment, stage.folder, stage.version(Variant.CPU))
    assert (stage.state(), stage.kept()) == ("NOT_INSTALLED", [Variant.VULKAN])
    use_version(stage.environment, stage.folder, stage.version(Variant.VULKAN))
    assert remove_environment(stage.environment, stage.folder)
    assert stage.kept() == []


async def test_program_that_fails_its_check_is_not_used(stage: Stage) -> None:
    await stage.install()
    (stage.declared / "check.py").write_text("raise SystemExit('it is a stone')")
    with pytest.raises(WeftError, match="it was built, but does not work here:\n  it is a stone"):
        await stage.install(Variant.VULKAN)
    assert stage.says() == "a pebble for cpu\n"
    # The next attempt configures anew: it may have another compiler.
    assert [each.name for each in stage.folder.work(stage.environment).glob("*/build")] == []


async def test_missing_build_tool_is_reported_before_anything_is_made(stage: Stage) -> None:
    stage.declare(stage.variant(tool="quarry"))
    with pytest.raises(WeftError, match=r"pebble \(cpu\) is built here and needs quarry \(apt install quarry\)"):
        await stage.install()
    assert stage.progress == []


async def test_old_builds_of_a_variant_are_pruned(stage: Stage) -> None:
    await stage.install(Variant.VULKAN)
    for number in range(KEPT_PER_VARIANT + 1):
        stage.declare(stage.variant(f"-DNUMBER={number}"))
        await stage.install()
    assert stage.kept() == [Variant.CPU] * KEPT_PER_VARIANT + [Variant.VULKAN]


async def test_missing_tool_is_replaced_by_its_packages(stage: Stage) -> None:
    wheel = stage.source.parent / "quarry-1.0-py3-none-any.whl"
    info = "quarry-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("quarry/lib/libquarry.so.1", "rock")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quarry\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (stage.declared / "quarry.lock").write_text(lock_of(wheel))
    prepared: list[Path] = []

    def prepare(packages: Path, source: Path) -> Sequence[str]:
        prepared.extend((packages / "quarry", source / "main.c"))
        return ("-DVULKAN=ON",)

    packages = ToolPackages(lock="quarry.lock", prepare=prepare, libraries=("quarry/lib/*.so.*",))
    build = present(stage.variant().build)
    build = replace(build, tools=(BuildTool(("quarry",), "", packages=packages),))
    stage.environment.variants[Variant.VULKAN] = replace(stage.variant(), build=build)  # type: ignore[index]
    await stage.install(Variant.VULKAN)
    assert stage.says() == "a pebble for vulkan\n"
    assert [path.name for path in prepared] == ["quarry", "main.c"]
    assert (stage.version(Variant.VULKAN) / "lib" / "libquarry.so.1").read_text() == "rock"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("archive", [None, "tar.gz", "zip"])
async def test_prebuilt_program_is_checked_and_used(
    stage: Stage, served: tuple[Path, str], archive: str | None
) -> None:
    folder, url = served
    program = folder / "made" / "bin" / "pebble"
    (folder / "made" / "lib").mkdir(parents=True)
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho a pebble for cpu\n")
    (folder / "made" / "lib" / "libquarry.so").write_text("rock")
    file = program
    if archive is not None:
        form = {"tar.gz": "gztar", "zip": "zip"}[archive]
        file = Path(shutil.make_archive(str(folder / "pebble"), form, folder / "made"))
    prebuilt = PrebuiltProgram(f"{url}/{file.relative_to(folder)}", _digest(file))
    receipt = await stage.install(prebuilt=prebuilt)
    assert (stage.says(), stage.state()) == ("a pebble for cpu\n", "INSTALLED")
    assert receipt.lock_digest == f"sha256:{_digest(file)}"
    assert (Path(receipt.folder) / "lib" / "libquarry.so").exists() == (archive is not None)
    assert not stage.folder.work(stage.environment).exists()


async def test_prebuilt_program_with_another_digest_or_that_fails_is_not_used(
    stage: Stage, served: tuple[Path, str]
) -> None:
    folder, url = served
    program = folder / "pebble"
    program.write_text("#!/bin/sh\necho a stone\n")
    with pytest.raises(WeftError, match="has the SHA-256"):
        await stage.install(prebuilt=PrebuiltProgram(f"{url}/pebble", "0" * 64))
    with pytest.raises(WeftError, match="it was downloaded, but does not work here"):
        await stage.install(prebuilt=PrebuiltProgram(f"{url}/pebble", _digest(program)))
    assert stage.state() == "NOT_INSTALLED"


def test_headers_of_a_debian_package_are_unpacked(tmp_path: Path, served: tuple[Path, str]) -> None:
    folder, url = served
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/include/stone.h")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"rock"))
    package = folder / "stone_1.deb"
    package.write_bytes(b"!<arch>\n" + _entry("debian-binary", b"2.0") + _entry("data.tar.xz", content.getvalue()))
    unpack_headers([HeaderPackage(url=f"{url}/stone_1.deb", sha256=_digest(package))], tmp_path / "headers")
    assert [path.name for path in (tmp_path / "headers").rglob("*") if path.is_file()] == ["stone.h"]


def _entry(name: str, content: bytes) -> bytes:
    """An entry of a Unix archive, which begins at an even place."""
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
    return head.encode() + content + b"\n" * (len(content) % 2)
