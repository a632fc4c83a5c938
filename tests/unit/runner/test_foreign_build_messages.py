"""Ends of an engine whose program was built for another processor, and the advice."""

import pytest
from kit.presence import present

from runner_svc.policy.engine_failures import explain_foreign_build, program_name
from runner_svc.runtimes.library_server import program_command

NATIVE = ("/opt/llama.cpp/llama-server", "--model", "a.gguf")
WHEEL = ("/usr/bin/python3", "-m", "runner_svc.runtimes.llama_server.xllamacpp_launcher")
LIBRARY = ("/usr/bin/python3", "-m", "runner_svc.runtimes.llama_cpp_python.server")


@pytest.mark.parametrize(
    "how",
    ["signal SIGSEGV", "signal SIGSEGV (core dumped)", "signal SIGILL", "exit code 139", "exit code 132"],
)
def test_crash_before_the_first_answer_names_signal_program_cause_and_remedy(how: str) -> None:
    why = present(explain_foreign_build(how, NATIVE, has_answered=False))
    assert why.startswith(f"{how} before its first answer: llama-server was probably built for another processor")
    assert "-DGGML_NATIVE=OFF" in why
    assert "xllamacpp" in why


def test_only_an_illegal_instruction_is_explained_after_an_answer() -> None:
    assert explain_foreign_build("signal SIGSEGV", NATIVE, has_answered=True) is None
    why = present(explain_foreign_build("signal SIGILL", NATIVE, has_answered=True))
    assert "before its first answer" not in why


@pytest.mark.parametrize("how", ["signal SIGKILL", "signal SIGABRT", "signal SIGBUS", "exit code 1", "exit code 0"])
def test_other_exits_are_not_explained_as_a_foreign_build(how: str) -> None:
    assert explain_foreign_build(how, NATIVE, has_answered=False) is None


def test_remedy_is_possible_for_the_program() -> None:
    wheel = explain_foreign_build("signal SIGILL", WHEEL, has_answered=False)
    library = explain_foreign_build("signal SIGILL", LIBRARY, has_answered=False)
    assert wheel is not None
    assert library is not None
    assert "name it in the runner's `command`" in wheel
    assert "CMAKE_ARGS=-DGGML_NATIVE=OFF" in library


def test_remedy_for_another_library_does_not_suggest_building_llama_cpp() -> None:
    command = program_command("runner_svc.runtimes.ctranslate2.server", "/opt/engine/bin/python")
    assert program_name(command) == "runner_svc.runtimes.ctranslate2.server"
    why = present(explain_foreign_build("signal SIGILL", command, has_answered=False))
    assert "GGML" not in why
    assert "install a version of the engine's library" in why
    library = program_command("runner_svc.runtimes.llama_cpp_python.server")
    assert "CMAKE_ARGS" in (explain_foreign_build("signal SIGILL", library, has_answered=False) or "")


@pytest.mark.parametrize(
    ("command", "name"),
    [(NATIVE, "llama-server"), (WHEEL, WHEEL[2]), (("llama-server",), "llama-server"), ((), "the engine")],
)
def test_program_has_its_common_name(command: tuple[str, ...], name: str) -> None:
    assert program_name(command) == name
