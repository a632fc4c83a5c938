"""What supervision costs and how fast it is: an engine killed in mid-answer, a host killed, a guardian's memory."""

import contextlib
import signal
import time
from pathlib import Path

import psutil

from bench import measures
from bench.contender import WEFT
from bench.cpu import MB
from bench.launch import LaunchError, carried_out, own_mesh
from bench.report import Figures
from bench.scenarios import Options
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.client import Mesh, WeftError, connect
from weft.client.operations import connect_operations
from weft.client.resources import connect_registry, describe_runner
from weft.documents.operation_actions import LoadSettings, load_action, unload_action
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import RunnerDocument

MODEL = "smollm2-135m"
RUNNER = "local"
GUARDIAN = "guardian.py"
RECOVERY_SECONDS = 60.0
GONE_SECONDS = 30.0
POLL_SECONDS = 0.005
ANSWER_SECONDS = 120.0
IDLE_SECONDS = 10.0


def measure_supervision(options: Options, figures: Figures, folder: Path) -> None:
    """Kill the engine in mid-answer, several times, then the host; and look at what stands by meanwhile."""
    with own_mesh(folder, MODEL) as (host, home):
        address = _runner_address(home)
        family = host.children(recursive=True)
        for guardian in (one for one in family if GUARDIAN in " ".join(one.cmdline())):
            figures.add(measures.GUARDIAN_RSS, WEFT.name, guardian.memory_info().rss / MB)
        figures.add(measures.IDLE_RUNNER_CPU, WEFT.name, _idle_share(host))
        with connect(home=home) as mesh:
            for _ in range(options.repetitions):
                _measure_kill(figures, mesh, address, home)
        figures.add(measures.GONE, WEFT.name, _kill_host(host))


def _measure_kill(figures: Figures, mesh: Mesh, address: str, home: Path) -> None:
    """One kill in mid-answer, and one plain load of the same model right after it for comparison."""
    killed = _kill_in_mid_answer(mesh, _instance(address).process_id)
    restart = _until_recovered(address)
    recovery = restart.recovery.ToNanoseconds() / 1e9
    reload = _reload_seconds(home)
    figures.add(measures.DEATH_NOTICED, WEFT.name, killed * 1e3)
    figures.add(measures.RECOVERY, WEFT.name, recovery)
    figures.add(measures.RELOAD, WEFT.name, reload)
    figures.add(measures.RECOVERY_EXTRA, WEFT.name, max(0.0, recovery - reload))


def _kill_in_mid_answer(mesh: Mesh, engine: int) -> float:
    """Seconds from SIGKILL of the engine until the caller has the error. Raises LaunchError when there is none."""
    killed_at = 0.0
    try:
        for event in mesh.chat(MODEL, "Count to one thousand.", max_tokens=1000, timeout=ANSWER_SECONDS):
            if event.HasField("delta") and not killed_at:
                psutil.Process(engine).send_signal(signal.SIGKILL)
                killed_at = time.perf_counter()
    except WeftError as error:
        if not killed_at:
            raise LaunchError(f"the answer never began: {error}") from error
        return time.perf_counter() - killed_at
    raise LaunchError("an answer whose engine was killed came to a tidy end")


def _until_recovered(address: str) -> pb.Restart:
    """The last restart, once the model takes requests again."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        restarts = _instance(address).restarts
        if restarts and restarts[-1].HasField("recovery"):
            return restarts[-1]
        time.sleep(POLL_SECONDS)
    raise LaunchError("the model did not come back")


def _reload_seconds(home: Path) -> float:
    """How long the model takes to load when nothing has happened to it."""
    with connect_operations(home=home) as operations:
        carried_out(operations, unload_action(MODEL))
        begin = time.perf_counter()
        carried_out(operations, load_action(MODEL, LoadSettings()))
        return time.perf_counter() - begin


def _kill_host(host: psutil.Process) -> float:
    """Seconds from SIGKILL of the host until nothing that it started is left."""
    family = host.children(recursive=True)
    host.kill()
    killed_at = time.perf_counter()
    while any(map(_alive, family)):
        if time.perf_counter() - killed_at > GONE_SECONDS:
            raise LaunchError("processes outlived their host")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - killed_at


def _idle_share(host: psutil.Process) -> float:
    """Percent of one core that the runner and its guardians use while no request comes."""
    runners = [one for one in host.children(recursive=True) if _is_ours(one)]
    before = sum(map(_cpu_seconds, runners))
    time.sleep(IDLE_SECONDS)
    return (sum(map(_cpu_seconds, runners)) - before) / IDLE_SECONDS * 100


def _is_ours(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())
    return "serve runner" in line or GUARDIAN in line


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _instance(address: str) -> pb.InstanceDescription:
    described = describe_runner(address)
    if described is None:
        raise LaunchError("the runner does not answer")
    return described.instances[0]


def _runner_address(home: Path) -> str:
    with connect_registry(home=home) as registry:
        document = registry.document(ResourceKind.RUNNER, RUNNER)
    assert isinstance(document, RunnerDocument)
    assert document.observed is not None
    return document.observed.address
