"""Ends of an engine whose program was built for another processor, and the advice."""

import pytest

from runner_svc.policy.engine_failures import explain_foreign_build, program_name
from runner_svc.runtimes.library_server import program_command

NATIVE = ("/opt/llama.cpp/llama-server", "--model", "a.gguf")
WHEEL = ("/usr/bin/python3", "-m", "runner_svc.runtimes.llama_server.xllamacpp_launcher")
LIBRARY = ("/usr/bin/python3", "-m", "runner_svc.runtimes.llama_cpp_python.server")


@pytest.mark.parametrize(
    "how",
    ["signal SIGSEGV", "signal SIGSEGV (core dumped)", "signal SIGILL", "exit code 139", "exit code 132"],
)
def test_a_fault_before_the_first_answer_names_signal_program_cause_and_next_step(how: str) -> None:
    why = explain_foreign_build(how, NATIVE, has_answered=False)
    assert why is not None
    assert why.startswith(f"{how} before its first answer: llama-server was probably built for another processor")
    assert "-DGGML_NATIVE=OFF" in why
    assert "xllamacpp" in why


def test_after_an_answer_only_an_illegal_instruction_means_that() -> None:
    assert explain_foreign_build("signal SIGSEGV", NATIVE, has_answered=True) is None
    why = explain_foreign_build("signal SIGILL", NATIVE, has_answered=True)
    assert why is not None
    assert "before its first answer" not in why


@pytest.mark.parametrize("how", ["signal SIGKILL", "signal SIGABRT", "signal SIGBUS", "exit code 1", "exit code 0"])
def test_other_ends_do_not_mean_that(how: str) -> None:
    assert explain_foreign_build(how, NATIVE, has_answered=False) is None


def test_the_next_step_is_one_that_this_program_allows() -> None:
    wheel = explain_foreign_build("signal SIGILL", WHEEL, has_answered=False)
    library = explain_foreign_build("signal SIGILL", LIBRARY, has_answered=False)
    assert wheel is not None
    assert library is not None
    assert "name it in the runner's `command`" in wheel
    assert "CMAKE_ARGS=-DGGML_NATIVE=OFF" in library


def test_a_program_of_another_library_is_not_to_be_built_as_llama_cpp() -> None:
    command = program_command("runner_svc.runtimes.ctranslate2.server", "/opt/engine/bin/python")
    assert program_name(command) == "runner_svc.runtimes.ctranslate2.server"
    why = explain_foreign_build("signal SIGILL", command, has_answered=False)
    assert why is not None
    assert "GGML" not in why
    assert "install a version of the engine's library" in why
    library = program_command("runner_svc.runtimes.llama_cpp_python.server")
    assert "CMAKE_ARGS" in (explain_foreign_build("signal SIGILL", library, has_answered=False) or "")


@pytest.mark.parametrize(
    ("command", "name"),
    [(NATIVE, "llama-server"), (WHEEL, WHEEL[2]), (("llama-server",), "llama-server"), ((), "the engine")],
)
def test_a_program_is_named_as_people_know_it(command: tuple[str, ...], name: str) -> None:
    assert program_name(command) == name
