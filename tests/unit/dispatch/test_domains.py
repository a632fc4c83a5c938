"""Scheduling domains: which pools belong together, and which router owns them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.api.registry.v1 import route_pb2
from weft.dispatch.domains import DomainOwners, Domains, owner_of
from weft.dispatch.fleet import FleetView, ModelView, RouterView, RunnerView, expected_model


def a_model(name: str, runner: str, *, pool: str = "", remote: bool = False) -> ModelView:
    return replace(expected_model(name, pool, runner), remote=remote, expected=False)


def a_runner(name: str, host: str) -> RunnerView:
    return RunnerView(
        name=name,
        incarnation="1",
        address="unix:/nowhere",
        host=host,
        runtime="fake",
        active=True,
        draining=False,
        ticket_key=b"",
        instances={},
    )


def a_route(name: str, *candidates: str) -> route_pb2.Route:
    return route_pb2.Route(manifest=route_pb2.RouteManifest(name=name, candidates=candidates))


def a_mesh(*models: ModelView, hosts: dict[str, str], routes: tuple[route_pb2.Route, ...] = ()) -> FleetView:
    return FleetView(
        1,
        {name: a_runner(name, host) for name, host in hosts.items()},
        {model.name: model for model in models},
        routes={route.manifest.name: route for route in routes},
    )


def a_router(name: str, *, draining: bool = False) -> RouterView:
    return RouterView(name=name, incarnation="1", address=f"unix:/{name}", draining=draining)


def routers(*names: str) -> dict[str, RouterView]:
    return {name: a_router(name) for name in names}


def test_pools_on_different_hosts_are_domains_of_their_own() -> None:
    domains = Domains(a_mesh(a_model("a", "r1"), a_model("b", "r2"), hosts={"r1": "h1", "r2": "h2"}))
    assert domains.keys == {"a", "b"}


def test_pools_with_models_on_one_host_are_one_domain_because_they_share_its_devices() -> None:
    mesh = a_mesh(
        a_model("a", "r1"), a_model("b", "r2"), a_model("c", "r3"), hosts={"r1": "h1", "r2": "h1", "r3": "h3"}
    )
    assert Domains(mesh).key_of("a") == Domains(mesh).key_of("b") == "a"
    assert Domains(mesh).key_of("c") == "c"


def test_a_model_that_runs_elsewhere_shares_no_device_with_the_others_of_its_runner() -> None:
    mesh = a_mesh(a_model("a", "r1", remote=True), a_model("b", "r1", remote=True), hosts={"r1": "h1"})
    assert Domains(mesh).keys == {"a", "b"}


def test_a_route_joins_the_pools_of_its_candidates_and_is_in_their_domain() -> None:
    hosts = {"r1": "h1", "r2": "h2", "r3": "h3"}
    models = (a_model("a", "r1", pool="p"), a_model("b", "r2"), a_model("c", "r3"))
    domains = Domains(a_mesh(*models, hosts=hosts, routes=(a_route("coding", "b", "a"),)))
    assert {domains.key_of(name) for name in ("p", "a", "b", "route/coding")} == {"b"}
    assert domains.keys == {"b", "c"}


def test_a_model_is_in_the_domain_of_its_pool() -> None:
    mesh = a_mesh(a_model("a", "r1", pool="p"), a_model("b", "r2", pool="p"), hosts={"r1": "h1", "r2": "h2"})
    assert Domains(mesh).key_of("a") == Domains(mesh).key_of("b") == Domains(mesh).key_of("p") == "p"


def test_an_unknown_name_is_a_domain_of_its_own_so_that_one_router_refuses_it() -> None:
    assert Domains(FleetView()).key_of("nothing") == "nothing"
    assert Domains(FleetView()).key_of("route/nothing") == "route/nothing"


def test_a_host_that_is_called_like_a_pool_is_not_that_pool() -> None:
    mesh = a_mesh(a_model("a", "r1"), a_model("b", "r2"), hosts={"r1": "b", "r2": "h2"})
    assert Domains(mesh).keys == {"a", "b"}


def test_without_a_router_nothing_has_an_owner() -> None:
    assert owner_of("a", ()) is None
    assert owner_of("a", [a_router("r1", draining=True)]) is None
    assert owner_of("a", [a_router("r1")], {"r1"}) is None


@pytest.mark.parametrize("leaving", ["r1", "r2", "r3"])
def test_a_router_that_leaves_moves_its_own_domains_and_no_other(leaving: str) -> None:
    there = routers("r1", "r2", "r3")
    keys = [f"pool-{number}" for number in range(300)]
    before = {key: owner_of(key, there.values()) for key in keys}
    drained = there | {leaving: a_router(leaving, draining=True)}
    for after in (
        {key: owner_of(key, drained.values()) for key in keys},
        {key: owner_of(key, there.values(), {leaving}) for key in keys},
    ):
        moved = {key for key in keys if after[key] != before[key]}
        assert moved == {key for key in keys if before[key] == there[leaving]}
    share = sum(before[key] == there[leaving] for key in keys) / len(keys)
    assert 0.2 < share < 0.47  # a third, as chance divides 300 keys


@given(st.sets(st.sampled_from([f"r{number}" for number in range(6)]), min_size=1), st.text(max_size=20))
def test_the_owner_does_not_depend_on_the_order_of_the_routers(names: set[str], key: str) -> None:
    there = [a_router(name) for name in sorted(names)]
    assert owner_of(key, there) == owner_of(key, reversed(there))


def test_a_mesh_of_one_router_gives_it_everything() -> None:
    mesh = replace(a_mesh(a_model("a", "r1"), hosts={"r1": "h1"}), routers=routers("only"))
    assert DomainOwners().owner(mesh, "whatever") == a_router("only")


def test_a_heartbeat_computes_no_domains_again_and_a_model_on_another_host_does() -> None:
    mesh = a_mesh(a_model("a", "r1"), a_model("b", "r2"), hosts={"r1": "h1", "r2": "h2"})
    owners = DomainOwners()
    first = owners.of(mesh)
    heartbeat = replace(mesh, runners=dict(mesh.runners))
    assert owners.of(heartbeat) is first
    moved = replace(mesh, runners={**mesh.runners, "r2": a_runner("r2", "h1")})
    assert owners.of(moved).keys == {"a"}
    assert owners.of(replace(moved, models={"a": mesh.models["a"]})).keys == {"a"}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz")), max_size=12), st.data())
def test_whatever_shares_a_route_or_a_host_has_one_owner(placed: list[tuple[str, str]], data: st.DataObject) -> None:
    models = [a_model(f"{pool}{number}", f"on-{host}", pool=pool) for number, (pool, host) in enumerate(placed)]
    hosts = {f"on-{host}": host for host in "xyz"}
    ladders = data.draw(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), max_size=3))
    routes = tuple(a_route(f"route{number}", *ladder) for number, ladder in enumerate(ladders))
    domains = Domains(a_mesh(*models, hosts=hosts, routes=routes))
    for host in "xyz":
        assert len({domains.key_of(pool) for pool, on in placed if on == host}) <= 1
    for number, ladder in enumerate(ladders):
        assert {domains.key_of(pool) for pool in ladder} == {domains.key_of(f"route/route{number}")}


def with_workers(view: FleetView, runner: str, *hosts: str) -> FleetView:
    return replace(view, runners={**view.runners, runner: replace(view.runners[runner], worker_hosts=hosts)})


def test_a_model_over_several_hosts_is_one_domain_with_the_pools_of_each_of_them() -> None:
    models = (a_model("large", "head"), a_model("small", "r2"), a_model("other", "r3"))
    mesh = a_mesh(*models, hosts={"head": "h1", "r2": "h2", "r3": "h3"})
    assert Domains(mesh).keys == {"large", "other", "small"}
    assert Domains(with_workers(mesh, "head", "h2")).keys == {"large", "other"}


def test_two_models_that_share_only_a_worker_host_are_one_domain() -> None:
    mesh = a_mesh(a_model("a", "r1"), a_model("b", "r2"), hosts={"r1": "h1", "r2": "h2"})
    assert Domains(with_workers(with_workers(mesh, "r1", "w"), "r2", "w")).keys == {"a"}


def test_worker_hosts_that_a_runner_reports_later_join_domains() -> None:
    owners, mesh = DomainOwners(), a_mesh(a_model("a", "r1"), a_model("b", "r2"), hosts={"r1": "h1", "r2": "h2"})
    assert owners.of(mesh).keys == {"a", "b"}
    assert owners.of(with_workers(mesh, "r1", "h2")).keys == {"a"}
