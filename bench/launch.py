"""Processes of the bench: started in a session of their own, ready when they answer, gone at the end."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import msgspec
import psutil

from bench.contender import BACKEND_ROLE, MODEL, RAW_NAME, Contender, fill, python_of
from bench.cpu import backend_of
from bench.load import DRAIN_SECONDS, Job, Result
from weft.client import WeftError, connect
from weft_testing.free_port import free_port

READY_POLL_SECONDS = 0.05
STOP_SECONDS = 30.0
STUB_CONTEXT_TOKENS = 64 * 65_536
STUB = Contender(
    name=RAW_NAME,
    command=(
        *("{stub_python}", "-m", "weft_testing.fake_backend", "--port", "{port}", "--alias", MODEL),
        *("--parallel", "64", "--ctx-size", str(STUB_CONTEXT_TOKENS), "--answer-tokens", "0"),
    ),
    main_role=BACKEND_ROLE,
)


class LaunchError(Exception):
    """A contender did not come up, or a load run failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A contender that runs."""

    contender: Contender
    process: psutil.Process
    port: int
    stub: psutil.Process
    """The backend that does its work; itself for the stub."""

    def job(self, body: dict[str, object], **bounds: float) -> Job:
        """A load job against it."""
        fields: dict[str, object] = {
            "port": self.port,
            "path": self.contender.chat_path,
            "body": {"model": self.contender.model, **body},
            "headers": dict(self.contender.headers),
            **bounds,
        }
        return msgspec.convert(fields, Job)


@contextmanager
def running_stub(root: Path, folder: Path) -> Iterator[Target]:
    """Starts a stub backend for direct requests, without a contender in front of it."""
    with _process(STUB, root, folder, {}) as (process, port):
        until_it_answers(STUB, process, port, folder)
        yield Target(contender=STUB, process=process, port=port, stub=process)


@contextmanager
def running(contender: Contender, root: Path, folder: Path, stub: Target) -> Iterator[Target]:
    """A contender in front of `stub`, or of the backend it starts itself. Raises LaunchError."""
    with answering(contender, root, folder, {"upstream_port": str(stub.port)}) as (keyed, process, port):
        yield Target(contender=keyed, process=process, port=port, stub=backend_of(process, keyed) or stub.process)


@contextmanager
def answering(
    contender: Contender, root: Path, folder: Path, values: dict[str, str]
) -> Iterator[tuple[Contender, psutil.Process, int]]:
    """A contender with its key, its process and its port, once it answers a chat. Raises LaunchError.

    `values` stand for further placeholders.
    """
    with _process(contender, root, folder, values) as (process, port):
        contender = with_key(contender, root, folder)
        until_it_answers(contender, process, port, folder)
        yield contender, process, port


def with_key(contender: Contender, root: Path, folder: Path) -> Contender:
    """Returns the contender with a new API key, if it requires one. Raises LaunchError if it creates none."""
    if not contender.key_command:
        return contender
    known = {"bin": str(Path(python_of(contender, root)).parent), "home": str(folder / "home")}
    command = [fill(part, known) for part in contender.key_command]
    deadline = time.monotonic() + contender.start_seconds
    while time.monotonic() < deadline:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            headers = {**contender.headers, "Authorization": f"Bearer {done.stdout.strip()}"}
            return replace(contender, headers=headers)
        time.sleep(READY_POLL_SECONDS)
    raise LaunchError(f"{contender.name} gives no key: {done.stderr[-300:]}")


def run_load(job: Job, root: Path) -> Result:
    """Runs a job in a separate load generator process. Raises LaunchError if no request was answered."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=msgspec.json.encode(job),
        cwd=root,
        capture_output=True,
        timeout=job.seconds + DRAIN_SECONDS + STOP_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise LaunchError(f"the load generator failed: {lines[-1][:500]}")
    result = msgspec.json.decode(done.stdout, type=Result)
    if not result.requests:
        raise LaunchError(f"nothing was answered: {result.failures}")
    return result


