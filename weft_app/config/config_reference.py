"""docs/configuration.md, made from the configuration model by `python -m weft_app.config.config_reference`."""

import sys
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

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


def render() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *_section("", WeftConfig)])


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    """The table of the section at `path`, then those of the sections inside it."""
    yield f"## `{path}`\n" if path else "## The file\n"
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        nested = _nested(field.annotation)
        if nested is not None:
            inner.append((name, nested))
        yield f"| `{name}` | {_default(field)} | {(field.description or '').replace(chr(10), ' ')} |"
    yield ""
    for name, nested in inner:
        yield from _section(f"{path}.{name}" if path else name, nested)


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The section an annotation holds, also inside a tuple or an optional."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    if get_origin(annotation) in (tuple, UnionType) or get_args(annotation):
        return next((found for part in get_args(annotation) if (found := _nested(part)) is not None), None)
    return None


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "see below"
    return "-" if field.default in (None, (), {}) else f"`{field.default}`"


if __name__ == "__main__":
    sys.stdout.write(render())
