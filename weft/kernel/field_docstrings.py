"""Docstrings below the fields of classes: descriptions for JSON schemas and the reference.

They are read from the source when a schema is built. Pydantic (`use_attribute_docstrings`) reads them when a class is
defined, which took a tenth of the CPU time of a start.
"""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache


@cache
def field_docstrings(kind: type) -> Mapping[str, str]:
    """Returns the docstrings of a class's fields by name, including inherited ones; empty if there is no source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in ("builtins", "pydantic"):
            found |= _of_module(base.__module__).get(base.__name__, {})
    return {name: text for name, text in found.items() if text}


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):  # a module in C, or without its source
        return {}
    return {node.name: _of_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    """Returns "" for a field without a docstring, which hides the one of a base class."""
    found: dict[str, str] = {}
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = inspect.cleandoc(words)
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                found[name] = ""
    return found
