"""Aliases: which name a request means."""

import pytest

from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.api.router.v1.task_pb2 import TaskSpec
from weft.dispatch.aliases import AskedName, asked_name, exact_aliases, name_asked_model
from weft.dispatch.fleet import FleetView, expected_model
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.names import MAX_NAME_CHARS, check_alias


def mesh(*aliases: tuple[str, str] | tuple[str, str, str]) -> FleetView:
    """A mesh with the models `qwen` of the pool `big`, and `solo`, and with these patterns and targets."""
    models = {name: expected_model(name, pool, "box") for name, pool in (("qwen", "big"), ("solo", "solo"))}
    known = {}
    for number, (pattern, target, *tenant) in enumerate(aliases):
        manifest = AliasManifest(name=f"a{number}", pattern=pattern, target=target, tenant="".join(tenant))
        known[manifest.name] = Alias(manifest=manifest)
    return FleetView(revision=1, models=models, aliases=known)


def meant(view: FleetView, name: str, tenant: str = "anyone") -> str:
    return asked_name(view, name, tenant).model


def test_alias_resolves_to_its_target_and_keeps_the_requested_name() -> None:
    view = mesh(("claude-*", "route/coding"))
    assert asked_name(view, "claude-opus-4", "t") == AskedName("route/coding", "claude-opus-4")
    assert asked_name(view, "gpt-4o", "t") == AskedName("gpt-4o")


@pytest.mark.parametrize("name", ["qwen", "big", "auto", "agent/coder", "route/coding", "model-" + "0" * 24])
def test_mesh_names_take_precedence_over_aliases(name: str) -> None:
    assert asked_name(mesh(("*", "solo"), (name, "solo")), name, "t") == AskedName(name)


def test_model_named_in_any_script_takes_precedence_over_an_alias() -> None:
    view = mesh(("*", "solo"))
    name = "xn--ber-goa/tiny"
    named = FleetView(1, models={**view.models, name: expected_model(name, name, "box")}, aliases=view.aliases)
    assert asked_name(named, "\u00fcber/tiny", "t") == asked_name(named, name, "t") == AskedName(name)
    assert asked_name(named, "\u00fcber/large", "t") == AskedName("solo", "xn--ber-goa/large")


def test_exact_alias_takes_precedence_over_patterns_and_longer_patterns_come_first() -> None:
    view = mesh(("*", "one"), ("claude-*", "two"), ("claude-opus-*", "three"), ("claude-opus-4", "four"))
    assert [meant(view, name) for name in ("gpt", "claude-x", "claude-opus-3", "claude-opus-4")] == [
        "one", "two", "three", "four",
    ]  # fmt: skip


def test_tenant_alias_takes_precedence_over_a_global_one() -> None:
    view = mesh(("claude-opus-4", "mesh"), ("claude-*", "own", "a"))
    assert (meant(view, "claude-opus-4", "a"), meant(view, "claude-opus-4", "b")) == ("own", "mesh")


def test_alias_does_not_resolve_to_another_alias() -> None:
    """A circle that the configuration could hold ends at its first step."""
    view = mesh(("ping", "pong"), ("pong", "ping"))
    assert asked_name(view, "ping", "t") == AskedName("pong", "ping")


def test_only_exact_aliases_of_the_tenant_that_are_not_mesh_names_are_listed() -> None:
    view = mesh(
        ("gpt-4o", "solo"), ("claude-*", "solo"), ("qwen", "solo"), ("own", "solo", "a"), ("gpt-4o", "big", "a")
    )
    assert exact_aliases(view, "b") == [AskedName("solo", "gpt-4o")]
    assert exact_aliases(view, "a") == [AskedName("big", "gpt-4o"), AskedName("solo", "own")]


def test_task_uses_the_target_as_its_model() -> None:
    spec, plain = TaskSpec(model="gpt-4o"), TaskSpec(model="solo")
    for each in (spec, plain):
        name_asked_model(mesh(("gpt-*", "solo")), each, "t")
    assert (spec, plain) == (TaskSpec(model="solo", asked_model="gpt-4o"), TaskSpec(model="solo"))


@pytest.mark.parametrize(
    ("pattern", "target", "tenant", "field"),
    [
        ("claude-*-4", "solo", "", "pattern"),
        ("**", "solo", "", "pattern"),
        ("-x", "solo", "", "pattern"),
        ("x" * (MAX_NAME_CHARS + 1), "solo", "", "pattern"),
        ("auto", "solo", "", "pattern"),
        ("agent/x", "solo", "", "pattern"),
        ("route/*", "solo", "", "pattern"),
        ("model-" + "0" * 24, "solo", "", "pattern"),
        ("x", "", "", "target"),
        ("x", "agent/", "", "target"),
        ("x", "agent/org/model", "", "target"),
        ("x", "x", "", "target"),
        ("x", "solo", "a b", "tenant"),
    ],
)
def test_invalid_alias_error_names_its_field(pattern: str, target: str, tenant: str, field: str) -> None:
    with pytest.raises(FieldError) as found:
        check_alias("name", pattern, target, tenant, "alias")
    assert found.value.field == f"alias.{field}"


@pytest.mark.parametrize("pattern", ["*", "claude-*", "openai/gpt-4o", "anthropic/*", "x" * MAX_NAME_CHARS, ""])
def test_names_of_other_services_can_be_aliases(pattern: str) -> None:
    check_alias("name", pattern, "route/coding", "team/a")
