"""The fenced blocks of the docs, and what is wrong with each by the product's own loaders, parsers and routes.

A block that cannot be checked has the line `<!-- unchecked: REASON -->` before it.
"""

import configparser
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import ne
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import urlsplit

import typer
import yaml
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import Match
from typer.main import get_command

from gateway.endpoints import gateway_routers
from gateway.openapi import Schema
from gateway.routing import routes_of
from gateway.runner_api_service import runner_routers
from weft.documents.resource_kinds import ResourceKind
from weft.documents.yaml_documents import read_documents
from weft.extension import own_extensions
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.commands import ALIASES, COMMANDS
from weft_app.cli.extension_commands import extension_commands
from weft_app.cli.main import app, load
from weft_app.cli.targets import OTHER_KINDS
from weft_app.config.loader import load_config

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(
    r"^(?:[ ]*<!-- unchecked: (?P<why>[^\n]+?) -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>[a-z]+)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    line: int
    """Its first line in the page."""
    language: str
    text: str
    unchecked: str
    """Why it cannot be checked; empty: it can."""


def pages() -> list[Path]:
    """The front page and every page of the docs."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    ]


def blocks(text: str) -> Iterator[Block]:
    """Yields the blocks of a page that have a language."""
    for found in _BLOCK.finditer(text):
        yield Block(
            line=text.count("\n", 0, found.start("text")) + 1,
            language=found["language"],
            text=dedent(found["text"]),
            unchecked=found["why"] or "",
        )


def faults(block: Block, folder: Path) -> list[str]:
    """Returns what is wrong with a block; `folder` is for files."""
    if block.language == "js":  # programs of Node.js: tests/clients runs them
        return []
    try:
        return _CHECKS[block.language](block.text, folder)
    except KeyError:
        return [f"nothing checks {block.language}"]
    except (WeftError, yaml.YAMLError, ValueError, SyntaxError, configparser.Error) as error:
        return [str(error)]


def _yaml(text: str, folder: Path) -> list[str]:
    documents = [document for document in yaml.safe_load_all(text) if document is not None]
    if any(isinstance(document, dict) and "kind" in document for document in documents):
        read_documents(text, "block")
        return []
    # The second one of a block is the weft.local.yaml beside the first.
    for name, document in zip(("weft.yaml", "weft.local.yaml"), documents, strict=False):
        (folder / name).write_text(yaml.safe_dump(_configuration(document)))
    if documents:
        load_config(folder / "weft.yaml")
    return []


def _configuration(document: Any) -> Any:
    """Returns the configuration that has a part of one in its place: the tools of a runner, its models, their wake."""
    if isinstance(document, list):
        return _configuration({"models": [{"name": "m"}], "url": "http://r/v1", "tools": document})
    if "models" in document:
        return {"runners": [{"name": "r", **document}]}
    if set(document) == {"wake"}:
        return _configuration({"models": [{"name": "m", **document}], "url": "http://r/v1"})
    return document


def _json(text: str, folder: Path) -> list[str]:
    del folder
    for line in text.splitlines() if text.count("\n{") and not text.startswith(("{\n", "[\n")) else [text]:
        _loaded(line)
    return []


def _loaded(text: str) -> Any:
    """Reads JSON in which `...` stands for what is left out, or that is some members of an object."""
    whole = re.sub(r"(?<=[\[{,:])\s*\.\.\.(?=\s*[\]},])", "", text)
    whole = re.sub(r",(?=\s*[,\]}])", "", whole)
    return json.loads(f"{{{whole}}}" if whole.startswith('"') else whole)


def _toml(text: str, folder: Path) -> list[str]:
    del folder
    tomllib.loads(text)
    return []


def _ini(text: str, folder: Path) -> list[str]:
    del folder
    configparser.ConfigParser(strict=False, interpolation=None).read_string(text)
    return []


def _python(text: str, folder: Path) -> list[str]:
    del folder
    compile(text, "block", "exec", flags=_TOP_LEVEL_AWAIT)
    return []


_TOP_LEVEL_AWAIT = 0x2000
"""ast.PyCF_ALLOW_TOP_LEVEL_AWAIT."""


def _shell(text: str, folder: Path) -> list[str]:
    del folder
    return [fault for line, body in command_lines(text) for words in commands(line) for fault in _faults(words, body)]


_PROMPT = re.compile(r"^(?:\w+)?\$ +")


def command_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yields each command line that a block shows, in one line, with the text of its here-document.

    Without a prompt in it every line is one; else those that follow a prompt alone or in its indentation.
    """
    has_prompt = any(_PROMPT.match(line) for line in text.splitlines())
    lines = iter(text.splitlines())
    for line in lines:
        if has_prompt and not _PROMPT.match(line) and not re.match(r"^ {7}weft ", line):
            continue
        command, body = _PROMPT.sub("", line).strip(), ""
        while command.endswith("\\") or _is_open(command):
            command = command.removesuffix("\\") + "\n" + next(lines)
        if (end := re.search(r"<<-?'?(\w+)", command)) is not None:
            body = "\n".join(takewhile(partial(ne, end[1]), lines))
        yield command, body


def _is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def commands(line: str) -> Iterator[list[str]]:
    """Yields the words of each command of a line: of pipes, lists and substitutions."""
    tokens = shlex.shlex(line, posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    words: list[str] = []
    is_target = False
    for token in tokens:
        if set(token) <= set("<>"):
            is_target = True
        elif set(token) <= set("();|&") or token in ("{", "}"):
            yield from filter(None, [words])
            words = []
        elif is_target:
            is_target = False
        else:
            for inner in re.findall(r"\$\(([^)]*)\)", token):
                yield from commands(inner)
            words.append(token)
    yield from filter(None, [words])


def _faults(words: list[str], body: str) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if words[:1] == ["curl"]:
        return curl_faults(words[1:], body)
    # Also where another program runs it in a container: `docker compose exec CONTAINER weft`.
    start = words.index("exec") + 1 if "exec" in words else 0
    if start:
        start = next((index for index in range(start + 1, len(words)) if words[index] == "weft"), 0)
    return weft_faults(words[start + 1 :]) if words[start : start + 1] == ["weft"] else []


_COMMANDS = {name: load(name) for name in (*COMMANDS, *extension_commands())}
"""Loaded with this module: it takes longer than a fast test may."""


def weft_faults(words: list[str]) -> list[str]:
    """Returns what the command line refuses; nothing is run."""
    if not words or words[0].startswith("-"):
        known = {option for each in get_command(app).params for option in each.opts}
        return [f"there is no option {word}" for word in words if word not in known]
    name = ALIASES.get(words[0], words[0])
    if name not in _COMMANDS:
        return [f"there is no command {name}"]
    command, path, rest = _COMMANDS[name], f"weft {name}", words[1:]
    try:
        context = command.make_context(path, list(rest))
        while hasattr(command, "commands"):
            rest = [*context._protected_args, *context.args]
            if not rest:
                return []
            name, command, rest = command.resolve_command(context, rest)
            context = command.make_context(f"{path} {name}", list(rest), parent=context)
    except _USAGE_ERROR as error:
        return [f"weft {' '.join(words)}: {error.format_message()}"]
    kind, *names = context.params.get("resources") or [""]
    if names and kind not in _KINDS:
        return [f"weft {' '.join(words)}: there is no kind {kind}"]
    return []


_KINDS = {*ResourceKind, *(kind.plural for kind in ResourceKind), *OTHER_KINDS, *(kind[:-1] for kind in OTHER_KINDS)}


_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]

_HOSTS = re.compile(r"^(?:https?://)?(?:localhost|127\.0\.0\.1|mesh\.example|\$OLLAMA_HOST)(?::\d+)?(?=/)")
_PUBLISHERS = "$MESH"
_BODIES = ("-d", "--data", "--data-binary")
_OTHERS_WITH_VALUE = ("-H", "-F", "-o", "-X")


def curl_faults(words: list[str], body: str) -> list[str]:
    """Returns why a request would not reach a route, or why its JSON would be refused."""
    method, url, data, is_json = "", "", None, False
    rest = iter(words)
    for word in rest:
        if word in _BODIES:
            data = next(rest)
        elif word in _OTHERS_WITH_VALUE:
            value = next(rest)
            method = value if word == "-X" else "POST" if word == "-F" else method
            is_json = is_json or value == "Content-Type: application/json"
        elif not word.startswith("-"):
            url = word
    method = method or ("GET" if data is None else "POST")
    if url.startswith(_PUBLISHERS):
        return []
    if (host := _HOSTS.match(url)) is None:
        return [f"{url}: not an address of a mesh"]
    path = urlsplit(url[host.end() :]).path
    endpoint = _endpoint_of(method, path)
    if endpoint is None:
        return [f"there is no {method} {path}"]
    if data is None or not is_json:
        return []
    return _body_faults(*endpoint, body if data == "@-" else data)


def _endpoint_of(method: str, path: str) -> tuple[APIRoute, list[Schema]] | None:
    """The route of a gateway or a runner that answers a request, and the schemas of its API; None: there is none."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    routers = (*gateway_routers(own_extensions()), *runner_routers(own_extensions()))
    found = ((route, router.schemas) for router in routers for route in routes_of([router]))
    return next(((route, schemas) for route, schemas in found if route.matches(scope)[0] is Match.FULL), None)


def _body_faults(route: APIRoute, schemas: list[Schema], text: str) -> list[str]:
    content, doc = json.loads(text), route.openapi_extra or {}
    schema = doc.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    for model in schemas:
        if isinstance(model, type) and issubclass(model, BaseModel) and schema.get("$ref", "").endswith(model.__name__):
            try:
                model.model_validate(content)
            except ValidationError as error:
                return [f"{route.path}: {error}"]
    return []


_CHECKS: dict[str, Callable[[str, Path], list[str]]] = {
    "yaml": _yaml,
    "json": _json,
    "toml": _toml,
    "ini": _ini,
    "python": _python,
    "console": _shell,
    "sh": _shell,
    "bash": _shell,
}
