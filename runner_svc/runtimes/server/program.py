"""Whether the program of a server model is installed: what its command line starts, and the module that it names."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from runner_svc.runtimes.server.presets import OTHER_PROGRAM, PRESETS, ServerPreset
from runner_svc.runtimes.server.settings import ServerModel

MODULE_SECONDS = 10.0
"""Timeout of an interpreter that is asked whether it has a module."""
_HAS_MODULE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def preset_of(model: ServerModel) -> ServerPreset:
    """Returns what is known of the program of a model."""
    return OTHER_PROGRAM if model.preset is None else PRESETS[model.preset]


def command_of(model: ServerModel, runner_command: tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the command line of a model's program, with its placeholders; empty: none is configured."""
    preset, own = preset_of(model), model.command or runner_command
    for_sleep = preset.sleep_arguments if model.sleeps_in_place and not own else ()
    command = own or preset.command
    return (*command, *for_sleep, *model.extra_arguments) if command else ()


def find_program(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Returns the path of the program that a command line starts; None: there is no such program."""
    return shutil.which(command[0], path=environment.get("PATH"))


def lacks_module(path: str, command: Sequence[str]) -> str:
    """Returns the module that a command line starts (`python3 -m NAME`) and its interpreter lacks; empty: it has it.

    An interpreter that does not answer in time counts as one that has it.
    """
    if list(command[1:2]) != ["-m"] or len(command) < 3:
        return ""
    module = command[2].partition(".")[0]
    try:
        found = subprocess.run(  # noqa: S603 - the program that the configuration starts
            [path, "-c", _HAS_MODULE, module], capture_output=True, timeout=MODULE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return module if found.returncode == 1 else ""
