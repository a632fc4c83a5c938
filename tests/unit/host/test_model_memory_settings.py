"""What a configuration says about memory, keep-alive, variants, replicas and devices, and where it goes."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft.gpu.snapshot import Source
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.home import WeftHome
from weft_app.compose.runner import runner_config
from weft_app.config.config import AcceleratorSettings, DeclaredDevice
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

MIB = 1024**2
WRITE_SECONDS = 10.0
POLL_SECONDS = 0.01


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-7b.gguf"
    path.write_bytes(b"GGUF, and no more of it")
    return path


def _section(path: Path, *others: dict[str, Any], **fields: Any) -> RunnerSettings:
    model = {"name": "qwen", "path": str(path), **fields.pop("model", {})}
    further = [{"path": str(path), **other} for other in others]
    return parse_section(ConfiguredRunner, {"name": "r1", "command": ["server"], "models": [model, *further], **fields})


def _config(section: RunnerSettings, tmp_path: Path, accelerators: AcceleratorSettings | None = None) -> RunnerConfig:
    return runner_config(
        section,
        WeftHome(tmp_path),
        address="unix:/r",
        registry_address="unix:/g",
        accelerators=accelerators,
    )


async def test_configured_model_memory_is_used_as_the_forecast(model_file: Path, tmp_path: Path) -> None:
    config = _config(_section(model_file, model={"memory_mb": 700}), tmp_path)
    forecast = config.models[0].forecast
    expected = await forecast.expect(AS_CONFIGURED)
    assert expected is not None
    assert (expected.bytes, expected.source) == (700 * MIB, "manifest")


async def test_measured_load_memory_survives_a_runner_restart(model_file: Path, tmp_path: Path) -> None:
    forecast = _config(_section(model_file), tmp_path).models[0].forecast
    before = await forecast.expect(AS_CONFIGURED)
    forecast.note_taken(AS_CONFIGURED, 900 * MIB)
    # It is written in the background.
    deadline = time.monotonic() + WRITE_SECONDS
    later = before
    while later == before and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)
        later = await _config(_section(model_file), tmp_path).models[0].forecast.expect(AS_CONFIGURED)
    assert later is not None
    assert later.source == "learned"
    assert later.bytes >= 900 * MIB


@pytest.mark.parametrize(("value", "seconds"), [("5m", 300.0), (90, 90.0), ("-1", -1.0), (0, 0.0), ("2h", 7200.0)])
def test_keep_alive_is_read_in_all_its_forms(value: object, seconds: float, model_file: Path, tmp_path: Path) -> None:
    config = _config(_section(model_file, model={"keep_alive": value, "category": "vision"}), tmp_path)
    hibernation = config.models[0].hibernation
    assert (hibernation.keep_alive_seconds, hibernation.category) == (seconds, "vision")
    assert hibernation.idle_seconds == seconds


def test_hibernation_time_applies_if_keep_alive_is_unset(model_file: Path, tmp_path: Path) -> None:
    sleep = {"after_seconds": 20.0}
    only_sleep = _config(_section(model_file, model={"sleep": sleep}), tmp_path).models[0].hibernation
    both = _config(_section(model_file, model={"sleep": sleep, "keep_alive": "1m"}), tmp_path).models[0].hibernation
    assert (only_sleep.idle_seconds, both.idle_seconds) == (20.0, 60.0)


def test_invalid_keep_alive_error_names_it(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(FieldError) as refused:
        _config(_section(model_file, model={"keep_alive": "soon"}), tmp_path)
    assert refused.value.field == "runners.r1.models.qwen.keep_alive"


def test_variants_must_be_existing_files(model_file: Path, tmp_path: Path) -> None:
    good = _config(_section(model_file, model={"quantizations": {"q8_0": str(model_file)}}), tmp_path)
    assert good.models[0].quantizations == {"q8_0": model_file}
    lack = _config(_section(model_file, model={"quantizations": {"q8_0": "/nowhere.gguf"}}), tmp_path).models[0].lack
    assert lack is not None
    assert lack.message == "runners.r1.models.qwen.quantizations.q8_0: there is no file /nowhere.gguf"


def test_replicas_are_identical_pooled_models_and_extra_ones_start_hibernating(
    model_file: Path, tmp_path: Path
) -> None:
    section = _section(model_file, {"name": "other"}, model={"replicas": 2, "replica_max": 3, "target_inflight": 2})
    models = _config(section, tmp_path).models
    assert [model.name for model in models] == ["qwen", "qwen-2", "qwen-3", "other"]
    assert [model.pool for model in models] == ["qwen", "qwen", "qwen", ""]
    assert [model.hibernation.start_asleep for model in models] == [False, False, True, False]
    assert [model.target_inflight for model in models] == [2, 2, 2, None]


def test_replicas_join_the_pool_of_their_model(model_file: Path, tmp_path: Path) -> None:
    models = _config(_section(model_file, model={"replicas": 2, "pool": "chat"}), tmp_path).models
    assert [model.pool for model in models] == ["chat", "chat"]


@pytest.mark.parametrize(
    ("fields", "others", "field"),
    [
        ({"replicas": 2}, [{"name": "qwen-2"}], "replicas"),
        ({"replicas": 3, "replica_max": 2}, [], "replica_max"),
    ],
)
def test_invalid_replica_settings_error_names_the_field(
    fields: dict[str, Any], others: list[dict[str, Any]], field: str, model_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(FieldError) as refused:
        _config(_section(model_file, *others, model=fields), tmp_path)
    assert refused.value.field == f"runners.r1.models.qwen.{field}"


def test_attached_server_has_no_replicas() -> None:
    model = {"name": "m", "url": "http://gpu-box.lan:8000/v1", "replicas": 2}
    with pytest.raises(FieldError, match=r"models.0.replicas: .*cannot start another"):
        parse_section(ConfiguredRunner, {"name": "r1", "runtime": "openai_http", "models": [model]})


async def test_devices_ports_and_memory_timeout_reach_the_runner(model_file: Path, tmp_path: Path) -> None:
    places = {"devices": [1, 3], "memory_wait_seconds": 7.0, "port_range": "41000-41001"}
    section = _section(model_file, {"name": "b"}, model={"pin": True}, **places)
    declared = AcceleratorSettings(declared=(DeclaredDevice(name="budget", memory_mb=64),))
    config = _config(section, tmp_path, declared)
    assert (config.device_indexes, config.memory_wait_seconds) == ((1, 3), 7.0)
    assert config.observer is not None
    sight = await config.observer.look()
    assert (sight.source, [device.total_bytes for device in sight.devices]) == (Source.DECLARED, [64 * MIB])
    backends = [model.make_backend() for model in config.models]
    ports = [backend.context.ports for backend in backends if isinstance(backend, LlamaServerBackend)]
    assert ports[0] is ports[1] is not None, "the engines of a runner share its ports"
    assert [model.hibernation.pinned for model in config.models] == [True, False]


@pytest.mark.parametrize(
    ("fields", "sees"),
    [
        ({}, False),
        ({"category": "vision"}, False),
        ({"category": "vision", "extra_arguments": ["-hf", "org/model"]}, True),
        ({"extra_arguments": ["--mmproj", "m.gguf"]}, True),
    ],
)
def test_image_support_is_derived_from_model_settings(
    fields: dict[str, Any], sees: bool, model_file: Path, tmp_path: Path
) -> None:
    """A category counts where the files do not show that the engine has nothing that encodes images."""
    model = _config(_section(model_file, model=fields), tmp_path).models[0]
    assert model.takes_images(model.capabilities) is sees
