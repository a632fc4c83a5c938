"""The context of models: what their runners report, before what is declared."""

from types import MappingProxyType

from kit.fleet import model_view, ready, runner_view

from weft.dispatch.fleet import FleetView, context_in


def test_context_that_a_running_server_reports_is_the_models() -> None:
    """`ps` had 200000 and /v1/models 0: an attached model declares none."""
    attached, declared = model_view("a", context_tokens=0), model_view("b", context_tokens=4096)
    instances = MappingProxyType({"a": ready("a", context_tokens=200_000)})
    view = FleetView(runners={"titan": runner_view(instances=instances)}, models={"a": attached, "b": declared})
    assert context_in(view, attached) == 200_000
    assert context_in(view, declared) == 4096
    assert context_in(view, attached, declared) == 4096
    assert context_in(view, model_view("c", context_tokens=0)) == 0
