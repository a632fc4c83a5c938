"""The environment variables of the runner API."""

from pathlib import Path
from typing import Any

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.units import Rate
from weft_app.compose.demo import with_http_port
from weft_app.compose.environment import RunnerEnvironment, read_environment, with_model_folders
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


def config(**fields: Any) -> WeftConfig:
    return parse_config(document(**fields))


def document(**fields: Any) -> dict[str, Any]:
    models = [{"name": "qwen", "path": "qwen.gguf"}]
    return {"runners": [{"name": "a", "models": models, **fields.pop("runner", {})}], **fields}


def applied(environment: dict[str, str], **fields: Any) -> WeftConfig:
    return parse_config(read_environment(environment).applied_to(document(**fields)))


def only_runner(found: WeftConfig) -> Any:
    assert found.runners is not None
    return found.runners[0]


def test_empty_environment_changes_nothing() -> None:
    assert read_environment({}) == RunnerEnvironment()
    assert applied({}) == config()


def test_every_specified_variable_is_supported() -> None:
    found = read_environment(
        {
            "CUDA_VISIBLE_DEVICES": "1,0",
            "HF_HOME": "/models/cache",
            "MODEL_BASE_PATH": "/models",
            "VLLM_ENABLE_PREFIX_CACHING": "true",
            "VLLM_MAX_MODEL_LEN": "32768",
            "VLLM_GPU_MEMORY_UTILIZATION": "0.9",
            "ENABLE_MULTI_TENANT": "true",
            "DEFAULT_RATE_LIMIT": "100req/min",
            "TENANT_RATE_LIMIT_community-x": "500req/min",
            "VERIFIED_OP_TOKEN_KEY_PATH": "/etc/safebox/model-api.key",
            "LOG_LEVEL": "info",
            "LOG_FORMAT": "json",
            "ENABLE_METRICS": "true",
            "METRICS_PORT": "9090",
            "MAX_QUEUE_DEPTH": "16",
            "QUEUE_TIMEOUT_MS": "30000",
        }
    )
    assert found == RunnerEnvironment(
        log_level="info",
        log_format="json",
        model_folders=(Path("/models"), Path("/models/cache")),
        context_tokens=32768,
        devices=(0, 1),
        max_queue_depth=16,
        queue_timeout_seconds=30.0,
        multi_tenant=True,
        default_rates=(Rate(100, 60),),
        tenant_rates={"community-x": (Rate(500, 60),)},
        metrics_port=9090,
        ignored=(
            ("VERIFIED_OP_TOKEN_KEY_PATH", "tokens are checked by the registry; set it there"),
            ("VLLM_GPU_MEMORY_UTILIZATION", "no engine that weft runs has such a setting"),
        ),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_QUEUE_DEPTH", "many"),
        ("MAX_QUEUE_DEPTH", "-1"),
        ("QUEUE_TIMEOUT_MS", "0"),
        ("QUEUE_TIMEOUT_MS", "1e3"),
        ("METRICS_PORT", "65536"),
        ("ENABLE_METRICS", "maybe"),
        ("ENABLE_MULTI_TENANT", "2"),
        ("DEFAULT_RATE_LIMIT", "100"),
        ("TENANT_RATE_LIMIT_x", "0req/min"),
        ("TENANT_RATE_LIMIT_", "1req/min"),
        ("TENANT_RATE_LIMIT_a b", "1req/min"),
        ("VLLM_MAX_MODEL_LEN", "2k"),
        ("LOG_LEVEL", "loud"),
        ("LOG_FORMAT", "xml"),
        ("CUDA_VISIBLE_DEVICES", "0,0"),
        ("CUDA_VISIBLE_DEVICES", "64"),
    ],
)
def test_invalid_variable_error_names_it(name: str, value: str) -> None:
    with pytest.raises(FieldError) as refused:
        read_environment({name: value})
    assert refused.value.field == name


def test_empty_variable_is_unset_except_that_empty_devices_mean_none() -> None:
    names = ("MAX_QUEUE_DEPTH", "LOG_LEVEL", "ENABLE_METRICS", "DEFAULT_RATE_LIMIT", "MODEL_BASE_PATH")
    assert read_environment(dict.fromkeys(names, "")) == RunnerEnvironment()
    assert read_environment({"CUDA_VISIBLE_DEVICES": ""}).devices == ()


def test_file_takes_precedence_over_the_environment() -> None:
    environment = {
        "MAX_QUEUE_DEPTH": "5",
        "QUEUE_TIMEOUT_MS": "1500",
        "LOG_LEVEL": "debug",
        "CUDA_VISIBLE_DEVICES": "3",
        "VLLM_MAX_MODEL_LEN": "4096",
    }
    open_file = applied(environment)
    assert (open_file.router.queue_depth_per_runner, open_file.router.queue_timeout_seconds) == (5, 1.5)
    assert open_file.log.level == "debug"
    assert only_runner(open_file).devices == (3,)
    assert only_runner(open_file).models[0].context_tokens == 4096
    settled = applied(
        environment,
        router={"queue_depth_per_runner": 16, "queue_timeout_seconds": 30.0},
        log={"level": "info"},
        runner={"devices": [0], "models": [{"name": "qwen", "path": "q.gguf", "context_tokens": 2048}]},
    )
    # Also where the file says no more than the default.
    assert (settled.router.queue_depth_per_runner, settled.router.queue_timeout_seconds) == (16, 30.0)
    assert settled.log.level == "info"
    assert only_runner(settled).devices == (0,)
    assert only_runner(settled).models[0].context_tokens == 2048


