"""Fields of declarations have the names that people wrote."""

import pytest

from weft.documents.field_names import declared_field, document_field


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("declarations[2].model.manifest.pool_name", (2, "poolName")),
        ("declarations[0].model.runner", (0, "runner")),
        ("declarations[0].agent.model", (0, "model")),
        ("declarations[11].agent", (11, "")),
        ("declarations[0].agent.system_prompt", (0, "systemPrompt")),
        ("declarations[0].agent.default_params.max_tokens", (0, "defaultParams.max_tokens")),
        ("declarations[1].model.manifest.wake.by_mesh.http.headers", (1, "wake.byMesh.headers")),
        ("declarations[1].model.manifest.wake.by_mesh.wake_on_lan.mac_address", (1, "wake.byMesh.macAddress")),
        ("declarations[0].agent.behaviour.tools[3]", (0, "tools[3]")),
        ("declarations[0].agent.behaviour.max_tool_iterations", (0, "maxToolIterations")),
        ("declarations[0].agent.behaviour.repetition_policy", (0, "repetition")),
        ("declarations[0].route.candidates[3]", (0, "candidates[3]")),
        ("declarations[0].route.budget", (0, "budgetSeconds")),
        ("declarations[0].route.keep_alive", (0, "keepAlive")),
        ("declarations[2].route", (2, "")),
        ("declarations", None),
        ("page_token", None),
    ],
)
def test_declared_field_has_its_document_name(theirs: str, ours: tuple[int, str] | None) -> None:
    assert declared_field(theirs) == ours


def test_other_fields_are_in_camel_case_too() -> None:
    assert document_field("page_token") == "pageToken"
