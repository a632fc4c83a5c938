"""docs/configuration.md and the JSON schema of weft.yaml, made from the settings tree.

`python -m weft_app.config.reference docs` writes both; a test compares them.
"""

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import ModelSettings, SleepSettings, StartedModelSettings, WakeSettings
from runner_svc.runtimes.table import DEFAULT_RUNTIME, built_in, built_in_names
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.loader import LOCAL_SETTINGS_VARIABLE, SETTINGS_VARIABLE
from weft_app.config.runners import MAX_MODELS, AnyModel
from weft_app.config.settings_tree import REQUIRED, Setting, descriptions_of, is_section, plain_value, settings_of

SCHEMA_NAME = "config.schema.json"
_REFERENCE = "#/$defs/{model}"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTRODUCTION = f"""# Configuration

`{CONFIG_NAME}` in the working directory, or the file named with `--config`. `weft.local.yaml` beside it is merged over
it: mappings key by key, lists of named things (runners, models, agents) name by name, other lists replaced. The command
line wins over both. A name that is not in these tables is refused, and so is one that a mapping has twice. Names may be
written in lowerCamelCase as well, as [resources](resources.md) write them (`contextTokens`); they are shown in
snake_case, which alone editors know.

Two environment variables name other files: `{SETTINGS_VARIABLE}` the main one where there is no `--config`,
`{LOCAL_SETTINGS_VARIABLE}` the one that is merged over it, in place of `weft.local.yaml`. A file that is not there is
refused with the name of the variable. Every command heeds them, and `weft doctor` shows which files hold.

```yaml
# weft.local.yaml: one model of one runner has its file elsewhere on this machine; all else is as in weft.yaml.
runners:
  - name: left
    models:
      - {{name: qwen-a, path: /data/qwen3-8b-q4.gguf}}
```

Each section lists first the settings that operators change, then under "Advanced" those whose defaults suit most
meshes. `weft config show --effective` shows for every value where it comes from.

## Editors

`weft config schema` prints the JSON schema of the file, as in [{SCHEMA_NAME}]({SCHEMA_NAME}). Editors with the YAML
language server (VS Code with the extension "YAML" of Red Hat, Neovim, Helix, Emacs, JetBrains) complete names, show
these texts, and mark unknown names and values out of range while you write; the settings of a model are those of the
`runtime` of its runner. Write the schema beside the file, again after each update of weft:

```bash
weft config schema > {SCHEMA_NAME}
```

and name it in the first line of `{CONFIG_NAME}`:

```yaml
# yaml-language-server: $schema={SCHEMA_NAME}
```

or, for all such files, in the settings of VS Code:

```json
{{"yaml.schemas": {{"./{SCHEMA_NAME}": "{CONFIG_NAME}"}}}}
```

`weft.local.yaml` holds parts of runners only, so the schema marks what they lack. What the schema cannot say is checked
at the start and by `weft doctor`: unique names, files that exist, settings that need each other.

This page is made by `python -m weft_app.config.reference`; a test compares the two.
"""


def render() -> str:
    """Returns the page."""
    return "\n".join([_INTRODUCTION, *_section("", WeftConfig)])


def _section(path: str, kind: type) -> Iterator[str]:
    """Yields the tables of the section at `path`, then those of the sections inside it."""
    yield f"## `{path}`\n" if path else "## The file\n"
    yield from _tables(list(_described(kind)))
    for setting in settings_of(kind):
        where = f"{path}.{setting.name}" if path else setting.name
        if setting.sections and issubclass(setting.sections[0], ModelSettings):
            yield from _models(where)
        else:
            for section in setting.sections:
                yield from _section(where, section)


def _models(path: str) -> Iterator[str]:
    """Yields the tables of the settings of all models, of each runtime's own settings, and of sleep and wake."""
    yield f"## `{path}`\n"
    yield "What a model may have with every runtime.\n"
    yield from _tables(list(_described(ModelSettings)))
    yield f"## `{path}` whose engine weft starts\n"
    starters = [runtime.name for runtime in built_in() if issubclass(runtime.settings, StartedModelSettings)]
    yield f"With the runtimes {', '.join(f'`{name}`' for name in starters)}, where their own tables do not differ.\n"
    yield from _tables(_of_class(StartedModelSettings, ModelSettings))
    for runtime in built_in():
        yield f"## `{path}` with `runtime: {runtime.name}`\n"
        summary, page = runtime.summary[0].upper() + runtime.summary[1:], runtime.docs.removeprefix("docs/")
        yield f"{summary}: [{runtime.docs}]({page}).\n"
        shared = StartedModelSettings if issubclass(runtime.settings, StartedModelSettings) else ModelSettings
        yield from _tables(_of_class(runtime.settings, shared))
    for name, section in (("wake", WakeSettings), ("sleep", SleepSettings)):
        yield f"## `{path}.{name}`\n"
        yield from _tables(list(_described(section)))


