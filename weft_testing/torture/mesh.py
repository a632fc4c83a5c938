"""The mesh under torture: each service is a process, which is only ended by SIGKILL."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.free_port import free_ports
from weft_testing.torture import submitter
from weft_testing.torture.database import RunDatabase
from weft_testing.torture.final_state import SQLITE_PREFIX
from weft_testing.torture.plan import TOKENS_PER_SECOND, Plan
from weft_testing.torture.streams import GatewayAddress
from weft_testing.torture.submitter import SubmitterOptions

MAX_LOG_BYTES = 1_073_741_824
"""Log size limit, so large that histories are never cut."""
BROKEN_ROUTER = "kit.torture_router"
"""The program that runs a router with a faulty store, in the `tests` of a checkout."""
SERVES = b" serves at "
_FAKE = "weft_testing.fake_backend"


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a run."""

    root: Path

    @property
    def home(self) -> Path:
        """Path shared by all services."""
        return self.root / "home"

    @property
    def config(self) -> Path:
        """Path shared by all services."""
        return self.root / "weft.yaml"

    @property
    def histories(self) -> Path:
        """History files of submitters."""
        return self.root / "histories"

    @property
    def outputs(self) -> Path:
        """Stdout and stderr of processes."""
        return self.root / "outputs"

    @property
    def backend_log(self) -> Path:
        """Request log of all backends."""
        return self.root / "backends.jsonl"

    @property
    def router_log(self) -> Path:
        """Log of all routers."""
        return self.home / "logs" / "router.log"

    @property
    def address(self) -> str:
        """Address of the first router."""
        return self.socket("router")

    def socket(self, name: str) -> str:
        """Returns the address of a service."""
        return f"unix:{self.home}/run/{name}.sock"

    def make(self) -> None:
        """Creates the folders. Raises OSError."""
        for folder in (self.root, self.histories, self.outputs):
            folder.mkdir(parents=True, exist_ok=True)


def database_url(plan: Plan, folder: Folder) -> str:
    """Returns the database URL of the routers."""
    return plan.database_url or f"{SQLITE_PREFIX}{folder.home}/state/router.db"


def configuration(plan: Plan, folder: Folder, url: str) -> Mapping[str, Any]:
    """Returns the content of weft.yaml as JSON: short delays, and no limit on restarts.

    `url`: the database's URL for the reader of the file.
    """
    engine = fake_backend_command(
        *("--request-log", str(folder.backend_log)), answer_tokens=0, tokens_per_second=TOKENS_PER_SECOND
    )
    runners = [
        {
            "name": runner.name,
            "command": engine,
            "models": [
                {
                    "name": runner.model,
                    "pool": runner.pool,
                    "path": __file__,
                    "slots": plan.slots,
                    "context_tokens": plan.slots * 1024,
                }
            ],
            "first_term_seconds": 0.5,
            # Backends are killed deliberately, which must not count as a crash loop.
            "max_deaths": 1000,
        }
        for runner in (*plan.steady_runners, plan.rare_runner)
    ]
    tasks = {
        "lease_seconds": plan.lease_seconds,
        "retry_delay_seconds": 0.05,
        "max_retry_delay_seconds": 0.5,
        "poll_interval_seconds": 0.5,
        "piece_interval_seconds": plan.piece_interval_seconds,
    }
    # With two registries, the standby takes over with the database of both.
    registry = {"database_url": url} if plan.registries > 1 else {}
    return {
        "runners": runners,
        "registry": registry,
        "addresses": {"registry": _registry_addresses(plan, folder)},
        "log": {"max_file_bytes": MAX_LOG_BYTES},
        "router": {
            "database_url": url,
            "tasks": tasks,
            "queue_depth_per_runner": plan.queue_depth,
        },
    }


def _registry_addresses(plan: Plan, folder: Folder) -> list[str]:
    return [
        folder.socket("registry"),
        *(folder.socket(f"registry-{number}") for number in range(2, plan.registries + 1)),
    ]


