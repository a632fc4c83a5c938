"""Whether an engine ended because its program is compiled for another processor, judged by how and when it ended."""

from collections.abc import Sequence
from pathlib import PurePath

NATIVE_OFF = "-DGGML_NATIVE=OFF"
_ILLEGAL_INSTRUCTION = frozenset({"signal SIGILL", "exit code 132"})
"""Of the process itself, and of a shell around it (128 and the number of the signal)."""
_SEGMENTATION_FAULT = frozenset({"signal SIGSEGV", "exit code 139"})
_CORE_DUMPED = " (core dumped)"


def explanation(how: str, command: Sequence[str], *, has_answered: bool) -> str | None:
    """Why an engine that ended as `how` says probably is for another processor, with advice; None: it probably is not.

    `command` is what was started. `has_answered`: whether this process brought an answer before. Kernels that the
    processor lacks, or that are wrong for it, run with the first request at the latest, so a segmentation fault later
    on has another cause; an illegal instruction has not.
    """
    end = how.removesuffix(_CORE_DUMPED)
    if end not in _ILLEGAL_INSTRUCTION and (has_answered or end not in _SEGMENTATION_FAULT):
        return None
    when = "" if has_answered else " before its first answer"
    program = program_name(command)
    return f"{how}{when}: {program} was probably built for another processor; {_advice(program)}"


def program_name(command: Sequence[str]) -> str:
    """The program of a command: the module where an interpreter runs one, else the file."""
    if len(command) > 2 and command[1] == "-m":
        return command[2]
    return PurePath(command[0]).name if command else "the engine"


def _advice(program: str) -> str:
    if program.endswith(("xllamacpp_launcher", "xllamacpp_server")):
        return f"build llama-server on this machine or with {NATIVE_OFF}, and name it in the runner's `command`"
    if program.endswith(("llama_cpp_python.host", "llama_cpp_host")):
        return f"install llama-cpp-python again with CMAKE_ARGS={NATIVE_OFF}"
    wheel = "python -m runner_svc.runtimes.llama_server.xllamacpp_launcher"
    return f"build it with {NATIVE_OFF}, or set the runner's `command` to the server of the xllamacpp wheel ({wheel})"
