"""`weft models estimate`: files, configured models and plain names."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.tiny_gguf import write_adapter
from typer.testing import CliRunner

from runner_svc.added_models_file import SUFFIX
from runner_svc.memory.estimate import read_model_facts
from runner_svc.memory.learned_memory import LearnedMemory, learned_file
from runner_svc.policy.memory_estimate import EngineHabits, settings_for
from weft_app.cli.main import app
from weft_app.cli.options import EXIT_NOT_FOUND, EXIT_USAGE
from weft_app.compose.demo import demo_model_path
from weft_app.compose.home import WeftHome

MEBIBYTE = 1024 * 1024


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    return tmp_path


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "estimate", *arguments])
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
def test_file_is_estimated_per_part_from_its_header() -> None:
    code, output = _run(str(demo_model_path()), "--ctx", "8192", "--slots", "1")
    assert code == 0
    rows = [line.split() for line in output.splitlines()]
    assert rows[1:4] == [
        ["weights", "92.1", "MiB"],
        ["context", "180", "MiB"],
        ["compute,", "at", "most", "121", "MiB"],
    ]
    assert "file's header" in output
    assert "393 MiB" in output


@pytest.mark.usefixtures("home")
def test_json_estimate_has_bytes_and_their_source() -> None:
    document = _json(str(demo_model_path()), "--ctx", "8192", "--slots", "2", "--cache-type", "q8_0")
    assert (document["source"], document["quantization"], document["trainedContextTokens"]) == ("header", "q4_1", 8192)
    assert document["bytes"] == sum(part["bytes"] for part in document["parts"])
    assert document["parts"][1] == {"name": "context", "bytes": 2 * 180 * MEBIBYTE * 34 // 64}


def test_configured_model_is_estimated_with_its_configuration(home: Path) -> None:
    _configure(home)
    document = _json("tiny")
    assert (document["contextTokens"], document["slots"], document["source"]) == (4096, 2, "header")
    _configure(home, memory_mb=777, extra_arguments=["--cache-type-k", "q4_0"])
    document = _json("tiny")
    assert (document["bytes"], document["source"], document["cacheTypeK"]) == (777 * MEBIBYTE, "manifest", "q4_0")


def test_estimate_with_embeddings_says_why_it_is_larger_than_that_of_the_file_alone(home: Path) -> None:
    _configure(home, embeddings=True)
    assert "4096 tokens in each of 2 slots, and texts to embed)" in _run("tiny")[1]
    assert "texts to embed" not in _run(str(demo_model_path()), "--ctx", "4096", "--slots", "2")[1]


def test_estimate_read_the_file_here_instead_of_the_running_meshs(home: Path) -> None:
    mesh, elsewhere = WeftHome(home / "home"), home / "elsewhere"
    elsewhere.mkdir()
    _configure(elsewhere, slots=3)
    _configure(home)
    mesh.create()
    with mesh.claim():
        mesh.announce({"config": [str(elsewhere / "weft.yaml")]})
        assert _json("tiny")["slots"] == 3
        assert _json("tiny", "--config", str(home / "weft.yaml"))["slots"] == 2
        left = mesh.up_file.read_bytes()
    mesh.up_file.write_bytes(left)
    assert _json("tiny")["slots"] == 2, "the mesh was killed"


def test_model_added_to_a_runner_is_estimated_with_its_sizes(home: Path) -> None:
    added = {"name": "mine", "storedSource": str(demo_model_path()), "sizing": {"contextTokens": 1024, "slots": 3}}
    folder = home / "home" / "state" / "runners"
    folder.mkdir(parents=True)
    (folder / f"local{SUFFIX}").write_text(json.dumps({"schemaVersion": 1, "models": [added]}))
    document = _json("mine")
    assert (document["contextTokens"], document["slots"], document["source"]) == (1024, 3, "header")
    assert _json("mine", "--slots", "1")["slots"] == 1


def test_the_memory_of_kept_prompts_is_shown_beside_the_total(home: Path) -> None:
    _configure(home, kept_prompts_mb=300)
    document = _json("tiny")
    assert document["keptPromptBytes"] == 300 * MEBIBYTE
    assert document["bytes"] == sum(part["bytes"] for part in document["parts"])
    code, output = _run("tiny")
    assert code == 0
    assert any(line.startswith("kept prompts, maximum") and line.endswith("300 MiB") for line in output.splitlines())
    for unsaved in ({"kept_prompts_mb": 0}, {"mmproj_path": "projector.gguf"}):
        _configure(home, **unsaved)
        assert _json("tiny")["keptPromptBytes"] == 0


def test_configured_model_is_estimated_from_its_runners_measurements(home: Path) -> None:
    _configure(home, memory_mb=777)
    identity = read_model_facts(demo_model_path()).identity
    assert identity is not None
    state = learned_file(home / "home" / "state" / "runners", "local")
    LearnedMemory(state).learn(identity, settings_for(4096, 2, {}, EngineHabits(embeds=True)), 1000 * MEBIBYTE)
    document = _json("tiny")
    assert (document["bytes"], document["source"]) == (1050 * MEBIBYTE, "learned")
    assert _json("tiny", "--ctx", "512")["source"] == "manifest"


@pytest.mark.usefixtures("home")
def test_name_is_estimated_from_the_size_in_it() -> None:
    assert _json("llama-8b")["source"] == "name"


@pytest.mark.usefixtures("home")
def test_name_without_a_size_is_not_found() -> None:
    code, output = _run("nonsense")
    assert code == EXIT_NOT_FOUND
    assert "there is no file" in output


@pytest.mark.usefixtures("home")
def test_unknown_cache_type_is_refused() -> None:
    code, output = _run("llama-8b", "--cache-type", "q3")
    assert code == EXIT_USAGE
    assert "--cache-type" in output


@pytest.mark.usefixtures("home")
def test_demo_model_is_estimated_with_demo_settings() -> None:
    assert _json("smollm2-135m")["source"] == "header"


def _safetensors_folder(folder: Path) -> Path:
    """A model of safetensors with two layers of two heads of 64 numbers, and weights of a mebibyte."""
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 128}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **shape}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    head = json.dumps({"w": {"dtype": "U8", "shape": [MEBIBYTE], "data_offsets": [0, MEBIBYTE]}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(MEBIBYTE))
    return folder


def _configure_runner(folder: Path, runtime: str, **model: Any) -> None:
    runner = {"name": "local", "runtime": runtime, "models": [{"name": "tiny", **model}]}
    (folder / "weft.yaml").write_text(json.dumps({"runners": [runner]}))


@pytest.mark.parametrize(("runtime", "setting"), [("vllm", "model"), ("exllamav3", "path")])
def test_model_of_another_engine_is_estimated_as_its_runner_does(home: Path, runtime: str, setting: str) -> None:
    given = {setting: str(_safetensors_folder(home / "model")), "context_tokens": 1024, "slots": 2}
    _configure_runner(home, runtime, **given)
    document = _json("tiny")
    assert document["source"] == "header"
    parts = {part["name"]: part["bytes"] for part in document["parts"]}
    assert parts["weights"] == MEBIBYTE
    assert parts["context"] >= 2 * 2 * 128 * 2 * 1024 * 2, "keys and values of both layers, for two slots"
    wider = {part["name"]: part["bytes"] for part in _json("tiny", "--ctx", "2048")["parts"]}
    assert wider["context"] > parts["context"]


def test_ctranslate2_model_is_estimated_from_its_weights(home: Path) -> None:
    folder = home / "model"
    folder.mkdir()
    (folder / "model.bin").write_bytes(bytes(2 * MEBIBYTE))
    _configure_runner(home, "ctranslate2", path=str(folder))
    document = _json("tiny")
    assert document["source"] == "file_size"
    assert document["bytes"] >= 2 * MEBIBYTE


def test_memory_declared_by_a_vllm_model_counts(home: Path) -> None:
    _configure_runner(home, "vllm", model="org/somewhere", memory_mb=700)
    assert (_json("tiny")["source"], _json("tiny")["bytes"]) == ("manifest", 700 * MEBIBYTE)


def test_missing_configured_model_is_distinguished_from_an_unknown_name(home: Path) -> None:
    _configure_runner(home, "vllm", model="org/somewhere")
    code, output = _run("tiny")
    assert code == EXIT_NOT_FOUND
    assert "org/somewhere is not on this machine" in output


def test_adapter_name_means_its_model_with_all_adapters(home: Path) -> None:
    adapter = write_adapter(home / "pirate.gguf", strength=0.0)
    _configure(home, adapters=[{"name": "pirate", "path": str(adapter)}])
    document = _json("pirate")
    assert document["name"] == "tiny"
    assert {part["name"]: part["bytes"] for part in document["parts"]}["adapters"] == adapter.stat().st_size
