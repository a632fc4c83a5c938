"""What users see of weft, compared with the recordings: HTTP, the command line, documents, and scheduling decisions."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from baseline_mesh import BaselineMesh, key_of, running_baseline, running_keyed
from exchanges import HttpSession, load_exchanges
from kit.random_scenario import random_scenario, real_scheduler
from normal_form import NormalForm
from recordings import BENCH, FOLDER, RECORDED, check

from weft.documents.schemas import schemas
from weft_app.cli.commands import PANELS
from weft_app.cli.extension_commands import extension_commands
from weft_app.cli.main import load, loaded_commands
from weft_app.config.schema import schema
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.figures import figures_of

SEEDS = range(20)
APIS = ("chat", "completions", "responses", "messages", "ollama", "media", "models", "errors", "tasks")
OPERATOR_APIS = ("resources", "admin")
SECTIONS = tuple(yaml.safe_load((FOLDER / "commands.yaml").read_text()))
MOST_SECONDS = 900
"""Of all exchanges and commands on a busy machine; 120 s on an idle one."""

Recorded = Mapping[str, Mapping[str, str]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Everything that is asked of the meshes, in one order: outputs by the file of their recording."""
    outputs: dict[str, Mapping[str, str]] = {}
    with running_baseline(tmp_path_factory.mktemp("baseline")) as mesh:
        session = HttpSession(mesh.mesh.url, mesh.places, {})
        for api in (*APIS, *OPERATOR_APIS):
            outputs[f"http/{api}"] = _exchanged(session, api)
        outputs["openapi"] = _openapi(session, mesh)
        for section, lines in _command_lines().items():
            outputs[f"cli/{section}"] = {f"weft {line}": mesh.run(line) for line in lines}
        outputs["cli/help"] = {f"weft {line}": mesh.run(line) for line in _help_lines()}
    with running_keyed(tmp_path_factory.mktemp("keyed")) as keyed:
        keys = {
            "admin": key_of(keyed, "--role", "admin"),
            "user": key_of(keyed, "--tenant", "ann"),
            "named": key_of(
                keyed, "--tenant", "bob", "--scope", "models/m-x*:view", "--scope", "inference/m-x*:create"
            ),
        }
        outputs["http/keys"] = _exchanged(HttpSession(keyed.mesh.url, keyed.places, keys), "keys")
    return outputs


def _exchanged(session: HttpSession, api: str) -> dict[str, str]:
    return {each.name: session.record(each) for each in load_exchanges(FOLDER / "requests" / f"{api}.yaml")}


def _openapi(session: HttpSession, mesh: BaselineMesh) -> dict[str, str]:
    """Returns the OpenAPI document by its parts: one for each path and each schema."""
    document = json.loads(session.fetch("/openapi.json"))
    form = NormalForm(mesh.places)
    parts: dict[str, Any] = {f"path {path}": item for path, item in document.pop("paths").items()}
    parts |= {f"schema {name}": item for name, item in document["components"].pop("schemas").items()}
    return {name: form.text(_compact(item)) for name, item in {"document": document, **parts}.items()}


def _compact(document: Any) -> str:
    """Returns JSON with a line for each member that is short, and members of their own for all others."""
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True)
    return re.sub(r"[\[{]\n[^\[\]{}]{1,100}?\n\s*[\]}]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)


def _command_lines() -> dict[str, list[str]]:
    document = yaml.safe_load((FOLDER / "commands.yaml").read_text())
    return {
        section: [expanded for line in lines for expanded in _expanded(line)] for section, lines in document.items()
    }


def _expanded(line: str) -> Iterator[str]:
    """Yields the command lines that a line with `{a,b}` stands for."""
    parts = re.split(r"\{([^}]*)\}", line)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _help_lines() -> Iterator[str]:
    yield "--help"
    groups = [words for words in extension_commands() if " " not in words]
    for name in itertools.chain(*PANELS.values(), groups):
        yield f"{name} --help"
        yield from _subcommands(name, load(name))


def _subcommands(line: str, command: Any) -> Iterator[str]:
    for name, each in loaded_commands(line, command).items():
        yield f"{line} {name} --help"
        yield from _subcommands(f"{line} {name}", each)


@pytest.mark.slow("starts a mesh")
@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("api", [*APIS, *OPERATOR_APIS, "keys"])
def test_every_exchange_matches_its_recording(api: str, recorded: Recorded) -> None:
    check(RECORDED / "http" / f"{api}.txt", recorded[f"http/{api}"])


@pytest.mark.slow("starts a mesh")
@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("section", [*SECTIONS, "help"])
def test_every_command_output_matches_its_recording(section: str, recorded: Recorded) -> None:
    check(RECORDED / "cli" / f"{section}.txt", recorded[f"cli/{section}"])


@pytest.mark.slow("starts a mesh")
@pytest.mark.timeout(MOST_SECONDS)
def test_openapi_document_matches_its_recording(recorded: Recorded) -> None:
    check(RECORDED / "openapi.txt", recorded["openapi"])


def test_every_schema_matches_its_recording() -> None:
    found = {"config.schema.json": schema(), **dict(sorted(schemas().items()))}
    texts = {name: json.dumps(each, indent=2, ensure_ascii=False) + "\n" for name, each in found.items()}
    check(RECORDED / "schemas.txt", {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})


@pytest.mark.slow("simulates twenty meshes")
def test_scheduler_decisions_match_their_recording() -> None:
    check(RECORDED / "decisions.txt", {f"seed {seed}": _decisions(seed) for seed in SEEDS})


def _decisions(seed: int) -> str:
    """Returns a hash of every decision of a simulated mesh, and its figures, which say how much changed."""
    scenario = random_scenario(seed)
    simulation = Simulation(scenario, real_scheduler(scenario), explained=range(1, 200))
    simulation.run()
    digest = hashlib.sha256(repr(simulation.decision_log.lines).encode()).hexdigest()
    total = figures_of(simulation)
    return f"{digest}\nrequests {total.total.requests}, served {total.total.served}, loads {total.loads}"


def test_bench_baseline_has_rows() -> None:
    if not BENCH.exists():
        pytest.skip(f"{BENCH.name} is not recorded yet: see README.md")
    assert json.loads(BENCH.read_text())["rows"]
