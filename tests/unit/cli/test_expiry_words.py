"""Memory of a model and how long it stays loaded, as `weft ps` and `weft top` show them."""

import pytest

from weft_app.cli.ps import memory_bytes, until_text

READY = {"phase": "ready", "pinned": False}


def test_running_model_shows_its_keep_alive_or_never() -> None:
    assert until_text(READY | {"keepAliveSeconds": 2.0}) == "2.0s when idle"
    assert until_text(READY) == "never"


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        ({}, 0),
        ({"residentBytes": 384}, 384),
        ({"leasedBytes": 0, "residentBytes": 384}, 384),
        ({"leasedBytes": 2_000, "residentBytes": 384}, 2_000),
        ({"leasedBytes": 2_000, "measuredBytes": 3_000, "residentBytes": 384}, 3_000),
        ({"leasedBytes": 0, "estimatedBytes": 2_000}, 0),
    ],
)
def test_shown_memory_is_of_accelerators_or_else_resident(memory: dict[str, int], shown: int) -> None:
    assert memory_bytes(memory) == shown
