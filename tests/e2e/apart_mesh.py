"""A mesh as processes apart: each service one `weft serve`, so that a test can end one of them."""

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from mesh_process import WEFT, user_environment, weft_output

START_SECONDS = 30.0
ALL_SERVICES = ("registry", "router", "runner", "gateway")


class Apart:
    """Registry, router, gateway and runner, each a process under one home."""

    def __init__(self, home: Path, config: Path) -> None:
        self.home = home
        self._config = config
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.url = ""

    def start(
        self,
        service: str,
        *arguments: str,
        within: tuple[str, ...] = (),
        weft: tuple[str, ...] = WEFT,
        name: str = "",
    ) -> str:
        """Start a service, by the command `within`; where it says that it serves. `name`: where there are several."""
        process = subprocess.Popen(
            [*within, *weft, "serve", service, "--home", str(self.home), "--config", str(self._config), *arguments],
            env=user_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._processes[name or service] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serves at" in line, f"{service} did not start"
        return line.split()[-1]

    async def weft(self, *words: str) -> str:
        """What a command prints that succeeds."""
        return await weft_output(*words, home=self.home)

    def pid(self, service: str) -> int:
        """The process id of a service that runs."""
        return self._processes[service].pid

    def end(self, service: str, number: signal.Signals) -> int:
        """End a service and wait for it."""
        self._processes[service].send_signal(number)
        return self.wait(service)

    def wait(self, service: str) -> int:
        """Wait for the end of a service."""
        process = self._processes.pop(service)
        code = process.wait(START_SECONDS)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def end_all(self) -> list[int]:
        """End what still runs, gateway first."""
        return [self.end(service, signal.SIGTERM) for service in reversed(list(self._processes))]


@contextmanager
def running_apart(
    folder: Path,
    config: Path,
    services: tuple[str, ...] = ALL_SERVICES,
    *,
    within: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Iterator[Apart]:
    """These services, started in this order; the gateway is asked for its URL. All end with exit code 0.

    `within`: commands that some of them are started by.
    """
    mesh = Apart(folder / "home", config)
    try:
        for service in services:
            address = mesh.start(service, within=within.get(service, ()))
            if service == "gateway":
                mesh.url = address
        yield mesh
    finally:
        codes = mesh.end_all()
    assert set(codes) == {0}, codes
