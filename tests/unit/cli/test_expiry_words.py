"""How long a model stays loaded, as `weft ps` and `weft describe` show it."""

from weft_app.cli.ps import until_text

READY = {"phase": "ready", "pinned": False}


def test_running_model_shows_its_keep_alive_or_never() -> None:
    assert until_text(READY | {"keepAliveSeconds": 2.0}) == "2.0s when idle"
    assert until_text(READY) == "never"
