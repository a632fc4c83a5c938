"""What a changed weft.yaml means for a mesh that runs, as a plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.api.operations.v1.configuration_service_pb2 import ConfigurationChange as Change
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config
from weft_app.config.reload_plan import (
    LIVE_SETTINGS,
    ReloadPlan,
    is_live,
    plan_models,
    plan_reload,
)
from weft_app.config.runners import with_replicas
from weft_app.config.settings_tree import names_at


def model(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "path": f"/models/{name}.gguf", **settings}


def runner(name: str, *models: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    return {"name": name, "models": list(models), **settings}


BASE: dict[str, Any] = {
    "runners": [
        runner("box", model("a", slots=2), model("b"), agents=[{"name": "helper", "model": "a"}]),
        runner("other", model("c")),
    ],
    "router": {"rate_limits": {"default": ["50req/min"]}},
}


def plan(before: dict[str, Any], after: dict[str, Any]) -> ReloadPlan:
    old, new = parse_config(before), parse_config(after)
    return plan_reload(old, new, old.runners or (), new.runners or ())


def changed(**sections: Any) -> ReloadPlan:
    return plan(BASE, {**BASE, **sections})


def with_box(*models: Mapping[str, Any], **settings: Any) -> ReloadPlan:
    agents = settings.pop("agents", [{"name": "helper", "model": "a"}])
    return changed(runners=[runner("box", *models, agents=agents, **settings), runner("other", model("c"))])


def _one(found: ReloadPlan) -> Change:
    (change,) = found.changes
    return change


def test_same_configuration_changes_nothing() -> None:
    found = plan(BASE, BASE)
    assert found.changes == ()
    assert (found.stopped, found.started, found.restarted, found.updated) == ((), (), (), ())


def test_changed_model_is_reloaded_and_lists_its_settings() -> None:
    found = with_box(model("a", slots=3), model("b"))
    change = _one(found)
    assert (change.kind, change.name, change.runner) == ("model", "a", "box")
    assert (change.action, change.effect) == (Change.ACTION_CHANGED, Change.EFFECT_MODEL_RELOAD)
    assert [(each.name, each.before, each.after) for each in change.settings] == [("slots", "2", "3")]
    assert found.updated == ("box",)
    assert found.restarted == ()


def test_models_are_added_and_removed_without_a_runner_restart() -> None:
    found = with_box(model("a", slots=2), model("d"))
    assert {(each.name, each.action) for each in found.changes} == {
        ("b", Change.ACTION_REMOVED),
        ("d", Change.ACTION_ADDED),
    }
    assert (found.updated, found.restarted, found.stopped, found.started) == (("box",), (), (), ())


def test_agent_changes_without_a_model_reload() -> None:
    agent = {"name": "helper", "model": "a", "system_prompt": "Be short."}
    found = with_box(model("a", slots=2), model("b"), agents=[agent])
    assert _one(found).effect == Change.EFFECT_LIVE
    assert found.updated == ("box",)


def test_runner_setting_restarts_only_that_runner() -> None:
    found = with_box(model("a", slots=3), model("b"), max_requests=7)
    assert {each.effect for each in found.changes} == {Change.EFFECT_RUNNER_RESTART}
    assert (found.restarted, found.updated) == (("box",), ())


def test_renamed_runner_is_removed_and_added() -> None:
    found = changed(runners=[BASE["runners"][0], runner("new", model("c"))])
    assert (found.stopped, found.started, found.updated) == (("other",), ("new",), ())
    assert {(each.name, each.action) for each in found.changes if each.kind == "model"} == {
        ("c", Change.ACTION_REMOVED),
        ("c", Change.ACTION_ADDED),
    }


def test_rate_limit_change_is_live() -> None:
    found = changed(router={"rate_limits": {"default": ["60req/min"]}})
    change = _one(found)
    assert (change.name, change.effect) == ("router.rate_limits.default", Change.EFFECT_LIVE)
    assert (change.settings[0].before, change.settings[0].after) == ('["50req/min"]', '["60req/min"]')
    assert found.live_settings == ("router.rate_limits.default",)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"port": 9000}, "port"),
        ({"gateway": {"tls": {"certificate_file": "/c.pem"}}}, "gateway.tls.certificate_file"),
        ({"auth": {"required": True}}, "auth.required"),
        ({"registry": {"inactive_after_seconds": 120.0}}, "registry.inactive_after_seconds"),
    ],
)
def test_setting_that_needs_a_restart_is_reported_as_waiting(section: dict[str, Any], path: str) -> None:
    found = changed(**section)
    assert (found.waiting_settings, found.live_settings) == ((path,), ())


def test_secret_is_never_shown_in_a_plan() -> None:
    before = {**BASE, "router": {"database_url": "postgresql://u:first@h/d"}}
    after = {**BASE, "router": {"database_url": "postgresql://u:second@h/d"}}
    assert "first" not in str(plan(before, after))
    assert "second" not in str(plan(before, after))
    wake = {"type": "http", "url": "http://h/?key=third", "headers": {"x": "fourth"}, "max_wait_seconds": 77.0}
    shown = str(with_box(model("a", slots=2, wake=wake), model("b", environment={"TOKEN": "fifth"})))
    assert "77.0" in shown, "what is no secret is shown"
    assert not [secret for secret in ("third", "fourth", "fifth") if secret in shown]


def test_every_live_setting_is_a_setting() -> None:
    """A name that was renamed would make its setting need a restart, and no test would notice."""
    for path in LIVE_SETTINGS:
        *around, name = path.split(".")
        assert name in names_at(WeftConfig, around), path


def test_documentation_lists_every_live_setting() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    assert [path for path in LIVE_SETTINGS if f"`{path}`" not in text] == []


def test_setting_missing_from_the_table_needs_a_restart() -> None:
    assert not is_live("something.new")
    assert not is_live("gateway.tls.key_file")
    assert is_live("gateway.cors.allowed_origins")


def test_changed_replica_count_keeps_the_first_replicas() -> None:
    old, new = (parse_config({"runners": [runner("box", model("a", replicas=n))]}).runners or () for n in (2, 3))
    steps = plan_models(with_replicas(old[0], old[0].models), with_replicas(new[0], new[0].models))
    assert steps == ((), ("a-3",))
    back = plan_models(with_replicas(new[0], new[0].models), with_replicas(old[0], old[0].models))
    assert back == (("a-3",), ())


def test_model_with_the_same_name_and_other_settings_is_detected() -> None:
    """The negative control of the plan's own tests: the comparison is by value, not by name."""
    (old,), (new,) = (parse_config({"runners": [runner("x", model("a", slots=n))]}).runners or () for n in (1, 2))
    assert plan_models(old.models, new.models) == ((), ("a",))
    assert plan_models(old.models, old.models) == ((), ())


def test_runner_following_its_server_is_restarted_if_models_are_configured() -> None:
    url = "http://127.0.0.1:1/v1"
    served = {"name": "box", "runtime": "openai_http", "url": url}
    found = plan({"runners": [served]}, {"runners": [{**served, "models": [{"name": "a", "url": url}]}]})
    assert (found.restarted, found.updated) == (("box",), ())
