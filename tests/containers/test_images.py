"""The images of deploy/container: built, and run as they are meant to be run."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from podman import HARDENED, LIMITS, ROOT, Container, Podman

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1_200)]

CONFIG = """
runners:
  - name: box
    models:
      - {name: smol, path: /models/smol.gguf, context_tokens: 2048}
"""
CHAT = "Say hello"


@pytest.fixture(scope="module")
def llama_cpp(podman: Podman) -> str:
    return podman.build_weft("llama-cpp")


@pytest.fixture(scope="module")
def mesh_image(podman: Podman) -> str:
    return podman.build_weft("mesh")


def _mounts(folder: Path) -> tuple[str, ...]:
    config = folder / "weft.yaml"
    config.write_text(CONFIG)
    folder.chmod(0o755)
    return (
        *("--volume", f"{config}:/etc/weft/weft.yaml:ro"),
        *("--volume", f"{demo_model_path()}:/models/smol.gguf:ro"),
        *("--volume", "/var/lib/weft"),
    )


@pytest.fixture(scope="module")
def mesh(podman: Podman, llama_cpp: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    mounts = _mounts(tmp_path_factory.mktemp("mesh"))
    with podman.container(llama_cpp, "up", options=(*HARDENED, *mounts)) as container:
        container.until("weft", "mesh", "health")
        container.until("weft", "mesh", "wait", "model/smol", "--for", "ready", "--timeout", "60s")
        yield container


def test_containerized_mesh_answers_a_chat_as_nobody_without_capabilities(mesh: Container) -> None:
    assert mesh.run("weft", "chat", "smol", CHAT, "--max-tokens", "8").strip()
    status = dict(line.split(":", 1) for line in mesh.run("cat", "/proc/1/status").splitlines())
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65532"}
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"


def test_container_root_is_read_only(mesh: Container) -> None:
    assert mesh.code("touch", "/opt/weft/x") != 0
    assert mesh.code("touch", "/etc/weft/x") != 0
    assert mesh.code("touch", "/var/lib/weft/state/x") == 0, "the negative control: the home can be"


def test_container_stop_finishes_running_requests(podman: Podman, llama_cpp: str, tmp_path: Path) -> None:
    with podman.container(llama_cpp, "up", options=(*HARDENED, *_mounts(tmp_path))) as container:
        container.until("weft", "mesh", "health")
        assert container.code("weft", "mesh", "health", "--live") == 0
        assert container.stop() == 0
        assert container.logs().splitlines()[-1] == "stopped"


def test_image_health_check_uses_the_home(podman: Podman, mesh_image: str, llama_cpp: str) -> None:
    for image in (mesh_image, llama_cpp):
        assert podman.run("inspect", "--format", "{{.Config.User}}", image).strip() == "65532:65532"
        check = json.loads(podman.run("inspect", "--format", "{{json .HealthCheck}}", image))
        assert check["Test"] == ["CMD", "weft", "mesh", "health"]


def test_containerized_service_is_healthy(podman: Podman, mesh_image: str) -> None:
    options = (*HARDENED, "--volume", "/var/lib/weft")
    with podman.container(mesh_image, "serve", "registry", options=options) as registry:
        registry.until("weft", "mesh", "health")
        assert registry.run("weft", "mesh", "health").splitlines()[1].split() == ["registry", "ready"]
    with podman.container(mesh_image, "serve", "gateway", options=options) as gateway:
        gateway.until("weft", "mesh", "health", "--live")
        assert gateway.code("weft", "mesh", "health") == 1, "a gateway without a router gets no requests"


def test_service_image_has_no_engine_and_supports_postgresql(podman: Podman, mesh_image: str) -> None:
    code = "from importlib.util import find_spec; print([n for n in ('psycopg', 'xllamacpp') if find_spec(n)])"
    said = podman.run("run", "--rm", *LIMITS, *HARDENED, "--entrypoint", "python", mesh_image, "-c", code)
    assert said.strip() == "['psycopg']"


def test_readme_docker_commands_run_and_undo(podman: Podman, llama_cpp: str, tmp_path: Path) -> None:
    readme = (ROOT / "deploy" / "README.md").read_text("utf-8")
    row = next(line for line in readme.splitlines() if "`docker run" in line)
    do, undo, undo_too = re.findall("`(docker [^`]+)`", row)
    assert do.endswith(llama_cpp.removeprefix("localhost/"))
    _mounts(tmp_path)
    (tmp_path / "models").mkdir()
    shutil.copy(demo_model_path(), tmp_path / "models" / "smol.gguf")
    # Ports are published by iptables, which is not here, and health checks are timed by systemd.
    words = re.sub(r"-p \S+ ", "", do).replace("./", f"{tmp_path}/").split()[2:]
    podman.run("run", "--network", "none", "--no-healthcheck", *LIMITS, *words)
    try:
        container = Container(podman, "weft")
        container.until("weft", "mesh", "health", seconds=180.0)
        # The key is made once the mesh is ready.
        container.until("test", "-s", "/var/lib/weft/first-admin-key")
        assert container.run("cat", "/var/lib/weft/first-admin-key").startswith("weft_")
    finally:
        podman.run(*undo.split()[1:])
        podman.run(*undo_too.split()[1:])
