"""Services of systemd, really run by it: a container is the machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from podman import Container, Podman

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1_200)]

CONFIG = """
drain_seconds: 120
relay: {listen: "127.0.0.1:7443"}
runners:
  - name: box
    models:
      - {name: smol, path: /models/smol.gguf, context_tokens: 2048}
"""
MACHINE = Path(__file__).parent / "systemd"
HOME = ("--home", "/var/lib/weft")
PERSON = ("runuser", "-l", "person", "-c")
LAPTOP = """
runners:
  - name: laptop
    models:
      - {name: smol-laptop, path: /models/smol.gguf, context_tokens: 2048, publish: true}
"""
README = Path(__file__).parents[2] / "deploy" / "README.md"
WEFT = "XDG_RUNTIME_DIR=/run/user/$(id -u) /opt/weft/bin/weft"
READY = ("weft", "mesh", "wait", "model/smol", "--for", "ready", "--timeout", "60s", *HOME)


@pytest.fixture(scope="module")
def machine(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    podman.build_weft("llama-cpp")
    podman.build("localhost/weft:systemd", MACHINE / "Dockerfile", MACHINE)
    folder = tmp_path_factory.mktemp("machine")
    (folder / "weft.yaml").write_text(CONFIG)
    folder.chmod(0o755)
    mounts = (
        *("--volume", f"{folder}/weft.yaml:/etc/weft/weft.yaml:ro"),
        *("--volume", f"{demo_model_path()}:/models/smol.gguf:ro"),
    )
    # Privileged: the machine makes namespaces of its own, in which its services are locked.
    options = ("--systemd=always", "--privileged", "--network", "none", *mounts)
    with podman.container("localhost/weft:systemd", options=options) as container:
        container.until("systemctl", "is-system-running")
        yield container


def _let_linger(machine: Container) -> None:
    machine.run("loginctl", "enable-linger", "person")
    machine.until(*PERSON, "XDG_RUNTIME_DIR=/run/user/$(id -u) systemctl --user is-system-running")


def _services(machine: Container) -> dict[str, dict[str, Any]]:
    said = machine.run("weft", "mesh", "service", "status", "-o", "json", rc=None)
    return {item["unit"]: item for item in json.loads(said)["items"]}


def _chat(machine: Container) -> str:
    return machine.run("weft", "chat", "smol", "Say hello", "--max-tokens", "5", *HOME).strip()


@pytest.fixture
def mesh(machine: Container) -> Iterator[Container]:
    machine.run("weft", "mesh", "service", "install", "mesh")
    machine.until(*READY)
    yield machine
    machine.run("weft", "mesh", "service", "remove", "mesh", rc=None)


def test_service_answers_as_an_unprivileged_user(mesh: Container) -> None:
    assert _chat(mesh)
    process = _services(mesh)["weft-mesh.service"]["process"]
    status = dict(line.split(":", 1) for line in mesh.run("cat", f"/proc/{process}/status").splitlines())
    assert status["Uid"].split()[0] != "0"
    assert int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")


def test_killed_service_is_restarted(mesh: Container) -> None:
    before = _services(mesh)["weft-mesh.service"]
    mesh.run("sh", "-c", f"kill -9 {before['process']}")
    mesh.until(*READY)
    after = _services(mesh)["weft-mesh.service"]
    assert (after["state"], after["restarts"]) == ("active", before["restarts"] + 1)
    assert after["process"] != before["process"]
    assert _chat(mesh)


def test_stop_lets_a_running_answer_finish(mesh: Container) -> None:
    chat = "/opt/weft/bin/weft chat smol 'Write a very long story' --max-tokens 300 --home /var/lib/weft"
    stream = f"{chat} > /tmp/answer 2>&1; echo $? > /tmp/code"
    mesh.run("systemd-run", "--unit", "answer", "sh", "-c", stream)
    mesh.until("test", "-s", "/tmp/answer")
    assert mesh.code("test", "-e", "/tmp/code") != 0, "the answer is still running"
    mesh.run("systemctl", "stop", "weft-mesh.service")
    mesh.until("test", "-s", "/tmp/code")
    assert mesh.run("cat", "/tmp/code").strip() == "0", mesh.run("cat", "/tmp/answer")
    assert "tokens/s" in mesh.run("cat", "/tmp/answer"), "its receipt came, too"


def test_removed_service_is_gone_and_its_state_remains(machine: Container) -> None:
    machine.run("weft", "mesh", "service", "install", "registry")
    machine.run("weft", "mesh", "service", "remove", "registry")
    assert machine.code("systemctl", "cat", "weft-registry.service") != 0
    assert machine.code("weft", "mesh", "service", "status") == 3
    assert machine.code("test", "-d", "/var/lib/weft/state") == 0
    assert machine.code("weft", "mesh", "service", "remove", "registry") == 3


def test_separate_services_find_each_other_in_the_machine_home(machine: Container) -> None:
    kinds = ("registry", "router", "gateway", "runner box")
    for kind in kinds:
        machine.run("weft", "mesh", "service", "install", *kind.split())
    try:
        machine.until(*READY)
        assert _chat(machine)
        machine.until("weft", "mesh", "health", *HOME)
        units = _services(machine)
        names = {"weft-registry", "weft-router", "weft-gateway", "weft-runner@box"}
        assert set(units) == {f"{name}.service" for name in names}
        assert {unit["state"] for unit in units.values()} == {"active"}
        answer = machine.run("python3", "-c", _ASK)
        assert json.loads(answer)["choices"][0]["message"]["content"]
    finally:
        for kind in kinds:
            machine.run("weft", "mesh", "service", "remove", *kind.split(), rc=None)
    assert machine.code("weft", "mesh", "service", "status") == 3


_ASK = """
import json, urllib.request
body = {"model": "smol", "messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 5}
request = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def test_user_service_runs_without_a_session(machine: Container) -> None:
    _let_linger(machine)
    weft = WEFT
    machine.run(*PERSON, "mkdir -p ~/.config/weft && cp /etc/weft/weft.yaml ~/.config/weft/")
    machine.run(*PERSON, f"{weft} mesh service install mesh")
    try:
        machine.until(*PERSON, f"{weft} mesh wait model/smol --for ready --timeout 60s")
        machine.run(*PERSON, "kill -9 $(cat ~/.weft/run/up.lock)")
        machine.until(*PERSON, f"{weft} mesh wait model/smol --for ready --timeout 60s")
        said = json.loads(machine.run(*PERSON, f"{weft} mesh service status -o json"))
        assert [(item["state"], item["restarts"]) for item in said["items"]] == [("active", 1)]
    finally:
        machine.run(*PERSON, f"{weft} mesh service remove mesh")
    assert machine.code(*PERSON, f"{weft} mesh service status") == 3


def test_weft_installed_in_a_user_home_is_rejected_for_the_machine(machine: Container) -> None:
    machine.run("cp", "-r", "/opt/weft", "/root/weft")
    assert machine.code("/root/weft/bin/python", "-m", "weft_app.cli.main", "mesh", "service", "install", "mesh") == 2


def test_invitation_is_stored_readable_only_by_its_owner(machine: Container) -> None:
    invitation = "weft://127.0.0.1:7443?token=wjt_a_b"
    machine.run("weft", "mesh", "service", "install", "join", "--no-start", invitation)
    assert machine.run("stat", "-c", "%a %U", "/etc/weft/weft-join.env").split() == ["600", "root"]
    assert invitation not in machine.run("cat", "/etc/systemd/system/weft-join.service")
    machine.run("weft", "mesh", "service", "remove", "join")
    assert machine.code("test", "-e", "/etc/weft/weft-join.env") != 0


def test_laptop_joins_as_a_user_service(mesh: Container) -> None:
    _let_linger(mesh)
    made = json.loads(mesh.run("weft", "runner", "token", "create", "-o", "json", *HOME))
    mesh.run(*PERSON, f"mkdir -p ~/.config/weft && cat > ~/.config/weft/weft.yaml <<'END'\n{LAPTOP}\nEND")
    mesh.run(*PERSON, f"echo WEFT_JOIN_TOKEN={made['token']} > ~/.config/weft/weft.env")
    mesh.run(*PERSON, f"{WEFT} mesh service install join http://127.0.0.1:7443")
    try:
        mesh.until("weft", "mesh", "wait", "model/smol-laptop", "--for", "ready", "--timeout", "60s", *HOME)
        said = mesh.run("weft", "chat", "smol-laptop", "Say hello", "--max-tokens", "5", *HOME)
        assert said.strip()
    finally:
        mesh.run(*PERSON, f"{WEFT} mesh service remove join")
    assert mesh.code(*PERSON, f"{WEFT} mesh service status") == 3


def _rows() -> list[tuple[str, str]]:
    """The rows of the table of deploy/README.md that are about services: the command, and the one that undoes it."""
    cells = [
        line.strip("| \n").split(" | ") for line in README.read_text("utf-8").splitlines() if line.startswith("| ")
    ]
    rows = [(row[1].strip("`"), row[2].strip("`")) for row in cells if len(row) == 3 and "service install" in row[1]]
    assert len(rows) >= 4
    return [row for row in rows if " join " not in row[0]]


@pytest.mark.parametrize(("do", "undo"), _rows(), ids=lambda text: text[:40])
def test_readme_row_runs_and_undoes(machine: Container, do: str, undo: str) -> None:
    is_user = not do.startswith("sudo ")
    if is_user:
        _let_linger(machine)

    def run(command: str) -> int:
        if is_user:
            return machine.code(*PERSON, command.replace("weft ", f"{WEFT} ", 1))
        return machine.code("sh", "-ec", command.replace("sudo ", "").replace("/opt/weft/bin/", ""))

    status = "weft mesh service status" if is_user else "sudo weft mesh service status"
    assert run(do) == 0, do
    assert run(status) == 0
    assert run(undo) == 0, undo
    assert run(status) == 3
