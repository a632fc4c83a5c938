"""docs/configuration.md, made from the configuration model by `python -m weft_app.config.config_reference`."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from runner_svc.runtimes.settings import ModelSettings, SleepSettings, WakeSettings
from runner_svc.runtimes.table import built_in
from weft_app.config.config import CONFIG_NAME, WeftConfig

_INTRODUCTION = f"""# Configuration

`{CONFIG_NAME}` in the working directory, or the file named with `--config`. `weft.local.yaml` beside it is merged over
it: mappings key by key, lists of named things (runners, models, agents) name by name, other lists replaced. The command
line wins over both. A name that is not in these tables is refused.

```yaml
# weft.local.yaml: one model of one runner has its file elsewhere on this machine; all else is as weft.yaml says.
runners:
  - name: left
    models:
      - {{name: qwen-a, path: /data/qwen3-8b-q4.gguf}}
```

This page is made by `python -m weft_app.config.config_reference`; a test compares the two.
"""

_HEADING = ("| name | default | meaning |", "|---|---|---|")


def render() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *_section("", WeftConfig)])


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    """The table of the section at `path`, then those of the sections inside it."""
    yield f"## `{path}`\n" if path else "## The file\n"
    yield from _HEADING
    inner: list[tuple[str, type]] = []
    for name, field in model.model_fields.items():
        inner += [(name, nested) for nested in _nested(field.annotation)]
        default = "required" if field.default is PydanticUndefined else _default(field.default)
        yield f"| `{name}` | {default} | {(field.description or '').replace(chr(10), ' ')} |"
    yield ""
    for name, nested in inner:
        where = f"{path}.{name}" if path else name
        if issubclass(nested, BaseModel):
            yield from _section(where, nested)
    if "models" in model.model_fields:
        yield from _models(f"{path}.models")


def _models(path: str) -> Iterator[str]:
    """The table of what all models have, one for each runtime with what is its own, and those of sleep and wake."""
    common = {field.name for field in dataclasses.fields(ModelSettings)}
    yield f"## `{path}`\n"
    yield "What a model may have with every runtime.\n"
    yield from _table(ModelSettings, common)
    for runtime in built_in():
        own = {field.name for field in dataclasses.fields(runtime.settings)} - common
        yield f"## `{path}` with `runtime: {runtime.name}`\n"
        yield f"{runtime.summary[0].upper()}{runtime.summary[1:]}: [{runtime.docs}]({_link(runtime.docs)}).\n"
        yield from _table(runtime.settings, own | _restated(runtime.settings))
    for name, section in (("wake", WakeSettings), ("sleep", SleepSettings)):
        yield f"## `{path}.{name}`\n"
        yield from _table(section, {field.name for field in dataclasses.fields(section)})


def _restated(settings: type[Any]) -> set[str]:
    """The names that a runtime declares again, with a meaning or default of its own."""
    return set(settings.__annotations__)


def _link(docs: str) -> str:
    return docs.removeprefix("docs/")


def _table(section: type[Any], names: set[str]) -> Iterator[str]:
    yield from _HEADING
    described = _descriptions(section)
    for field in dataclasses.fields(section):
        if field.name in names:
            given = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = "required" if given is dataclasses.MISSING else _default(given)
            yield f"| `{field.name}` | {default} | {described.get(field.name, '')} |"
    yield ""


def _descriptions(section: type[Any]) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and its bases, by field."""
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in section.__mro__ if dataclasses.is_dataclass(kind)]):
        (tree,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _nested(annotation: Any) -> list[type]:
    """The sections an annotation holds, also inside a tuple, a union or an optional."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        is_section = issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)
        return [annotation] if is_section else []
    return [found for part in get_args(annotation) for found in _nested(part)]


def _default(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "see below"
    return "-" if value in (None, (), {}) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(render())
