"""A weft.yaml with parts that weft no longer has: they are left out and named with their replacement."""

from pathlib import Path

import pytest

from weft.kernel.removed import RUNTIMES
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.home import WeftHome
from weft_app.compose.up import UpHost

ANSWERS = "{name: a, models: [{name: m, path: /m.gguf}]}"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_runner_of_a_removed_runtime_is_left_out_and_named_with_its_line(runtime: str, tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(
        f"runners:\n- {ANSWERS}\n- name: voice\n  runtime: {runtime}\n  default_voice: x\n  models: [{{name: r}}]\n"
    )
    source = ConfigurationSource(path=file)
    read = source.read()
    assert [runner.name for runner in read.runners] == ["a"]
    (message,) = read.removed
    assert message == (
        f"the runner voice (weft.yaml line 3) is not started: its runtime {runtime} was removed; "
        f"use: {RUNTIMES[runtime]}"
    )
    assert list(UpHost(source, read, WeftHome(tmp_path)).notices) == [message]


def test_only_runner_of_a_removed_runtime_is_not_replaced_by_the_demo_model(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("runners: [{name: voice, runtime: espeak_ng, models: [{name: r}]}]\n")
    read = ConfigurationSource(path=file).read()
    assert (read.runners, len(read.removed)) == ((), 1)


def test_configuration_without_removed_parts_has_no_message(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(f"runners: [{ANSWERS}]\n")
    assert ConfigurationSource(path=file).read().removed == ()
