"""Documents inside documents: lists of messages, maps of values, and fields that are not spelled as in the message."""

from typing import Any

import pytest

from weft.api.registry.v1.profile_pb2 import ProfileLoadSettings, ProfileLoadValue, ProfileManifest
from weft.api.runner.v1.load_pb2 import LoadOptions, LoadValue
from weft.documents.codec import document_of
from weft.documents.profiles import load_options_of, load_settings_of
from weft.documents.reader import read_message
from weft.kernel.field_rules import RuleError

PROFILE: dict[str, Any] = {
    "name": "day",
    "load": [
        {
            "model": "tiny",
            "settings": {
                "contextTokens": 8192,
                "parameters": {"flash_attention": "on", "gpu_layers": 10, "p_min": 0.5, "cache_prompt": True},
                "memoryBudgetMb": 512,
                "keepAlive": 300,
                "quantization": "q8_0",
                "pin": True,
            },
        }
    ],
    "agents": [{"name": "coder", "model": "tiny"}],
}


def test_message_in_a_list_round_trips() -> None:
    message = read_message(PROFILE, ProfileManifest)
    options = message.load[0].settings
    assert (options.parameters["context_tokens"].integer, options.parameters["gpu_layers"].integer) == (8192, 10)
    assert (options.parameters["p_min"].number, options.parameters["cache_prompt"].flag) == (0.5, True)
    assert options.parameters["flash_attention"].word == "on"
    assert (options.memory_budget_bytes, options.keep_alive.seconds) == (512 * 1024**2, 300)
    assert document_of(read_message(document_of(message), ProfileManifest)) == document_of(message)
    assert document_of(message)["load"] == PROFILE["load"]


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"load": {"model": "tiny"}}, ["load"]),
        ({"load": ["tiny"]}, ["load", 0]),
        ({"load": [{"model": "tiny"}, {}]}, ["load", 1, "model"]),
        (
            {"load": [{"model": "tiny", "settings": {"parameters": {"a": [1]}}}]},
            ["load", 0, "settings", "parameters", "a"],
        ),
        ({"load": [{"model": "tiny", "settings": {"memoryBudgetMb": 0.5}}]}, ["load", 0, "settings", "memoryBudgetMb"]),
        ({"agents": [{"name": "coder", "model": "tiny", "x": 1}]}, ["agents", 0, "x"]),
        ({"agents": [{"name": "a b", "model": "tiny"}]}, ["agents", 0, "name"]),
    ],
)
def test_nested_error_has_its_path(wrong: dict[str, Any], path: list[str | int]) -> None:
    with pytest.raises(RuleError) as caught:
        read_message(PROFILE | wrong, ProfileManifest)
    assert [str(step) for step in caught.value.path] == [str(step) for step in path]


def test_profile_load_settings_match_load_options() -> None:
    pairs = ((ProfileLoadSettings, LoadOptions), (ProfileLoadValue, LoadValue))
    for own, other in pairs:
        facts = [[(field.name, field.number, field.type) for field in kind.DESCRIPTOR.fields] for kind in (own, other)]
        assert facts[0] == facts[1]
    settings = read_message(PROFILE, ProfileManifest).load[0].settings
    assert document_of(load_options_of(settings)) == document_of(settings)
    assert load_settings_of(load_options_of(settings)) == settings
