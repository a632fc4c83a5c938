"""Where the programs of an environment are, and what is said where it is not installed."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kit.failures import fails
from kit.gravel_runtime import CONFIGURATION, NAME, install_gravel
from kit.presence import present
from kit.runtime_plugin import forget_extensions

from runner_svc.environments.environment import EngineEnvironment, Interpreter, Variant
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installer import InstallOrder, needed_bytes
from runner_svc.environments.prebuilt import PrebuiltProgram, unpack_program
from runner_svc.runtimes.llama_server.runtime import ENVIRONMENT
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.table import environments, require_environment, users_of
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.doctor import examine
from weft_app.cli.doctor_checks import Verdict
from weft_app.cli.network_options import NetworkOptions
from weft_app.compose.home import WeftHome
from weft_app.compose.runner import runner_config
from weft_app.compose.startable import require_environments
from weft_app.config.loader import load_config


@pytest.fixture
def gravel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineEnvironment]:
    """The environment of an installed runtime of another package."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install_gravel(tmp_path / "site")
    forget_extensions()
    yield require_environment(NAME)
    forget_extensions()
    for module in ("weft_gravel.runtime", "weft_gravel", "weft_gravel_extension"):
        del sys.modules[module]


def _place(folder: EnvironmentFolder, *programs: str) -> Path:
    """Puts an environment with these programs where an installation would."""
    version = folder.root / ".versions" / NAME / "1"
    (version / "bin").mkdir(parents=True)
    for program in programs:
        (version / "bin" / program).touch()
    (folder.root / NAME).symlink_to(version)
    return folder.root / NAME


def test_programs_of_an_installed_environment_are_found_by_name(gravel: EngineEnvironment, tmp_path: Path) -> None:
    folder = WeftHome(tmp_path / "home").environments
    link = _place(folder, "python", "pebble")
    assert link == tmp_path / "home" / "runtimes" / NAME
    version = link.resolve()
    assert folder.environment_python(gravel) == version / "bin" / "python"
    assert folder.environment_program(gravel, "pebble") == version / "bin" / "pebble"


def test_missing_environment_is_refused_with_its_install_command(gravel: EngineEnvironment, tmp_path: Path) -> None:
    with fails(Reason.INVALID_ARGUMENT) as refused:
        WeftHome(tmp_path).environments.environment_python(gravel)
    command = f"weft runtime install gravel --home {tmp_path}"
    assert refused.value.message == f"the environment gravel is not installed; run: {command}"


def test_damaged_environment_is_refused_with_its_reinstall_command(gravel: EngineEnvironment, tmp_path: Path) -> None:
    folder = WeftHome(tmp_path).environments
    _place(folder, "python")
    with pytest.raises(WeftError, match=r"there is no \S+/gravel/1/bin/pebble; run: .* --reinstall"):
        folder.environment_program(gravel, "pebble")


def test_default_home_needs_no_option() -> None:
    usual = WeftHome(Path("~/.weft").expanduser()).environments
    assert usual.install_command("gravel") == "weft runtime install gravel"


def test_context_without_a_home_has_no_environments(gravel: EngineEnvironment) -> None:
    with pytest.raises(WeftError, match=r"run: weft runtime install gravel$"):
        ModelContext(where="runners.box").environments.environment_python(gravel)


def test_environment_of_another_package_is_listed_with_the_runtimes_that_use_it(gravel: EngineEnvironment) -> None:
    assert gravel in environments()
    assert [runtime.name for runtime in users_of(gravel)] == [NAME]
    with pytest.raises(WeftError, match=r"there is no environment 'gravle'; did you mean gravel\?"):
        require_environment("gravle")


def test_locks_declare_their_python_version(gravel: EngineEnvironment) -> None:
    narrow = replace(gravel, oldest_python=(3, 11), newest_python=(3, 12))
    answers = [narrow.supports_python(version) for version in ((3, 10), (3, 11), (3, 12), (3, 13))]
    assert answers == [False, True, True, False]


@pytest.mark.usefixtures("gravel")
def test_start_and_doctor_show_the_install_command_for_a_missing_environment(tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text(CONFIGURATION, "utf-8")
    home = WeftHome(tmp_path / "home")
    runners = load_config(path).runners or ()
    command = f"weft runtime install gravel --home {home.root}"
    with pytest.raises(FieldError, match=rf"runners.box: the environment gravel is not installed; run: {command}$"):
        require_environments(runners, home)
    (missing,) = [finding for finding in examine(home, path, NetworkOptions(port=0)) if finding.check == "environment"]
    assert (missing.verdict, missing.remedy) == (Verdict.FAILED, command)

    link = _place(home.environments, "python", "pebble")
    require_environments(runners, home)
    (there,) = [finding for finding in examine(home, path, NetworkOptions(port=0)) if finding.check == "environment"]
    assert (there.verdict, there.detail) == (Verdict.OK, f"gravel: {link}")


@pytest.mark.usefixtures("gravel")
def test_runner_with_its_own_command_needs_no_environment(tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text(CONFIGURATION.replace("runtime: gravel", "runtime: gravel, command: [pebble]"), "utf-8")
    home = WeftHome(tmp_path / "home")
    require_environments(load_config(path).runners or (), home)
    assert not [finding for finding in examine(home, path, NetworkOptions(port=0)) if finding.check == "environment"]


@pytest.mark.usefixtures("gravel")
def test_runtime_gets_the_environments_of_its_home(tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text(CONFIGURATION, "utf-8")
    (section,) = load_config(path).runners or ()
    with pytest.raises(WeftError, match=f"not installed; run: weft runtime install gravel --home {tmp_path}"):
        runner_config(section, WeftHome(tmp_path), address="unix:/r", registry_address="unix:/g")


def test_folder_of_an_archive_that_is_named_after_its_program_is_not_the_program(tmp_path: Path) -> None:
    inside = tmp_path / "pebble" / "pebble"
    inside.parent.mkdir()
    inside.write_text("#!/bin/sh\n")
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "pebble"))
    placed = unpack_program(archive, "pebble", tmp_path / "target", tmp_path / "temporary")
    assert placed.is_file()


def test_prebuilt_program_needs_no_space_for_a_build() -> None:
    built = InstallOrder(
        environment=ENVIRONMENT, variant=Variant.CUDA, interpreter=Interpreter(Path(sys.executable), "3.11.7")
    )
    prebuilt = replace(built, prebuilt=PrebuiltProgram("https://weft.example/llama-server", "0" * 64))
    assert needed_bytes(built) - needed_bytes(prebuilt) == present(built.build).work_bytes
