"""Every setting of weft.yaml with its default and meaning."""

import inspect
from collections.abc import Iterator

from runner_svc.runtimes.runtime_settings import (
    FileModelSettings,
    ModelSettings,
    PathModelSettings,
    SleepSettings,
    StartedModelSettings,
    WakeSettings,
)
from runner_svc.runtimes.table import built_in
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.loader import LOCAL_SETTINGS_VARIABLE, SETTINGS_VARIABLE
from weft_app.config.settings_tree import REQUIRED, Setting, descriptions_of, is_section, plain_value, settings_of

SHARED_SETTINGS = (FileModelSettings, PathModelSettings, StartedModelSettings, ModelSettings)
"""Settings that several runtimes have, the most special ones first; each has a table."""
_INTRODUCTION = f"""# Configuration

weft reads `{CONFIG_NAME}` in the working directory, or the file given with `--config` or `{SETTINGS_VARIABLE}`. It
merges `weft.local.yaml` beside it, or the file in `{LOCAL_SETTINGS_VARIABLE}`, over it: mappings key by key, named
lists (runners, models, agents) name by name; other lists are replaced. The command line overrides both. Unknown and
duplicate keys are errors. Names may also be written in lowerCamelCase (`contextTokens`).

```yaml
# weft.local.yaml: one model of one runner has its file elsewhere on this machine; the rest is as in weft.yaml.
runners:
  - name: left
    models:
      - {{name: qwen-a, path: /data/qwen3-8b-q4.gguf}}
```

Each section lists common settings first, then "Advanced" ones. `weft config show --effective` shows each value and
its source; `weft doctor` checks the files.

## Editors

`weft config schema` prints the JSON schema of the file. Editors with the YAML language server (VS Code with Red Hat's
"YAML" extension, Neovim, Helix, Emacs, JetBrains) complete names, show these texts and mark errors. Write the schema
beside the file after each weft update:

```bash
weft config schema > config.schema.json
```

Then name it in the first line of `{CONFIG_NAME}`:

```yaml
# yaml-language-server: $schema=config.schema.json
```

Or for all such files, in the settings of VS Code:

```json
{{"yaml.schemas": {{"./config.schema.json": "{CONFIG_NAME}"}}}}
```

`weft.local.yaml` holds only parts of runners, so the schema marks what they lack. Unique names, existing files and
settings that need each other are checked when weft starts and by `weft doctor`.
"""


def page() -> str:
    """Returns the page."""
    return "\n".join([_INTRODUCTION, *_section("", WeftConfig, {})])


def _section(path: str, kind: type, shown: dict[type, str]) -> Iterator[str]:
    """Yields the tables of the section at `path`, then those of the sections inside it; a kind in `shown` by name."""
    yield f"## `{path}`\n" if path else "## The file\n"
    if kind in shown:
        yield f"Each has the settings of `{shown[kind]}`.\n"
        return
    shown[kind] = path
    yield from _tables(list(_described(kind)))
    for setting in settings_of(kind):
        where = f"{path}.{setting.name}" if path else setting.name
        if setting.sections and issubclass(setting.sections[0], ModelSettings):
            yield from _models(where)
        else:
            for section in setting.sections:
                yield from _section(where, section, shown)


def _models(path: str) -> Iterator[str]:
    """Yields the tables of the settings of all models, of each runtime's own settings, and of sleep and wake."""
    yield f"## `{path}`\n"
    yield "Settings of a model with every runtime.\n"
    yield from _tables(list(_described(ModelSettings)))
    yield f"## `{path}` whose engine weft starts\n"
    starters = [runtime.name for runtime in built_in() if issubclass(runtime.settings, StartedModelSettings)]
    yield f"With the runtimes {', '.join(f'`{name}`' for name in starters)}, unless their own tables differ.\n"
    yield from _tables(_of_class(StartedModelSettings, ModelSettings))
    yield f"## `{path}` in files\n"
    readers = [runtime.name for runtime in built_in() if issubclass(runtime.settings, PathModelSettings)]
    yield f"With the runtimes {', '.join(f'`{name}`' for name in readers)}, besides the settings above.\n"
    yield from _tables(_of_class(PathModelSettings, StartedModelSettings))
    yield f"## `{path}` that generate text, in files\n"
    readers = [runtime.name for runtime in built_in() if issubclass(runtime.settings, FileModelSettings)]
    yield f"With the runtimes {', '.join(f'`{name}`' for name in readers)}, besides the settings above.\n"
    yield from _tables(_of_class(FileModelSettings, PathModelSettings))
    for runtime in built_in():
        yield f"## `{path}` with `runtime: {runtime.name}`\n"
        summary, docs = runtime.summary[0].upper() + runtime.summary[1:], runtime.docs.removeprefix("docs/")
        yield f"{summary}: [{runtime.docs}](../{docs}).\n"
        shared = next(kind for kind in SHARED_SETTINGS if issubclass(runtime.settings, kind))
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
