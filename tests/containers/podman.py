"""Podman: the system's, or one that is unpacked from Debian's packages into `.containers`."""

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".containers"
DOCKERFILE = ROOT / "deploy" / "container" / "Dockerfile"
SCRIPT = Path(__file__).with_name("build_podman.sh")
ROOTS = Path("/etc/ssl/certs")
"""The certificates by which this machine reaches its package indexes."""
SECONDS = 600.0
BUILD_SECONDS = 1_200.0
START_SECONDS = 60.0
POLL_SECONDS = 0.5
LIMITS = ("--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1000:2000")
"""Podman's own are higher than a root without CAP_SYS_RESOURCE may set."""
_LAYERS = "mkdir lower upper work all && mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work all"
HARDENED = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", "none")


def no_namespaces() -> str:
    """Why namespaces and overlay mounts cannot be made here, as in a container without privileges; empty: they can."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        tried = subprocess.run(
            ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", _LAYERS],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    return f"no namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


def missing() -> str:
    """Why there can be no podman here; empty: there can."""
    if why := no_namespaces():
        return why
    if shutil.which("podman") is not None or (FOLDER / "done").exists():
        return ""
    if os.geteuid() != 0:
        return "podman is not installed, and only root can unpack one"
    if shutil.which("apt-get") is None or shutil.which("perl") is None or platform.system() != "Linux":
        return "podman is not installed, and there is no apt-get to load it"
    return ""


@dataclass(frozen=True, slots=True)
class Podman:
    """The program, and what it needs on this machine."""

    program: Path

    @classmethod
    def found(cls) -> "Podman":
        """Finds it, or makes it (a minute, 300 MB)."""
        installed = shutil.which("podman")
        if installed is not None:
            return cls(Path(installed))
        if not (FOLDER / "done").exists():
            subprocess.run([SCRIPT, FOLDER], check=True, timeout=SECONDS)
        return cls(FOLDER / "podman")

    def run(self, *arguments: str | Path, rc: int | None = 0, seconds: float = SECONDS) -> str:
        """Runs a command of podman, and returns what it printed on stdout."""
        ended = subprocess.run(
            [str(self.program), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        said = f"{arguments} ended with {ended.returncode}:\n{ended.stdout[-4_000:]}{ended.stderr[-4_000:]}"
        assert rc is None or ended.returncode == rc, said
        return ended.stdout

    def build(self, tag: str, dockerfile: Path, context: Path, *options: str | Path) -> None:
        """Builds an image. The roots of this machine are mounted meanwhile, and are no part of it."""
        self.run(
            *("build", "--format", "docker", "--network", "host", "--volume", f"{ROOTS}:{ROOTS}:ro", *LIMITS),
            *("--file", dockerfile, "--tag", tag, *options, context),
            seconds=BUILD_SECONDS,
        )

    def build_weft(self, target: str, *options: str) -> str:
        """Builds a target of deploy/container/Dockerfile, and returns its tag."""
        tag = f"localhost/weft:{target}"
        ignored = DOCKERFILE.with_name("Dockerfile.dockerignore")
        self.build(tag, DOCKERFILE, ROOT, "--ignorefile", ignored, "--target", target, *options)
        return tag

    @contextmanager
    def container(self, image: str, *command: str, options: Sequence[str | Path] = ()) -> Iterator["Container"]:
        """A container that runs in the background for the length of the block."""
        identity = self.run("run", "--detach", "--no-healthcheck", *LIMITS, *options, image, *command).strip()
        try:
            yield Container(self, identity)
        finally:
            self.run("rm", "--force", "--volumes", identity)


@dataclass(frozen=True, slots=True)
class Container:
    """A running container."""

    podman: Podman
    identity: str

    def run(self, *command: str, rc: int | None = 0) -> str:
        """Runs a program in it, and returns what it printed on stdout."""
        return self.podman.run("exec", self.identity, *command, rc=rc)

    def code(self, *command: str) -> int:
        """Runs a program in it, and returns its exit code."""
        ended = subprocess.run(
            [str(self.podman.program), "exec", self.identity, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        return ended.returncode

    def until(self, *command: str, seconds: float = START_SECONDS) -> None:
        """Waits until a program in it ends with 0."""
        deadline = time.monotonic() + seconds
        while self.code(*command) != 0:
            assert time.monotonic() < deadline, f"{command} does not succeed:\n{self.logs()}"
            time.sleep(POLL_SECONDS)

    def logs(self) -> str:
        """What it has printed."""
        return self.podman.run("logs", self.identity, rc=None)

    def stop(self, seconds: int = 30) -> int:
        """Ends it as a machine that shuts down does, and returns its exit code."""
        self.podman.run("stop", "--time", str(seconds), self.identity)
        return int(self.podman.run("inspect", "--format", "{{.State.ExitCode}}", self.identity))
