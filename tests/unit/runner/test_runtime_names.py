"""A runtime is a folder: no module outside of it names it, so that a new one is a folder and nothing else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner_svc.runtimes.table import built_in_names

RUNTIMES = built_in_names()
QUOTED_OR_IMPORTED = re.compile(rf"(?<=[\"'.])(?:{'|'.join(map(re.escape, RUNTIMES))})(?=[\"'. ])")
"""Finds every runtime that a text names, and more. Parsing all modules takes seconds."""
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("runner_svc", "weft", "weft_app", "weft_testing", "gateway", "router_svc", "registry_svc")
ALLOWED = {
    "runner_svc/runtimes/table.py": "the default runtime, and the one of `weft runner join --url`",
    "runner_svc/runtimes/unmanaged_server.py": "`server` is the word of messages for a running server",
    "weft_testing/fake_backend/vllm_routes.py": "`vllm` owns the models that its server lists",
    "weft_app/compose/central.py": "models that operators declare are those of `openai_remote`",
    "gateway/ollama/models.py": "`server` is the name of a field",
    "runner_svc/added_models.py": "`server` is the name of a field",
    "runner_svc/model_files/pipeline_folder.py": "`diffusers` is a library that the components of a folder name",
    "registry_svc/operations/job.py": "`server` is the name of a field",
    "runner_svc/discovery.py": "`vllm` and `server` are kinds of programs that run already",
    "weft/kernel/model_source.py": "`server` is the suggested name of a server without one",
    "weft/kernel/tracing.py": "`server` is a kind of span",
    "weft_app/cli/operations.py": "`server` is the name of a field",
    "weft_app/compose/discovered_here.py": "`server` is the name of a field",
    "weft_app/compose/followed_servers.py": "`server` is the suggested name of a server without one",
    "weft_app/cli/doctor.py": "`server` is a check of `weft doctor`",
}
"""Modules that may name a runtime, with the reason."""


def _modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            if not where.startswith("weft/api/"):
                yield path


def _names_in(path: Path, own: str = "") -> set[str]:
    """Returns the other runtimes that a module names, by a string or by an import from the folder."""
    text = path.read_text(encoding="utf-8")
    names = set(QUOTED_OR_IMPORTED.findall(text)) - {own}
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)) if names else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(node.module.partition("runtimes.")[2].split("."))
    return found & names


def test_no_module_outside_its_folder_names_a_runtime() -> None:
    named = {}
    for path in _modules():
        where = path.relative_to(ROOT).as_posix()
        own = where.split("/")[2] if where.startswith("runner_svc/runtimes/") else ""
        if where not in ALLOWED and (others := _names_in(path, own)):
            named[where] = sorted(others)
    assert named == {}


@pytest.mark.parametrize("where", ALLOWED)
def test_exceptions_are_still_needed(where: str) -> None:
    assert _names_in(ROOT / where)
