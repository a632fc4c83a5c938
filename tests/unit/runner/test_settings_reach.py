"""Settings state what their texts make a runner open, read or run, as fields of messages do."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.runtime_settings import WakeSettings
from runner_svc.runtimes.table import built_in_names, require_runtime
from weft.kernel.models.load_parameters import parameter_reach
from weft.kernel.values.reach import Reach, Reaches


def texts_in(hint: Any, mark: Reaches | None = None) -> Iterator[Reach | type]:
    """Yields the mark of each text in an annotation, the outermost one, and the classes of settings in it."""
    if get_origin(hint) is Annotated:
        mark = mark or next((each for each in hint.__metadata__ if isinstance(each, Reaches)), None)
        yield from texts_in(hint.__origin__, mark)
    elif hint is str or hint is Path:
        yield Reach.UNSPECIFIED if mark is None else mark.reach
    elif isinstance(hint, type) and is_dataclass(hint):
        yield hint
    else:
        for each in get_args(hint):
            yield from texts_in(each, mark)


def reaches_of(settings: type, seen: dict[str, set[Reach]]) -> dict[str, set[Reach]]:
    """Returns the marks of the settings of a class and of those in it, by `Class.setting`."""
    hints = get_type_hints(settings, include_extras=True)
    for field in fields(settings):
        name = f"{settings.__name__}.{field.name}"
        if name in seen:
            continue
        found = list(texts_in(hints[field.name]))
        seen[name] = {each for each in found if isinstance(each, Reach)}
        for each in found:
            if not isinstance(each, Reach):
                reaches_of(each, seen)
    return seen


SETTINGS: dict[str, set[Reach]] = {}
for _settings in (RunnerSettings, WakeSettings, *(require_runtime(name).settings for name in built_in_names())):
    reaches_of(_settings, SETTINGS)


def test_every_text_of_a_runners_settings_states_its_reach() -> None:
    assert len(SETTINGS) > 200
    unmarked = [name for name, found in SETTINGS.items() if Reach.UNSPECIFIED in found]
    assert not unmarked, f"mark with one of weft.kernel.values.reach: {', '.join(unmarked)}"


def test_settings_have_the_reach_of_the_fields_and_parameters_of_their_name() -> None:
    assert SETTINGS["RunnerSettings.api_key_env"] == {parameter_reach("api_key_env")} == {Reach.VARIABLE}
    assert SETTINGS["RunnerSettings.command"] == {Reach.PROGRAM}
    assert SETTINGS["RunnerSettings.url"] == SETTINGS["WakeSettings.url"] == {Reach.ADDRESS}
    assert SETTINGS["WakeSettings.argv"] == {Reach.PROGRAM}
    assert SETTINGS["WakeSettings.headers"] == {Reach.TEMPLATE}
    assert SETTINGS["WakeSettings.broadcast_address"] == {Reach.PACKET}
    assert SETTINGS["AgentSettings.tools"] == {Reach.TOOL}
    assert SETTINGS["LlamaServerModel.path"] == {Reach.FILE}
