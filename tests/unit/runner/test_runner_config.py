"""From a configuration section to a runner: engines, recipes, agents, and their report."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.runtime_plugin import forget_extensions, install

from runner_svc.policy.engine_health import engine_health
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.memory_estimate import GIBIBYTE
from runner_svc.policy.replacement import must_drain_first, replacement_words
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from runner_svc.runtimes.openai_remote.list_price import list_price
from runner_svc.session.report import RunnerReport
from weft.api.registry.v1 import model_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation, Skill
from weft.kernel.services.health import HealthState
from weft_app.compose.home import WeftHome
from weft_app.compose.runner import runner_config
from weft_app.config.config import AcceleratorSettings
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner, with_engines

URL = "http://gpu-box.lan:8000/v1"
WAKE_URL = "http://controller.lan:9090/wake"
HTTP_WAKE = {"type": "http", "url": WAKE_URL, "headers": {"Authorization": "Bearer secret-token"}}
WAKE_ON_LAN = {"type": "wake_on_lan", "by": "mesh", "mac_address": "00:11:22:33:44:55", "max_wait_seconds": 90.0}


def _section(**fields: Any) -> RunnerSettings:
    model = {"name": "m1", "url": URL, **fields.pop("model", {})}
    return parse_section(ConfiguredRunner, {"name": "r1", "runtime": "openai_http", "models": [model], **fields})


def _supervised(**fields: Any) -> RunnerSettings:
    model = {"name": "m1", "path": "/models/m.gguf", **fields.pop("model", {})}
    return parse_section(ConfiguredRunner, {"name": "r1", "command": ["server"], "models": [model], **fields})


def _config(section: RunnerSettings, tmp_path: Path, **keywords: Any) -> RunnerConfig:
    return runner_config(section, WeftHome(tmp_path), address="unix:/r", registry_address="unix:/g", **keywords)


def _report(config: RunnerConfig) -> RunnerReport:
    return RunnerReport(config, "life-1", [])


def _manifest(section: RunnerSettings, tmp_path: Path) -> model_pb2.ModelManifest:
    return _report(_config(section, tmp_path)).manifests()[0]


def test_labels_of_a_runner_are_reported(tmp_path: Path) -> None:
    config = _config(_section(labels={"zone": "office"}), tmp_path)
    assert dict(_report(config).capability().labels) == {"zone": "office"}
    with pytest.raises(FieldError, match="labels"):
        _section(labels={"two words": "x"})


def test_runner_wake_recipe_is_not_published(tmp_path: Path) -> None:
    section = _section(model={"wake": HTTP_WAKE, "api_key_env": "UPSTREAM_KEY", "remote": True, "pool": "p"})
    manifest = _manifest(section, tmp_path)
    assert manifest.wake.by_runner
    assert not manifest.wake.HasField("by_mesh")
    assert manifest.wake.max_wait.seconds == 60
    assert (manifest.remote, manifest.pool_name) == (True, "p")
    config = _config(section, tmp_path)
    for text in (str(manifest), repr(config)):
        assert "controller" not in text
        assert "secret-token" not in text


def test_mesh_wake_recipe_is_published_and_not_run_by_the_runner(tmp_path: Path) -> None:
    section = _section(model={"wake": WAKE_ON_LAN})
    wake = _manifest(section, tmp_path).wake
    assert not wake.by_runner
    assert wake.by_mesh.wake_on_lan.mac_address == "00:11:22:33:44:55"
    assert wake.max_wait.seconds == 90
    hibernation = _config(section, tmp_path).models[0].hibernation
    assert hibernation.recipe is None
    assert hibernation.woken_by_mesh


def test_idle_time_and_sleep_action_are_those_of_the_section(tmp_path: Path) -> None:
    action = {"type": "http", "after_seconds": 1.5, "url": "http://h/sleep", "max_wait_seconds": 7.0}
    sleep = _config(_section(model={"wake": HTTP_WAKE, "sleep": action}), tmp_path).models[0].hibernation.sleep
    assert sleep is not None
    assert (sleep.after_seconds, sleep.max_wait_seconds) == (1.5, 7.0)
    assert sleep.action is not None
    assert sleep.action.http.url == "http://h/sleep"
    unloaded = _config(_supervised(model={"sleep": {"after_seconds": 0.5}}), tmp_path).models[0].hibernation.sleep
    assert unloaded is not None
    assert (unloaded.after_seconds, unloaded.action) == (0.5, None)


def test_non_wakeable_server_publishes_no_wake(tmp_path: Path) -> None:
    assert not _manifest(_section(), tmp_path).HasField("wake")


def test_managed_engine_is_always_wakeable_by_its_runner(tmp_path: Path) -> None:
    wake = _manifest(_supervised(load_stall_seconds=240.0), tmp_path).wake
    assert wake.by_runner
    assert wake.max_wait.seconds == 240


@pytest.mark.parametrize(("memory_wait", "told"), [(30.0, 270), (3600.0, 3600)])
def test_router_wake_timeout_exceeds_the_runners_memory_timeout(memory_wait: float, told: int, tmp_path: Path) -> None:
    section = _supervised(load_stall_seconds=240.0, memory_wait_seconds=memory_wait)
    booked = _report(_config(section, tmp_path, accelerators=AcceleratorSettings()))
    assert booked.manifests()[0].wake.max_wait.seconds == told
    with_recipe = _supervised(model={"wake": HTTP_WAKE}, memory_wait_seconds=memory_wait)
    as_set = _report(_config(with_recipe, tmp_path, accelerators=AcceleratorSettings()))
    assert as_set.manifests()[0].wake.max_wait.seconds == 60


@pytest.mark.parametrize(
    ("url", "base"),
    [(URL, "http://gpu-box.lan:8000"), ("http://h/v1/", "http://h"), ("https://h/api", "https://h/api")],
)
def test_base_url_may_end_with_v1_or_not(url: str, base: str) -> None:
    assert AttachedServer(*engine_settings(OpenAiHttpModel, url=url, upstream_model="m")).base_url == base


def test_attached_model_gets_a_backend_that_starts_no_process(tmp_path: Path) -> None:
    assert isinstance(_config(_section(), tmp_path).models[0].make_backend(), AttachedServer)


def test_unpublished_models_are_not_served(tmp_path: Path) -> None:
    models = [
        {"name": "open", "url": URL},
        {"name": "shared", "url": URL, "publish": True},
        {"name": "private", "url": URL, "publish": False},
    ]
    section = _section(models=models)
    assert [model.name for model in _config(section, tmp_path).models] == ["open", "shared"]
    only_true = _config(section, tmp_path, published=("shared",))
    assert [model.name for model in only_true.models] == ["shared"]
    with fails(field="runners.r1.models"):
        _config(section, tmp_path, published=())


def test_agents_are_published_with_their_models(tmp_path: Path) -> None:
    agent = {
        "name": "coder",
        "model": "m1",
        "description": "writes code",
        "system_prompt": "Be terse.",
        "default_params": {"temperature": 0.2, "max_tokens": 512, "stop": ["END"], "logit_bias": {"7": -1.5}},
        "forced_params": {"thinking": False, "reasoning_effort": "low"},
        "removed_params": ["seed"],
    }
    pool_agent = {"name": "any", "pool": "p"}
    coder, anyone = _report(_config(_section(agents=[agent, pool_agent]), tmp_path)).agents()
    assert (coder.name, coder.model, coder.system_prompt) == ("coder", "m1", "Be terse.")
    assert coder.default_params.temperature == 0.2
    assert list(coder.default_params.stop) == ["END"]
    assert dict(coder.default_params.logit_bias) == {7: -1.5}
    assert not coder.default_params.HasField("top_p")
    assert (coder.forced_params.thinking, coder.forced_params.reasoning_effort) == (False, "low")
    assert list(coder.removed_params) == ["seed"]
    assert anyone.WhichOneof("target") == "pool"


def test_unknown_removed_parameter_of_an_agent_is_refused(tmp_path: Path) -> None:
    agents = [{"name": "a", "model": "m1", "removed_params": ["temprature"]}]
    with fails(field="runners.r1.agents[0].removed_params[0]"):
        _config(_section(agents=agents), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temprature", 0.2),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", "NaN"),
        ("top_p", float("nan")),
        ("max_tokens", 1.5),
        ("max_tokens", 2**40),
        ("stop", "END"),
        ("stop", [1]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1": float("inf")}),
    ],
)
def test_invalid_default_parameter_error_names_it(name: str, value: Any, tmp_path: Path) -> None:
    agents = [{"name": "a", "model": "m1"}, {"name": "b", "model": "m1", "default_params": {name: value}}]
    with fails(field=f"runners.r1.agents[1].default_params.{name}"):
        _config(_section(agents=agents), tmp_path)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"url": "ftp://h/v1"}, "url"),
        ({"url": "http://user:pw@h/v1"}, "url"),
        ({"url": "http://h/v1?key=1"}, "url"),
        ({"wake": {**WAKE_ON_LAN, "mac_address": "00:11"}}, "wake.mac_address"),
        ({"wake": {**WAKE_ON_LAN, "broadcast_address": "everybody"}}, "wake.broadcast_address"),
        ({"wake": {"type": "http", "url": "controller.lan/wake"}}, "wake.url"),
        ({"wake": {"type": "command", "argv": [""]}}, "wake.argv"),
        ({"wake": {"type": "command", "argv": ["x", "y" * 5000]}}, "wake.argv[1]"),
        ({"sleep": {"type": "http", "after_seconds": 1.0, "url": "http://h/sleep"}}, "sleep"),
        ({"wake": HTTP_WAKE, "sleep": {"type": "http", "after_seconds": 1.0, "url": "nowhere"}}, "sleep.url"),
    ],
)
def test_invalid_model_field_error_names_it_without_its_value(
    model: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with fails(field=f"runners.r1.models.m1.{field}") as refused:
        _config(_section(model=model), tmp_path)
    assert "://" not in refused.value.message


def test_attached_server_cannot_start_hibernating() -> None:
    with pytest.raises(FieldError, match=r"models.0.start_asleep: .*give it a wake recipe instead"):
        _section(model={"start_asleep": True})


def test_request_limit_is_reported(tmp_path: Path) -> None:
    config = _config(_section(max_requests=3), tmp_path)
    assert _report(config).capability().max_requests == 3


def test_known_model_capabilities_are_reported(tmp_path: Path) -> None:
    assert list(_manifest(_section(), tmp_path).skills) == []
    said = _manifest(_section(model={"skills": ["tools", "text"]}), tmp_path)
    assert list(said.skills) == [model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_TOOLS]
    seeing = _config(_supervised(model={"extra_arguments": ["--mmproj", "eyes.gguf"]}), tmp_path)
    assert Skill.IMAGE in seeing.models[0].capabilities.skills


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        ({}, ""),
        ({"a": Phase.READY}, ""),
        ({"a": Phase.HIBERNATING}, ""),
        ({"a": Phase.READY, "b": Phase.LOADING}, ""),
        ({"a": Phase.LOADING}, "no_engine_ready"),
        ({"a": Phase.CRASH_LOOP, "b": Phase.FAILED}, "no_engine_ready"),
        ({"a": Phase.READY, "b": Phase.FAILED}, "engine_failed"),
    ],
)
def test_runner_without_a_ready_or_hibernating_engine_is_degraded(phases: dict[str, Phase], reason: str) -> None:
    seen = engine_health(phases)
    assert seen.reason == reason
    assert seen.state is (HealthState.DEGRADED if reason else HealthState.OK)


def test_health_reason_lists_at_most_five_models() -> None:
    phases = {f"m{number}": Phase.FAILED for number in range(8)}
    assert engine_health(phases).message == "no engine runs: m0, m1, m2, m3, m4 and 3 more failed"


def test_price_of_a_listed_model_is_found_by_the_url_of_its_provider() -> None:
    price = list_price("https://api.openai.com/v1", "gpt-4o-mini")
    assert price is not None
    assert (price.prompt_dollars, price.completion_dollars) == (0.15, 0.6)
    assert 0 < price.cached_prompt_dollars < price.prompt_dollars


@pytest.mark.parametrize(
    ("url", "model"), [("https://example.com/v1", "gpt-4o-mini"), ("https://api.openai.com/v1", "no-such-model")]
)
def test_unlisted_model_has_no_price(url: str, model: str) -> None:
    assert list_price(url, model) is None


def test_prices_are_not_imported_for_a_server_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    assert list_price("http://127.0.0.1:8000/v1", "gpt-4o-mini") is None


@pytest.mark.parametrize(
    ("is_loaded", "needed", "free", "drains_first"),
    [
        (True, 5, 6, False),
        (True, 5, 5, False),
        (True, 5, 4, True),
        (True, 5, 0, True),
        (False, 5, 4, False),  # the old one sleeps: there is nothing to end first
        (True, None, 4, False),
        (True, 5, None, False),
        (True, 0, 0, False),
    ],
)
def test_old_instance_ends_first_if_both_do_not_fit(
    is_loaded: bool, needed: int | None, free: int | None, drains_first: bool
) -> None:
    assert must_drain_first(is_loaded=is_loaded, needed_bytes=needed, free_bytes=free) is drains_first


def test_replacement_order_is_reported_with_its_reason() -> None:
    assert replacement_words("m", drains_first=False, needed_bytes=None, free_bytes=None) == (
        "m is loaded beside the old one, which ends with its last request"
    )
    assert replacement_words("m", drains_first=True, needed_bytes=5 * GIBIBYTE, free_bytes=2 * GIBIBYTE) == (
        "m is loaded once the old one has ended with its last request: it needs 5 GiB, and 2 GiB are free"
    )


@pytest.fixture
def ngram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunnerSettings]:
    """A runner of the runtime of an installed extension."""
    for path in install(tmp_path / "site"):
        monkeypatch.syspath_prepend(path)
    forget_extensions()
    yield parse_section(
        ConfiguredRunner, {"name": "r1", "runtime": "ngram", "models": [{"name": "m1", "text": __file__}]}
    )
    forget_extensions()


async def test_models_of_a_disabled_extension_fail_to_load_and_their_engine_is_not_imported(
    ngram: RunnerSettings, tmp_path: Path
) -> None:
    sys.modules.pop("weft_ngram.backend", None)
    (model,) = _config(ngram, tmp_path, disabled=["ngram"]).models
    off = "runners.r1.models.m1: the runtime ngram belongs to the extension ngram, which is off"
    assert model.lack is not None
    assert model.lack.message.startswith(off)
    assert model.operations == frozenset(Operation)
    with fails(Reason.CONNECT_FAILED, match=off):
        await model.make_backend().start()
    assert "weft_ngram.backend" not in sys.modules
    assert with_engines([ngram], ["ngram"]) == []


def test_engine_of_an_enabled_extension_is_built(ngram: RunnerSettings, tmp_path: Path) -> None:
    (model,) = _config(ngram, tmp_path).models
    assert model.lack is None
    assert with_engines([ngram], []) == [ngram]
