"""How long a model stays loaded, as `weft ps` and `weft describe` show it."""

from weft_app.cli.ps import until_text

READY = {"phase": "ready", "pinned": False}


def test_a_model_that_works_is_shown_with_its_keep_alive_and_never_only_without_one() -> None:
    assert until_text(READY | {"keepAliveSeconds": 2.0}) == "2.0s when idle"
    assert until_text(READY) == "never"
