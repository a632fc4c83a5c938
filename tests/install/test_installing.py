"""The wheel and the source distribution, installed by pipx and uvx on an account on which nothing is installed."""

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bare_account import TOOLS, BareAccount
from distributions import Built, build
from kit.listing_server import WORDS, listing_server
from wheel_contents import differences, without

from weft import __version__
from weft_app.compose.demo import DEMO_MODEL, demo_model_path
from weft_testing.model_hub import HubRepository, ModelHub

OLLAMA_PORT = 11434
"""Where Ollama listens, and weft looks for it."""
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.install, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory, packages: Path) -> BareAccount:
    return BareAccount.create(tmp_path_factory.mktemp("account"), packages)


@pytest.fixture(scope="module")
def installed(account: BareAccount, built: Built) -> Iterator[BareAccount]:
    """The account with weft installed by pipx."""
    account.tool("pipx", "install", built.wheel)
    yield account
    # Its model is large, and pytest keeps the folders of the last runs.
    shutil.rmtree(account.home)


@contextmanager
def _started(account: BareAccount, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `weft up` on an account; what is left of it when the block fails is killed."""
    weft = str(account.home / ".local" / "bin" / "weft")
    process = subprocess.Popen(
        [weft, "up", "--port", "0", *arguments],
        env=account.environment,
        cwd=account.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@contextmanager
def _mesh(account: BareAccount) -> Iterator[str]:
    """A `weft up` on an account until the block ends; yields what it had printed when it was up."""
    printed: list[str] = []
    with _started(account) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if "stop with Ctrl-C" in line:
                break
        yield "".join(printed)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(printed) + rest


def test_build_is_reproducible(built: Built, tmp_path: Path) -> None:
    build("--outdir", tmp_path / "again", "--sdist", ROOT)
    build("--outdir", tmp_path / "direct", "--wheel", ROOT)
    assert (tmp_path / "again" / built.source.name).read_bytes() == built.source.read_bytes()
    # The first one was built from the source distribution.
    assert (tmp_path / "direct" / built.wheel.name).read_bytes() == built.wheel.read_bytes()


def test_metadata_is_valid_for_the_package_index(built: Built) -> None:
    checked = subprocess.run(
        [TOOLS / "twine", "check", "--strict", built.wheel, built.source], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_wheel_contains_exactly_the_packages(built: Built) -> None:
    assert differences(built.wheel) == set()


@pytest.mark.parametrize("prefix", ["router_svc/", "weft/protos/", "runner_svc/environments/vllm/cpu.lock"])
def test_wheel_missing_a_package_or_data_file_is_detected(built: Built, tmp_path: Path, prefix: str) -> None:
    """The control: the comparison fails for such a wheel."""
    lacking = differences(without(built.wheel, prefix, tmp_path / built.wheel.name))
    assert lacking
    assert all(name.startswith(f"- {prefix}") for name in lacking)


def test_wheel_missing_a_service_fails_to_serve(built: Built, packages: Path, tmp_path: Path) -> None:
    """The control of the installation: what is missing is noticed by the first command that needs it."""
    account = BareAccount.create(tmp_path, packages)
    account.tool("pipx", "install", without(built.wheel, "router_svc/", tmp_path / built.wheel.name))
    assert "router_svc" in account.weft("up", "--port", "0", rc=1)
    shutil.rmtree(account.home)


def test_interrupted_first_start_is_clean_and_keeps_downloads(installed: BareAccount, tmp_path: Path) -> None:
    home = tmp_path / "first"
    with _started(installed, "--home", str(home)) as process:
        assert process.stdout is not None
        seen = next(line for line in process.stdout if "MiB of" in line)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, seen + rest
    assert rest.rstrip().endswith("stopped")
    # The next start goes on there: tests/component/runner/test_model_pull.py.
    (partial,) = (path for path in (home / "models" / "partial").iterdir() if not path.suffix)
    assert partial.stat().st_size > 0


def test_pipx_and_two_commands_chat_with_a_running_server(installed: BareAccount, tmp_path: Path) -> None:
    home = ("--home", tmp_path / "found")
    with listing_server("qwen3:0.6b", port=OLLAMA_PORT):
        printed = installed.weft("up", "-d", "--discover=yes", "--port", "0", *home)
        try:
            assert "qwen3:0.6b" in printed
            assert "".join(WORDS) in installed.weft("chat", "qwen3:0.6b", "Say hello", *home)
        finally:
            installed.weft("down", *home)


def test_pipx_and_one_command_chat_with_a_hub_model_by_name(installed: BareAccount, tmp_path: Path) -> None:
    hub = ModelHub()
    hub.repositories["acme/smol-GGUF"] = HubRepository(files={"smol-Q4_1.gguf": demo_model_path().read_bytes()})
    with hub.running():
        endpoint = (f"HF_ENDPOINT={hub.url}", "NO_PROXY=127.0.0.1")
        weft = installed.home / ".local" / "bin" / "weft"
        home = ("--home", tmp_path / "pulled")
        question = "What is the capital of France? Answer with one word."
        options = ("--temperature", "0", "--max-tokens", "16")
        run = ("run", "hf:acme/smol-GGUF:Q4_1", question, *options)
        assert "Paris" in installed.run("/usr/bin/env", *endpoint, weft, *run, *home)
    shutil.rmtree(tmp_path / "pulled")


def test_pipx_installs_a_working_chat_and_uninstalls_all_but_its_home(installed: BareAccount) -> None:
    before = installed.files()
    assert installed.weft("--version").strip() == f"weft {__version__}"
    assert before == {".local/bin/weft"}

    with _mesh(installed) as printed:
        # The demo model is fetched at the first start, with progress. Where a mirror sends it within the time between
        # two reports of a runner, only the end of the pull is seen.
        part = r"(?:[\d.]+ MiB of [\d.]+ MiB|\(unpacking\))"
        assert re.search(rf"{DEMO_MODEL}: pulling {part} on local \(\d+ %\)", printed), printed
        assert f"ok   {DEMO_MODEL}: ready on local" in printed
        answer = installed.weft("chat", DEMO_MODEL, "Say hello", "--max-tokens", "8")
        assert answer.strip()
        assert DEMO_MODEL in installed.weft("ps")
    with _mesh(installed) as printed:
        assert "pulling" not in printed, "it is kept for the next start"

    # The shell is found among the processes above, and bash becomes its last command.
    installed.run("bash", "-c", "weft --install-completion; exit $?")
    completion = installed.files() - before - _home_files(installed)
    assert completion == {".bash_completions/weft.sh", ".bashrc"}
    assert "weft" in (installed.home / ".bashrc").read_text()

    installed.tool("pipx", "uninstall", "weft")
    assert installed.files() == completion | _home_files(installed)
    assert shutil.which("weft", path=installed.environment["PATH"]) is None


def _home_files(account: BareAccount) -> set[str]:
    return {name for name in account.files() if name.startswith(".weft/")}


def test_uvx_runs_the_wheel_without_installation(account: BareAccount, built: Built) -> None:
    python = str(account.path / "python3")
    answer = account.tool("uvx", "--python", python, "--from", built.wheel, "weft", "--version")
    assert answer.splitlines()[-1] == f"weft {__version__}"
    assert "gateway and registry can run here" in account.tool(
        "uvx", "--python", python, "--from", built.wheel, "weft", "doctor", "--port", "0"
    )
