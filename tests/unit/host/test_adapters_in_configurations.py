"""Adapters in weft.yaml: their names, their files, what refuses them, and what they take of memory."""

from pathlib import Path
from typing import Any

import pytest
from kit.tiny_gguf import write_adapter, write_gguf

from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.runtimes.llama_server.arguments import adapter_bodies, server_arguments
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Operation, Skill
from weft_app.compose.demo import demo_model_path
from weft_app.compose.served_models import served_model
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config
from weft_app.config.runners import with_replicas


@pytest.fixture
def pirate(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "pirate.gguf")


def _config(*adapters: dict[str, Any], path: Path | None = None, **model: Any) -> WeftConfig:
    given = {"name": "smol", "path": str(path or demo_model_path()), "adapters": list(adapters), **model}
    return parse_config({"runners": [{"name": "r", "command": ["server"], "models": [given]}]})


def _served(*adapters: dict[str, Any], path: Path | None = None, **model: Any) -> Any:
    (section,) = _config(*adapters, path=path, **model).runners or ()
    return served_model(section, section.models[0], 5.0)


def _settings(*adapters: dict[str, Any]) -> LlamaServerModel:
    (section,) = _config(*adapters).runners or ()
    model = section.models[0]
    assert isinstance(model, LlamaServerModel)
    return model


def test_adapter_is_served_under_its_own_name_with_engine_support(pirate: Path) -> None:
    served = _served({"name": "pirate", "path": str(pirate), "pool": "fun", "skills": ["text"]})
    assert served.names == ("smol", "pirate")
    adapter = served.adapter("pirate")
    assert (adapter.pool, adapter.file, adapter.skills) == ("fun", pirate, {Skill.TEXT})
    assert Operation.EMBEDDING in served.operations
    assert served.adapter_operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    assert served.adapter("smol") is None


def test_every_request_sets_the_scale_of_each_adapter(pirate: Path) -> None:
    model = _settings({"name": "a", "path": str(pirate), "scale": 0.5}, {"name": "b", "path": str(pirate)})
    words = server_arguments(model)
    assert [words[at + 1] for at, word in enumerate(words) if word == "--lora-scaled"] == [f"{pirate}:0"] * 2
    assert adapter_bodies(model) == {
        "": {"lora": [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.0}]},
        "a": {"lora": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.0}]},
        "b": {"lora": [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]},
    }
    assert adapter_bodies(_settings()) == {}


def _size(file: Path) -> int:
    return file.stat().st_size


async def test_adapter_files_count_towards_load_memory(pirate: Path) -> None:
    alone = await _served().forecast.expect(AS_CONFIGURED)
    both = [{"name": name, "path": str(pirate)} for name in ("a", "b")]
    beside = await _served(*both).forecast.expect(AS_CONFIGURED)
    assert {part.name: part.bytes for part in beside.parts}["adapters"] == 2 * _size(pirate)
    assert beside.bytes > alone.bytes


def test_missing_adapter_fails_the_loads_of_its_model(tmp_path: Path) -> None:
    lack = _served({"name": "a", "path": str(tmp_path / "nowhere.gguf")}).lack
    assert lack is not None
    assert lack.message.startswith("runners.r.models.smol.adapters[0].path: there is no file")


def test_file_that_is_not_an_adapter_for_the_model_is_refused_with_its_setting(tmp_path: Path, pirate: Path) -> None:
    faults = {
        demo_model_path(): "is not a LoRA adapter",
        write_adapter(tmp_path / "vector.gguf", kind="control"): "is not a LoRA adapter",
        write_adapter(tmp_path / "other.gguf", architecture="qwen2"): "architecture qwen2, and this one is llama",
        write_adapter(tmp_path / "with:colon.gguf"): "must have neither ':' nor ','",
    }
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(pirate.read_bytes()[:40])
    faults[broken] = "cannot be read as an adapter"
    for path, words in faults.items():
        with pytest.raises(FieldError, match=words) as refused:
            _served({"name": "ok", "path": str(pirate)}, {"name": "bad", "path": str(path)})
        assert refused.value.field == "runners.r.models.smol.adapters[1].path", path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora", "x.gguf"], "cannot be combined with --lora"),
        (["--lora-scaled=x.gguf:1"], "cannot be combined with --lora"),
        (["--cache-ram", "100"], "mixes up their cached prompts"),
        (["--reranking"], "only ranks"),
    ],
)
def test_flags_that_contradict_adapters_are_refused(pirate: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(FieldError, match=words) as refused:
        _served({"name": "pirate", "path": str(pirate)}, extra_arguments=arguments)
    assert refused.value.field == "runners.r.models.smol.adapters"


def test_model_of_an_unknown_architecture_accepts_any_adapter(tmp_path: Path, pirate: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    assert _served({"name": "pirate", "path": str(pirate)}, path=empty).names == ("smol", "pirate")
    assert _served({"name": "pirate", "path": str(pirate)}, path=write_gguf(tmp_path / "m.gguf")).names


@pytest.mark.parametrize("adapter", [{"name": "a", "scale": 0}, {"name": "a", "scale": -1}, {"name": "a", "sclae": 1}])
def test_invalid_adapter_setting_error_names_it(pirate: Path, adapter: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as refused:
        _config({"path": str(pirate), **adapter})
    assert "adapters" in refused.value.field


@pytest.mark.parametrize("name", ["smol", "r", "pirate"])
def test_adapter_name_must_be_unique(pirate: Path, name: str) -> None:
    with pytest.raises(FieldError, match=f"names must be unique.*{name}"):
        _config({"name": "pirate", "path": str(pirate)}, {"name": name, "path": str(pirate)})


def test_each_replica_has_its_own_adapters_pooled_with_the_others(pirate: Path) -> None:
    (section,) = _config({"name": "pirate", "path": str(pirate)}, replicas=2).runners or ()
    replicas = with_replicas(section, section.models)
    assert [replica.served_names for replica in replicas] == [("smol", "pirate"), ("smol-2", "pirate-2")]
    assert [replica.served_adapters[0].pool for replica in replicas] == ["pirate", "pirate"]


def test_name_of_an_adapter_replica_must_be_free(pirate: Path) -> None:
    with pytest.raises(FieldError, match="pirate-2"):
        _config({"name": "pirate", "path": str(pirate)}, {"name": "pirate-2", "path": str(pirate)}, replicas=2)
