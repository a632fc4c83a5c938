"""A mesh whose services are processes of their own, so that one of them can be measured, or killed."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import psutil

from bench.launch import LaunchError, started

START_SECONDS = 60.0
POLL_SECONDS = 0.02
SERVES_AT = "serves at "


class Apart:
    """Services under one home; ended with the stack they were started on."""

    def __init__(self, folder: Path, config: str) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._starts = 0
        self.home = folder / "home"
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "weft.yaml"
        self._config.write_text(config, "utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, python: str, service: str) -> tuple[psutil.Process, str]:
        """Start a service; its process, and where it serves. Raises LaunchError."""
        self._starts += 1
        log = self._folder / f"{service}-{self._starts}.log"
        command = [python, "-m", "weft_app.cli.main", "serve", service]
        command += ["--home", str(self.home), "--config", str(self._config)]
        process = self._stack.enter_context(started(command, {}, log))
        return process, _until_it_serves(process, log)


@contextmanager
def whole_mesh(python: str, folder: Path, config: str) -> Iterator[tuple[Apart, psutil.Process, str]]:
    """Registry, router, runner and gateway: the mesh, its registry's process, and the gateway's base URL."""
    with Apart(folder, config) as mesh:
        registry, _ = mesh.start(python, "registry")
        for service in ("router", "runner"):
            mesh.start(python, service)
        _, url = mesh.start(python, "gateway")
        yield mesh, registry, url


def _until_it_serves(process: psutil.Process, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        text = log.read_text("utf-8", "replace")
        if SERVES_AT in text:
            return text.partition(SERVES_AT)[2].split()[0]
        time.sleep(POLL_SECONDS)
    raise LaunchError(f"it does not serve: {log.read_text('utf-8', 'replace')[-300:]}")