def on_host(name: str) -> Sequence[str]:
    """Returns the command prefix that runs a command on a host of this name: in user and UTS namespaces."""
    return ("unshare", "--user", "--map-root-user", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh")


def namespaces_missing() -> str:
    """Returns why a process cannot have its own host name here; empty: it can."""
    try:
        done = subprocess.run(  # noqa: S603 - a command of this module
            [*on_host("box"), "true"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"unshare: {error.strerror}"
    return done.stderr.strip() if done.returncode else ""


class Member:
    """A process that is repeatedly killed and restarted."""

    def __init__(self, name: str, command: list[str], output: Path, within: Sequence[str] = ()) -> None:
        """`within`: a command prefix that starts it."""
        self.name = name
        self._within = within
        self._command = command
        self._output = output
        self._process: asyncio.subprocess.Process | None = None
        self._begins_at = 0

    @property
    def pid(self) -> int | None:
        """Its pid; None: it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of its last run; None: it is running, or was never started."""
        return None if self._process is None else self._process.returncode

    @property
    def serves(self) -> bool:
        """Whether the service has reported that it serves since its last start."""
        if self.pid is None:
            return False
        with self._output.open("rb") as output:
            output.seek(self._begins_at)
            return SERVES in output.read()

    async def start(self) -> None:
        """Starts the process."""
        with self._output.open("ab") as output:
            self._begins_at = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._within,
                sys.executable,
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal; returns whether it was running."""
        if self._process is None or self._process.returncode is not None:
            return False
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether it is running but stopped by a signal."""
        with suppress(psutil.NoSuchProcess):
            return self.pid is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    async def kill(self) -> bool:
        """Sends SIGKILL and waits for the exit; returns whether it was running."""
        if self._process is None or not self.signal(signal.SIGKILL):
            return False
        await self._process.wait()
        return True

    async def wait(self) -> int:
        """Waits for the exit; returns the exit code."""
        return 0 if self._process is None else await self._process.wait()


class Mesh:
    """All processes of the mesh."""

    def __init__(self, plan: Plan, folder: Folder, database: RunDatabase | None = None) -> None:
        """`database`: the server of the plan's database, if it belongs to this run."""
        self._plan = plan
        self._folder = folder
        self._database = database
        self._folder.make()
        self._routers = 0
        """Number of routers created so far."""
        self.registries = [
            self._service("registry", "--listen", address, name=f"registry-{number}")
            for number, address in enumerate(_registry_addresses(plan, folder), start=1)
        ]
        self.router = self._service("router")
        self.further_routers = [
            self._service("router", "--listen", folder.socket(f"router-{number}"), name=f"router-{number}")
            for number in range(2, plan.routers + 1)
        ]
        first_port = free_ports(plan.gateways) if plan.gateways else 0
        self.gateway_addresses = [
            GatewayAddress(f"gateway-{number}", f"http://127.0.0.1:{first_port + number}")
            for number in range(plan.gateways)
        ]
        self.gateways = [self._gateway(gateway) for gateway in self.gateway_addresses]
        self.runners = [
            self._service("runner", "--runner", runner.name, host=runner.host)
            for runner in (*plan.steady_runners, plan.rare_runner)
        ]
        self._replaced: list[Member] = []
        self.submitters = [self._submitter(f"s{number}") for number in range(plan.submitters)]

    @property
    def members(self) -> list[Member]:
        """All processes."""
        return [*self.registries, *self.routers, *self.gateways, *self.runners, *self.submitters]

    @property
    def routers(self) -> list[Member]:
        """All routers, except replaced ones."""
        return [self.router, *self.further_routers]

    async def start(self) -> None:
        """Starts every process; they retry their connections."""
        shared = configuration(self._plan, self._folder, database_url(self._plan, self._folder))
        self._folder.config.write_text(json.dumps(shared), "utf-8")
        for member in self.members:
            await member.start()

    async def kill_all(self) -> None:
        """Kills every process and its children."""
        processes = [*self.members, *self._replaced]
        family = [child for member in processes if member.pid for child in _children(member.pid)]
        for member in processes:
            await member.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def replace_router(self) -> Member:
        """Replaces the router by a new one in the same home; returns the old one, which may still run."""
        old, self.router = self.router, self._service("router")
        self._replaced.append(old)
        return old

    @property
    def router_addresses(self) -> str:
        """The addresses of all routers, comma-separated: calls go to the leader."""
        further = (self._folder.socket(f"router-{number}") for number in range(2, self._plan.routers + 1))
        return ",".join((self._folder.address, *further))

    def backends(self) -> list[psutil.Process]:
        """Returns the runners' fake backends, in the order of the runners."""
        pids = [runner.pid for runner in self.runners if runner.pid]
        return [child for pid in pids for child in _children(pid) if _is_fake(child)]

    def _gateway(self, gateway: GatewayAddress) -> Member:
        """Returns a gateway with a separate home, which contains its socket and lock."""
        home = self._folder.root / gateway.name
        home.mkdir(parents=True, exist_ok=True)
        configuration = {
            "port": int(gateway.url.rpartition(":")[2]),
            "addresses": {
                "registry": _registry_addresses(self._plan, self._folder),
                "router": self._folder.address,
            },
            "log": {"max_file_bytes": MAX_LOG_BYTES},
        }
        config = home / "weft.yaml"
        config.write_text(json.dumps(configuration), "utf-8")
        what = ["-m", "weft_app.cli.main", "serve", "gateway", "--home", str(home), "--config", str(config)]
        return Member(gateway.name, what, self._folder.outputs / f"{gateway.name}.out")

    def _service(self, service: str, *arguments: str, name: str = "", host: str = "") -> Member:
        name = name or "-".join([service, *arguments[1:]])
        what = ["-m", "weft_app.cli.main", "serve", service]
        if service == "router" and (breakage := self._breakage()):
            what = ["-m", BROKEN_ROUTER, *breakage]
        where = ["--home", str(self._folder.home), "--config", str(self._config_of(service, name))]
        output = self._folder.outputs / f"{name}.out"
        return Member(name, [*what, *where, *arguments], output, within=on_host(host) if host else ())

    def _config_of(self, service: str, name: str) -> Path:
        """Returns a service's configuration file; services whose database connection can be cut have separate ones."""
        uses_database = service == "router" or (service == "registry" and self._plan.registries > 1)
        if self._database is None or not self._plan.database_cuts or not uses_database:
            return self._folder.config
        url = self._database.url_of(name, self._folder.root / "db" / name)
        path = self._folder.root / f"{name}.yaml"
        path.write_text(json.dumps(configuration(self._plan, self._folder, url)), "utf-8")
        return path

    def _breakage(self) -> list[str]:
        """Returns the faults of the next router: only the first router stops itself."""
        stops = bool(self._plan.stop_before_end) and not self._routers
        self._routers += 1
        unfenced = [] if self._plan.is_fenced else ["--unfenced"]
        return [*unfenced, *(["--stop-before-end", str(self._plan.stop_before_end)] if stops else [])]

    def _submitter(self, name: str) -> Member:
        options = SubmitterOptions(
            seed=self._plan.seed,
            name=name,
            address=self.router_addresses,
            file=self._folder.histories / f"{name}.jsonl",
            count=self._plan.tasks_per_submitter,
            per_second=self._plan.tasks_per_second,
            pools=self._plan.steady_pools,
        )
        return Member(name, submitter.command_line(options), self._folder.outputs / f"{name}.out")


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _is_fake(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return _FAKE in process.cmdline()
    return False
