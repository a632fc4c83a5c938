"""What the configuration says of a model's skills reaches the mesh."""

import pytest

from runner_svc.settings import RunnerSettings
from weft.kernel.errors import FieldError
from weft.kernel.request import Skill
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner


def section(runtime: str = "llama_server", **fields: object) -> RunnerSettings:
    place = {"path": "m.gguf"} if runtime.startswith("llama") else {"url": "http://127.0.0.1:1/v1"}
    model = {"name": "m", **place, **fields}
    return parse_section(ConfiguredRunner, {"name": "r", "runtime": runtime, "command": ["server"], "models": [model]})


def found(runner: RunnerSettings) -> frozenset[Skill]:
    return served_model(runner, runner.models[0], 5.0).skills


def test_what_is_not_said_is_not_known() -> None:
    assert found(section()) == frozenset()
    assert found(section(category="vision")) == frozenset()


def test_a_server_with_a_projector_takes_images() -> None:
    seeing = {Skill.TEXT, Skill.IMAGE, Skill.TOOLS}
    assert found(section(extra_arguments=("--mmproj", "eyes.gguf"))) == seeing
    assert found(section(extra_arguments=("--mmproj=eyes.gguf",))) == seeing
    # The other engine does not know the argument.
    assert found(section("llama_cpp_python", extra_arguments=("--mmproj", "eyes.gguf"))) == frozenset()


def test_what_is_said_wins() -> None:
    said = section(skills=("text", "audio"), extra_arguments=("--mmproj", "ears.gguf"))
    assert found(said) == {Skill.TEXT, Skill.AUDIO}
    assert found(section("openai_http", skills=("text", "image", "audio", "tools"))) == frozenset(Skill)


def test_a_skill_that_nobody_knows_is_refused() -> None:
    with pytest.raises(FieldError, match="skills"):
        section(skills=("telepathy",))
