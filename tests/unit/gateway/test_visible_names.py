"""Which names the error for an unknown name tells its caller."""

from types import MappingProxyType

import pytest

from gateway.visible_names import with_visible_names
from weft.dispatch.fleet import FleetView, expected_model
from weft.kernel.principal import LOCAL
from weft.kernel.unknown_names import MODEL, SECRET, unknown_name

VIEW = FleetView(1, models=MappingProxyType({"qwen": expected_model("qwen", "", "titan")}))


@pytest.mark.parametrize("kind", ["alias", SECRET, "tenant"])
def test_error_for_a_non_requestable_kind_lists_no_models(kind: str) -> None:
    error = with_visible_names(unknown_name(kind, "nobody"), VIEW, LOCAL)
    assert "qwen" not in error.message
    assert "models" not in error.message


def test_error_for_a_model_lists_the_models() -> None:
    assert (
        with_visible_names(unknown_name(MODEL, "nobody"), VIEW, LOCAL).message
        == "there is no model nobody; there is qwen"
    )