def _of_class(kind: type, shared: type) -> list[tuple[Setting, str]]:
    """Returns the settings of `kind` that `shared` lacks, or has with another meaning or default."""
    return [row for row in _described(kind) if _declaring(kind, row[0].name) not in shared.__mro__]


def _declaring(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in inspect.get_annotations(each))


def _tables(rows: list[tuple[Setting, str]]) -> Iterator[str]:
    """Yields a table of public settings and inner sections, and one of advanced settings."""
    advanced = [row for row in rows if not row[0].is_public and not is_section(type(row[0].default))]
    yield from _table([row for row in rows if row not in advanced])
    if advanced:
        yield "Advanced:\n"
        yield from _table(advanced)


def _described(kind: type) -> Iterator[tuple[Setting, str]]:
    texts = descriptions_of(kind)
    for setting in settings_of(kind):
        yield setting, texts.get(setting.name, "")


def _table(rows: list[tuple[Setting, str]]) -> Iterator[str]:
    if not rows:
        return
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    for setting, text in rows:
        yield f"| `{setting.name}` | {_default(setting)} | {text} |"
    yield ""


def _default(setting: Setting) -> str:
    if setting.default is REQUIRED:
        return "required"
    if is_section(type(setting.default)):
        return "see below"
    value = plain_value(setting.default)
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, list):
        return f"`{', '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def schema() -> dict[str, Any]:
    """Returns the JSON schema of weft.yaml, with the texts of the reference."""
    made = TypeAdapter(WeftConfig).json_schema()
    models = TypeAdapter(tuple[AnyModel, ...], config=ConfigDict(extra="forbid")).json_schema(ref_template=_REFERENCE)
    made["$defs"] |= models["$defs"]
    runner = made["$defs"]["ConfiguredRunner"]
    runner |= _models_by_runtime(runner["properties"])
    runner["required"].remove("models")
    runner["anyOf"] = [{"required": ["models"]}, {"required": ["url"]}]
    texts = {kind.__name__: descriptions_of(kind) for kind in _kinds(WeftConfig)}
    public = {kind.__name__: {s.name for s in settings_of(kind) if s.is_public} for kind in _kinds(WeftConfig)}
    definitions: dict[str, Any] = made.get("$defs", {})
    for name, definition in [("WeftConfig", made), *definitions.items()]:
        definition.pop("title", None)
        for field, entry in definition.get("properties", {}).items():
            entry.pop("title", None)
            text = texts.get(name, {}).get(field)
            if text:
                entry["description"] = text if field in public[name] else f"Advanced. {text}"
    return {"$schema": _DIALECT, "title": CONFIG_NAME, **made}


def _models_by_runtime(properties: dict[str, Any]) -> dict[str, Any]:
    """Ties the models of a runner to its runtime; those of another package's runtime are only known to have names."""
    named = {"type": "object", "required": ["name"]}
    properties["models"] = {"type": "array", "items": named, "minItems": 1, "maxItems": MAX_MODELS}
    properties["runtime"] |= {"anyOf": [{"enum": list(built_in_names())}, {"type": "string"}]}
    return {"properties": properties, "allOf": [_models_of(runtime) for runtime in built_in()]}


def _models_of(runtime: Runtime[Any]) -> dict[str, Any]:
    names = {"enum": [runtime.name, *runtime.other_names]} if runtime.other_names else {"const": runtime.name}
    chosen: dict[str, Any] = {"properties": {"runtime": names}}
    if runtime.name != DEFAULT_RUNTIME:
        chosen["required"] = ["runtime"]
    settings = _REFERENCE.format(model=runtime.settings.__name__)
    return {"if": chosen, "then": {"properties": {"models": {"items": {"$ref": settings}}}}}


def _kinds(root: type) -> list[type]:
    found: list[type] = []
    waiting = [root]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.append(kind)
            waiting += [inner for setting in settings_of(kind) for inner in setting.sections]
    return found


def schema_text() -> str:
    """Returns the JSON schema as a file has it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "configuration.md").write_text(render(), "utf-8")
    (folder / SCHEMA_NAME).write_text(schema_text(), "utf-8")