def test_relative_model_paths_are_resolved_in_the_model_folders(tmp_path: Path) -> None:
    base, cache = tmp_path / "base", tmp_path / "cache"
    for folder in (base, cache):
        folder.mkdir()
    (cache / "qwen.gguf").touch()
    environment = {"MODEL_BASE_PATH": str(base), "HF_HOME": str(cache)}
    assert only_runner(applied(environment)).models[0].path == cache / "qwen.gguf"
    (base / "qwen.gguf").touch()
    assert only_runner(applied(environment)).models[0].path == base / "qwen.gguf"


def test_path_that_cannot_be_looked_for_is_unchanged(tmp_path: Path) -> None:
    """A folder of models of another user ended the start with a traceback; so did a name that is too long."""
    path = f"{'x' * 300}.gguf"
    models = [{"name": "qwen", "path": path}]
    (model,) = only_runner(applied({"MODEL_BASE_PATH": str(tmp_path)}, runner={"models": models})).models
    assert model.path == Path(path)


def test_variants_are_resolved_in_model_folders_and_missing_ones_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "q8.gguf").touch()
    models = [{"name": "qwen", "path": "none.gguf", "quantizations": {"q8_0": "q8.gguf"}}]
    (model,) = only_runner(applied({"MODEL_BASE_PATH": str(tmp_path)}, runner={"models": models})).models
    assert model.path == Path("none.gguf")
    assert model.quantizations == {"q8_0": tmp_path / "q8.gguf"}


def test_empty_visible_devices_disable_the_gpu_library() -> None:
    assert applied({"CUDA_VISIBLE_DEVICES": ""}).accelerators.nvidia is False
    assert applied({"CUDA_VISIBLE_DEVICES": "-1,0"}).accelerators.nvidia is False
    assert applied({"CUDA_VISIBLE_DEVICES": ""}, accelerators={"nvidia": True}).accelerators.nvidia is True


def test_demo_runner_is_restricted_to_the_visible_devices() -> None:
    found = parse_config(read_environment({"CUDA_VISIBLE_DEVICES": "1"}).applied_to({}))
    assert only_runner(found).devices == (1,)
    assert parse_config(read_environment({"LOG_LEVEL": "debug"}).applied_to({})).runners is None


def test_devices_named_by_id_need_numbers_in_the_file() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-4f3c,MIG-1"}
    with pytest.raises(FieldError, match=r"CUDA_VISIBLE_DEVICES: must hold numbers .*`devices` for runner a"):
        applied(environment)
    assert only_runner(applied(environment, runner={"devices": [2]})).devices == (2,)


def test_tenant_default_rate_takes_precedence_over_the_general_one() -> None:
    found = read_environment(
        {"ENABLE_MULTI_TENANT": "1", "DEFAULT_RATE_LIMIT": "100req/min", "TENANT_RATE_LIMIT_default": "50req/min"}
    )
    assert (found.default_rates, found.tenant_rates) == ((Rate(50, 60),), {})


@pytest.mark.parametrize(
    ("environment", "ignored"),
    [
        ({"TENANT_RATE_LIMIT_x": "1req/s"}, "TENANT_RATE_LIMIT_x"),
        ({"DEFAULT_RATE_LIMIT": "1req/s", "ENABLE_MULTI_TENANT": "no"}, "DEFAULT_RATE_LIMIT"),
        ({"METRICS_PORT": "9090", "ENABLE_METRICS": "false"}, "METRICS_PORT"),
        ({"VLLM_ENABLE_PREFIX_CACHING": "false"}, "VLLM_ENABLE_PREFIX_CACHING"),
        ({"VLLM_ATTENTION_BACKEND": "FLASH"}, "VLLM_ATTENTION_BACKEND"),
    ],
)
def test_variable_without_effect_is_reported(environment: dict[str, str], ignored: str) -> None:
    assert [name for name, why in read_environment(environment).ignored if why] == [ignored]


def test_variables_read_by_an_engine_are_not_reported_as_ignored() -> None:
    environment = read_environment({"VLLM_ATTENTION_BACKEND": "FLASH", "METRICS_PORT": "1", "ENABLE_METRICS": "no"})
    vllm = {"runtime": "vllm", "models": [{"name": "qwen", "model": "org/qwen"}]}
    assert [name for name, _ in environment.ignored_by(config(runner=vllm))] == ["METRICS_PORT"]
    assert [name for name, _ in environment.ignored_by(config())] == ["METRICS_PORT", "VLLM_ATTENTION_BACKEND"]


def test_single_runner_gets_the_command_line_port() -> None:
    models = [{"name": "qwen", "path": __file__}]
    assert only_runner(with_http_port(config(runner={"models": models, "http_port": 1}), 8081)).http_port == 8081


def test_port_for_several_runners_is_refused_with_a_remedy() -> None:
    runners = [{"name": name, "models": [{"name": f"m-{name}", "path": __file__}]} for name in "ab"]
    with pytest.raises(FieldError, match="--runner-http-port: is for one runner; say `http_port` for each"):
        with_http_port(parse_config({"runners": runners}), 8081)


def test_mesh_applies_only_model_folders_and_reports_every_invalid_variable(tmp_path: Path) -> None:
    (tmp_path / "qwen.gguf").touch()
    found = parse_config(with_model_folders(document(), {"MODEL_BASE_PATH": str(tmp_path), "MAX_QUEUE_DEPTH": "1"}))
    assert only_runner(found).models[0].path == tmp_path / "qwen.gguf"
    assert found.router.queue_depth_per_runner == 16
    with pytest.raises(FieldError, match="CUDA_VISIBLE_DEVICES"):
        with_model_folders(document(), {"CUDA_VISIBLE_DEVICES": "GPU-1"})
