"""`weft estimate`: files, configured models and plain names."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner_svc.memory.estimate import read_model_facts
from runner_svc.memory.learned_memory import LearnedMemory, learned_file
from runner_svc.policy.memory_estimate import settings_for
from weft_app.cli.main import app
from weft_app.cli.options import EXIT_NOT_FOUND, EXIT_USAGE
from weft_app.compose.demo import demo_model_path

MEBIBYTE = 1024 * 1024


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    return tmp_path


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments])
    return result.exit_code, result.output


def _json(*arguments: str) -> dict[str, Any]:
    code, output = _run(*arguments, "-o", "json")
    assert code == 0, output
    document: dict[str, Any] = json.loads(output)
    return document


def _configure(folder: Path, **settings: Any) -> None:
    model = {"name": "tiny", "path": str(demo_model_path()), "context_tokens": 4096, "slots": 2, **settings}
    (folder / "weft.yaml").write_text(json.dumps({"runners": [{"name": "local", "models": [model]}]}))


@pytest.mark.usefixtures("home")
def test_a_file_is_estimated_by_its_header_part_by_part() -> None:
    code, output = _run(str(demo_model_path()), "--ctx", "8192", "--slots", "1")
    assert code == 0
    rows = [line.split() for line in output.splitlines()]
    assert rows[1:4] == [["weights", "92.1", "MiB"], ["context", "180", "MiB"], ["compute", "121", "MiB"]]
    assert "file's header" in output
    assert "393 MiB" in output


@pytest.mark.usefixtures("home")
def test_programs_get_bytes_and_what_they_come_from() -> None:
    document = _json(str(demo_model_path()), "--ctx", "8192", "--slots", "2", "--cache-type", "q8_0")
    assert (document["source"], document["quantization"], document["trainedContextTokens"]) == ("header", "q4_1", 8192)
    assert document["bytes"] == sum(part["bytes"] for part in document["parts"])
    assert document["parts"][1] == {"name": "context", "bytes": 2 * 180 * MEBIBYTE * 34 // 64}


def test_a_configured_model_is_estimated_as_it_is_configured(home: Path) -> None:
    _configure(home)
    document = _json("tiny")
    assert (document["contextTokens"], document["slots"], document["source"]) == (4096, 2, "header")
    _configure(home, memory_mb=777, extra_arguments=["--cache-type-k", "q4_0"])
    document = _json("tiny")
    assert (document["bytes"], document["source"], document["cacheTypeK"]) == (777 * MEBIBYTE, "manifest", "q4_0")


def test_a_configured_model_is_estimated_by_what_its_runner_learned(home: Path) -> None:
    _configure(home, memory_mb=777)
    identity = read_model_facts(demo_model_path()).identity
    assert identity is not None
    state = learned_file(home / "home" / "state" / "runners", "local")
    LearnedMemory(state).learn(identity, settings_for(4096, 2, {}), 1000 * MEBIBYTE)
    document = _json("tiny")
    assert (document["bytes"], document["source"]) == (1050 * MEBIBYTE, "learned")
    assert _json("tiny", "--ctx", "512")["source"] == "manifest"


@pytest.mark.usefixtures("home")
def test_a_name_is_estimated_by_its_size() -> None:
    assert _json("llama-8b")["source"] == "name"


@pytest.mark.usefixtures("home")
def test_a_name_that_says_nothing_is_not_found() -> None:
    code, output = _run("nonsense")
    assert code == EXIT_NOT_FOUND
    assert "there is no file" in output


@pytest.mark.usefixtures("home")
def test_an_unknown_type_of_cache_is_refused() -> None:
    code, output = _run("llama-8b", "--cache-type", "q3")
    assert code == EXIT_USAGE
    assert "--cache-type" in output


@pytest.mark.usefixtures("home")
def test_the_demo_model_is_estimated_as_the_demo_serves_it() -> None:
    assert _json("smollm2-135m")["source"] == "header"
