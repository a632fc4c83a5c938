"""The services of deploy/compose as processes of this machine: their commands and their configuration, other paths."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from envoy_process import running_edge
from mesh_process import WEFT, user_environment

from weft_testing.free_port import free_port

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"
SHARED, HOME = "/var/lib/weft-shared", "/var/lib/weft"
DATABASE_URL = "postgresql://weft@postgres/weft"
START_SECONDS = 60.0
GATEWAYS = ("gateway-1", "gateway-2")


def compose_file() -> dict[str, Any]:
    """The file, its merge keys resolved."""
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text("utf-8"))
    return loaded


class ComposeProcesses:
    """The services that run weft, each with a home of its own and all with the folder that they share."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self._database_url = database_url
        self._services = compose_file()["services"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_port() for name in GATEWAYS}
        (folder / "shared").mkdir(mode=0o700)

    @property
    def names(self) -> tuple[str, ...]:
        """The services of weft, in the order of the file."""
        return tuple(name for name, service in self._services.items() if (service.get("command") or [""])[0] == "serve")

    def home(self, name: str) -> Path:
        """The home of a service."""
        return self.folder / name

    def start(self, name: str) -> None:
        """Starts a service by its own command, and returns when it says that it serves."""
        command = [word.replace(SHARED, str(self.folder / "shared")) for word in self._services[name]["command"]]
        # Containers have ports of their own.
        own = ["--port", str(self.ports[name])] if name in self.ports else []
        output = self.folder / f"{name}.out"
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*WEFT, *command, "--home", str(self.home(name)), "--config", str(self._settings(name)), *own,
                 "--metrics", f"unix:{self.folder}/{name}.metrics"],
                env=user_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        self._processes[name] = process

    def _settings(self, name: str) -> Path:
        folder = self.folder / f"{name}.etc"
        folder.mkdir(exist_ok=True)
        text = (COMPOSE / "weft.yaml").read_text("utf-8").replace(SHARED, str(self.folder / "shared"))
        assert DATABASE_URL in text
        (folder / "weft.yaml").write_text(text.replace(DATABASE_URL, self._database_url))
        return folder / "weft.yaml"

    def kill(self, name: str) -> None:
        """Ends a service as a crash does."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def end_all(self) -> None:
        """Ends what still runs."""
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def make_certificate(self) -> Path:
        """Runs the command of the service edge-certificate, and returns the folder of what it made."""
        tls = self.folder / "tls"
        tls.mkdir()
        service = self._services["edge-certificate"]
        # Compose reads $$ as one $; there is none in the command.
        script = service["command"][0].replace(f"cd {HOME}\n", f"cd {tls}\n")
        subprocess.run([*service["entrypoint"], script], check=True, capture_output=True, env=dict(os.environ))
        return tls


@contextmanager
def running_compose(folder: Path, database_url: str) -> Iterator[tuple[ComposeProcesses, str, Path]]:
    """All services and Envoy for the length of the block: the processes, the URL of the edge, and its certificate."""
    mesh = ComposeProcesses(folder, database_url)
    tls = mesh.make_certificate()
    try:
        for name in mesh.names:
            mesh.start(name)
        with running_edge(folder, tls, (mesh.ports["gateway-1"], mesh.ports["gateway-2"])) as url:
            yield mesh, url, tls / "edge.pem"
    finally:
        mesh.end_all()
