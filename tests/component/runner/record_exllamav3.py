"""Records the signatures of ExLlamaV3 that the engine calls, for its stand-in: they are read, and nothing is imported.

    python tests/component/runner/record_exllamav3.py FOLDER_OF_THE_UNPACKED_WHEEL

It writes `scripted_library/exllamav3/signatures.json`.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "scripted_library" / "exllamav3" / "signatures.json"
CALLED = {
    "Config": ("from_directory",),
    "Model": ("from_config", "load_gen"),
    "Tokenizer": ("from_config", "encode"),
    "Cache": ("__init__",),
    "Generator": ("__init__", "get_cache_stats"),
    "Job": ("__init__",),
    "AsyncGenerator": ("__init__", "close"),
    "AsyncJob": ("__init__", "cancel"),
    "ComboSampler": ("__init__",),
    "LLGuidanceFilter": ("__init__",),
}


def signatures_of(folder: Path) -> dict[str, list[list[Any]]]:
    """Returns the parameters of each called function: name, kind as `inspect` numbers it, whether it is optional."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in CALLED:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in CALLED[node.name]:
                        found[f"{node.name}.{method.name}"] = list(_parameters(method.args))
    return found


def _parameters(arguments: ast.arguments) -> Iterator[list[Any]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_optional = len(positional) - len(arguments.defaults)
    for place, one in enumerate(positional):
        yield [one.arg, 0 if place < len(arguments.posonlyargs) else 1, place >= first_optional]
    if arguments.vararg is not None:
        yield [arguments.vararg.arg, 2, True]
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield [one.arg, 3, default is not None]
    if arguments.kwarg is not None:
        yield [arguments.kwarg.arg, 4, True]


def recorded(folder: Path) -> dict[str, Any]:
    """Returns the record of an unpacked wheel."""
    (metadata,) = folder.glob("exllamav3-*.dist-info")
    version = metadata.name.removeprefix("exllamav3-").removesuffix(".dist-info")
    return {"version": version, "signatures": signatures_of(folder / "exllamav3")}


def text_of(record: dict[str, Any]) -> str:
    """Returns the record as JSON, with a function in each line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in record["signatures"].items())
    return f'{{\n"version": {json.dumps(record["version"])},\n"signatures": {{\n{lines}\n}}\n}}\n'


if __name__ == "__main__":
    RECORD.write_text(text_of(recorded(Path(sys.argv[1]))), encoding="utf-8")