def post(port: int, path: str, body: object, headers: dict[str, str] | None = None, seconds: float = 10.0) -> bytes:
    """One POST on loopback. Raises OSError, HTTPException, or LaunchError for any status but 200."""
    fields = {"Content-Type": "application/json", **(headers or {})}
    return _ask("POST", port, path, msgspec.json.encode(body), fields, seconds)


def get(port: int, path: str, headers: dict[str, str]) -> bytes:
    """One GET on loopback. Raises OSError, HTTPException, or LaunchError for any status but 200."""
    return _ask("GET", port, path, None, headers, 5.0)


def _ask(method: str, port: int, path: str, body: bytes | None, headers: dict[str, str], seconds: float) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = response.read()
    if response.status != 200:
        raise LaunchError(f"{path} answered {response.status}: {answer[:300].decode(errors='replace')}")
    return answer


@contextmanager
def started(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[psutil.Process]:
    """A process with its output in a file; it and its session are ended when the block is left.

    It works in the folder of that file: `python -m` puts its own folder before all installed packages, so that in this
    repository the runners of another tree of weft would run this one.
    """
    with log.open("wb") as output:
        process = psutil.Popen(
            list(command),
            env=os.environ | environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


@contextmanager
def _process(
    contender: Contender, root: Path, folder: Path, values: dict[str, str]
) -> Iterator[tuple[psutil.Process, int]]:
    python, port = python_of(contender, root), free_port()
    known = {
        "python": python,
        "bin": str(Path(python).parent),
        "port": str(port),
        "spare_port": str(free_port()),
        "stub_python": sys.executable,
        "home": str(folder / "home"),
        "config": str(folder / contender.config_name),
        **values,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / contender.config_name).write_text(fill(contender.config, known), "utf-8")
    command = [fill(part, known) for part in contender.command]
    environment = {name: fill(value, known) for name, value in contender.environment.items()}
    with started(command, environment, folder / "output.log") as process:
        yield process, port


def until_it_answers(contender: Contender, process: psutil.Process, port: int, folder: Path) -> None:
    """Ready is who answers a chat request, not who says so."""
    deadline = time.monotonic() + contender.start_seconds
    body = {"model": contender.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    last: Exception | str = "no answer"
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            last = "it ended"
            break
        try:
            get(port, contender.ready_path, dict(contender.headers))
            post(port, contender.chat_path, body, dict(contender.headers))
        except (OSError, http.client.HTTPException, LaunchError) as error:
            last = error
        else:
            return
        time.sleep(READY_POLL_SECONDS)
    lines = (folder / "output.log").read_text("utf-8", "replace").splitlines()
    raise LaunchError(f"{contender.name} did not come up ({last}): {' | '.join(lines[-3:])}")


def _stop(process: psutil.Popen) -> None:
    tree = [process, *process.children(recursive=True)] if process.is_running() else [process]
    with contextlib.suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired, psutil.TimeoutExpired):
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)
    # What did not end with its parent is ours all the same.
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


START_SECONDS = 60.0
POLL_SECONDS = 0.005


@contextmanager
def own_mesh(folder: Path, model: str, config: Path | None = None) -> Iterator[tuple[psutil.Process, Path]]:
    """Its host process and its home, once `model` answers; without a configuration it serves the demo model."""
    home = folder / "home"
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).with_name("weft")), "up", "--home", str(home), "--port", str(free_port())]
    if config is not None:
        command += ["--config", str(config)]
    with started(command, {}, folder / "output.log") as host:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(home, model):
            if time.monotonic() > deadline:
                raise LaunchError("weft up did not come up")
            time.sleep(POLL_SECONDS)
        yield host, home


def _answers(home: Path, model: str) -> bool:
    try:
        with connect(home=home) as mesh:
            return bool(list(mesh.chat(model, "Hi", max_tokens=2, timeout=START_SECONDS)))
    except (WeftError, grpc.RpcError):
        return False
