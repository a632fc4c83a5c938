"""Reads the signatures of functions from the source of a library, which is not imported, for its stand-in."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Called = Mapping[str, tuple[str, ...]]
"""Names of methods by their class."""


def signatures_of(folder: Path, called: Called) -> dict[str, list[list[Any]]]:
    """Returns the parameters of each called function: name, kind as `inspect` numbers it, whether it is optional."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in called:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in called[node.name]:
                        found[f"{node.name}.{method.name}"] = list(_parameters(method.args))
    return found


def _parameters(arguments: ast.arguments) -> Iterator[list[Any]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_optional = len(positional) - len(arguments.defaults)
    for index, one in enumerate(positional):
        yield [one.arg, 0 if index < len(arguments.posonlyargs) else 1, index >= first_optional]
    if arguments.vararg is not None:
        yield [arguments.vararg.arg, 2, True]
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield [one.arg, 3, default is not None]
    if arguments.kwarg is not None:
        yield [arguments.kwarg.arg, 4, True]


def text_of(record: dict[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in record["signatures"].items())
    return f'{{\n"version": {json.dumps(record["version"])},\n"signatures": {{\n{lines}\n}}\n}}\n'
