"""The first minutes on a machine where engines run already: found, served, followed, attached; with real processes."""

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from kit.listing_server import WORDS, ListingServer, listing_server
from mesh_process import WEFT, MeshProcess, running_mesh, user_environment

SECONDS = 60.0
TEXT = "".join(WORDS)


def weft(home: Path, *arguments: str, fails: bool = False) -> str:
    """The output of a command; one that is to fail, its error."""
    done = subprocess.run(
        [*WEFT, *arguments, "--home", str(home)],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout


def models(home: Path) -> set[str]:
    return {name.removeprefix("model/") for name in weft(home, "get", "models", "-o", "name").split()}


def becomes(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty account: no models of other programs."""
    folder = tmp_path_factory.mktemp("account")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        for variable in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_HOST", "OLLAMA_MODELS", "LLAMA_CACHE"):
            patch.delenv(variable, raising=False)
        yield folder


@pytest.fixture(scope="module")
def ollama() -> Iterator[ListingServer]:
    with listing_server("llama3.2:3b", "qwen3:8b") as server:
        yield server


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """The address of a server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def config(account: Path, ollama: ListingServer, silent: str) -> Path:
    path = account / "weft.yaml"
    discovery = {"addresses": [silent, ollama.address]}
    path.write_text(json.dumps({"port": 0, "drain_seconds": 1.0, "discovery": discovery}))
    return path


@pytest.fixture(scope="module")
def mesh(account: Path, config: Path) -> Iterator[MeshProcess]:
    """The first command."""
    with running_mesh(account / "home", "--config", str(config), "--discover", "yes") as running:
        yield running


def test_two_commands_lead_to_a_chat_with_a_model_of_a_running_engine(mesh: MeshProcess) -> None:
    # The second command.
    assert weft(mesh.home, "chat", "llama3.2:3b", "-m", "hi").strip() == TEXT
    assert models(mesh.home) == {"llama3.2:3b", "qwen3:8b"}


def test_discover_shows_the_engine_and_its_weft_yaml_lines(account: Path, config: Path, ollama: ListingServer) -> None:
    document = json.loads(weft(account / "none", "models", "discover", "--config", str(config), "-o", "json"))
    (server,) = document["servers"]
    assert (server["program"], server["url"]) == ("ollama", f"http://{ollama.address}")
    assert document["runners"] == [{"name": "ollama", "url": f"http://{ollama.address}"}]


def test_models_follow_what_the_server_adds_and_removes(mesh: MeshProcess, ollama: ListingServer) -> None:
    ollama.models = ["llama3.2:3b", "new:1b"]
    becomes(lambda: "new:1b" in models(mesh.home))
    assert weft(mesh.home, "chat", "new:1b", "-m", "hi").strip() == TEXT
    becomes(lambda: "qwen3:8b" not in models(mesh.home))
    assert "llama3.2:3b" in models(mesh.home)


def test_server_is_attached_remembered_and_detached(account: Path, config: Path) -> None:
    home = account / "attached"
    start = ("--config", str(config), "--discover", "no", "--no-demo")
    with listing_server("box-model", is_ollama=False) as box:
        with running_mesh(home, *start):
            assert weft(home, "models", "attach", box.address, "--name", "box") == "server/box attached: box-model\n"
            assert weft(home, "chat", "box-model", "-m", "hi").strip() == TEXT
            assert "openai_http" in weft(home, "get", "model", "box-model"), "not the runtime of its runner"
            assert "openai_http" in weft(home, "ps")
            assert "weft did not start this server" in weft(home, "logs", "box-model")
            assert "already attached" in weft(home, "models", "attach", box.address, "--name", "twice", fails=True)
            other_spelling = f"http://localhost:{box.address.rpartition(':')[2]}/v1/"
            assert "already attached, as box" in weft(home, "models", "attach", other_spelling, fails=True)
        with running_mesh(home, *start):
            becomes(lambda: "box-model" in models(home))
            assert weft(home, "chat", "box-model", "-m", "hi").strip() == TEXT
            assert weft(home, "models", "detach", "box") == "server/box detached; it keeps running\n"
            becomes(lambda: not models(home))
            assert "there is no model box" in weft(home, "models", "detach", "box", fails=True)


def test_model_missing_on_its_server_is_failed_on_every_surface_and_never_ready(
    account: Path, ollama: ListingServer
) -> None:
    """`get` said failed; `describe`, `status`, the lists over HTTP, its pool and its runner said that all is well."""
    path = account / "typo.yaml"
    model = {"name": "llama", "url": f"http://{ollama.address}"}
    path.write_text(json.dumps({"port": 0, "drain_seconds": 1.0, "runners": [{"name": "box", "models": [model]}]}))
    with running_mesh(account / "typo", "--config", str(path)) as mesh:
        home = mesh.home
        for command in (("get", "models"), ("describe", "model", "llama"), ("ps",)):
            assert "failed" in weft(home, *command), command
        (status,) = json.loads(weft(home, "status", "-o", "json"))["models"]
        assert status["status"] == "failed"
        for what in (("model", "llama", "status=active"), ("pool", "llama", "ready"), ("runner", "box", "ready")):
            weft(home, "mesh", "wait", *what[:2], "--for", what[2], "--timeout", "0", fails=True)
        runner = weft(home, "describe", "runner", "box")
        assert "llama cannot be used: the server has no model llama" in runner
        for page, key in (("/v1/models", "data"), ("/api/tags", "models")):
            with urlopen(f"{mesh.url}{page}", timeout=SECONDS) as answer:
                (listed,) = json.load(answer)[key]
            assert listed["meta"]["status"] == "failed", page
        with pytest.raises(HTTPError) as health:
            urlopen(f"{mesh.url}/health", timeout=SECONDS)
        with health.value as answer:
            assert answer.code == 503
