"""The JSON schema of weft.yaml, generated from the settings tree."""

import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.table import DEFAULT_RUNTIME, built_in, built_in_names
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.runners import MAX_MODELS, AnyModel
from weft_app.config.settings_tree import descriptions_of, settings_of

_REFERENCE = "#/$defs/{model}"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


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
    known = {kind.__name__: {each.name: each for each in settings_of(kind)} for kind in _kinds(WeftConfig)}
    definitions: dict[str, Any] = made.get("$defs", {})
    for name, definition in [("WeftConfig", made), *definitions.items()]:
        definition.pop("title", None)
        properties = definition.get("properties", {})
        if name in known:  # leaves out constants of the section
            definition["properties"] = properties = {each: properties[each] for each in known[name]}
        for field, entry in properties.items():
            entry.pop("title", None)
            text = texts.get(name, {}).get(field)
            if text:
                entry["description"] = text if known[name][field].is_public else f"Advanced. {text}"
    return {"$schema": _DIALECT, "title": CONFIG_NAME, **made}


def _models_by_runtime(properties: dict[str, Any]) -> dict[str, Any]:
    """Selects the models' schema by the runtime; models of another package's runtime only need a name."""
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
    """Returns the content of the schema file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
