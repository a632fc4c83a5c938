"""Names of a configuration that a listed model of a server does not get: it has its server's name before it."""

from weft_app.compose.runner import names_taken_by
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_section


def test_listed_models_take_no_name_of_runners_models_agents_and_aliases_nor_auto() -> None:
    aliases = [{"name": "chat", "target": "m"}, {"name": "claude", "pattern": "claude-opus", "target": "agent/a"}]
    model = {"name": "m", "url": "http://127.0.0.1:1"}
    runner = {"name": "r", "runtime": "openai_http", "models": [model], "agents": [{"name": "a", "model": "m"}]}
    config = parse_section(WeftConfig, {"registry": {"aliases": aliases}, "runners": [runner]})
    assert {*names_taken_by(config)} == {"auto", "chat", "claude-opus", "r", "m", "a"}
