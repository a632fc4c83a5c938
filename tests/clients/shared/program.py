"""What the checks of command-line clients share: start the program, and read what it said."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from report import KEY, URL

HOME = Path(os.environ["HOME"])
AGENT_TEXT = os.environ["WEFT_AGENT_TEXT"]
"""What the models `agent-...` say after they have changed the notes and run their test."""
PROGRAM_SECONDS = 900.0


def start(*command: str, fails: bool = False, **environment: str) -> str:
    """Run it in the folder with the notes; what it printed, stdout and stderr together.

    Raises AssertionError unless it fails or not, as asked.
    """
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    if fails is not bool(done.returncode):
        raise AssertionError(f"{command[0]} ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout.strip()


def launched(tool: str, model: str) -> tuple[list[str], dict[str, str]]:
    """The command and the variables with which `weft launch` starts a program for this model."""
    tools = _launch_tools()
    access = tools.Access(url=URL, key=KEY, model=model)
    chosen = tools.TOOLS[tool]
    return [chosen.program, *chosen.arguments(access)], dict(chosen.environment(access))


def launch(tool: str, model: str, *arguments: str, fails: bool = False) -> str:
    """As `weft launch TOOL --model MODEL -- ARGUMENTS`; what it printed. Raises as `start`."""
    command, environment = launched(tool, model)
    return start(*command, *arguments, fails=fails, **environment)


def _launch_tools() -> ModuleType:
    """The definition of `weft launch`, a file that needs the standard library alone; weft is not installed here."""
    name = "launch_tools"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.environ["WEFT_LAUNCH_TOOLS"])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def changed_and_tested(events: list[dict]) -> None:
    """Raises AssertionError unless an agent read and changed the notes, and saw their test pass."""
    said = json.dumps(events)
    assert "The sea is wide" in said, "it did not read the notes"
    assert Path("notes.txt").read_text() == "The lake is wide and deep.\n", "it did not change the notes"
    assert "1 passed" in said, "it did not run the test"
