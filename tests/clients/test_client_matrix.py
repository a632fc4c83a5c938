"""Unmodified third-party clients against a real mesh: each in an environment of its own, each with its own idioms."""

import asyncio
import itertools
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from client_catalogue import CLIENTS, PATHS, Client
from client_environments import BROWSER, Environment, EnvironmentFactory
from client_mesh import TALK_TEXT, media_servers, write_client_config
from client_run import ALLOWED_HOST, PULLED, PULLED_BYTES, Against, ClientRun, run_client
from clients_page import PAGE, WELL, render
from mesh_process import MeshProcess, run_weft, running_mesh, write_config
from wire_tap import Asked, WireTap, wire_tap

from weft_app.compose.demo import DEMO_MODEL, demo_model_path
from weft_testing.model_hub import HubRepository, ModelHub

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

REAL_CONTEXT_TOKENS = 16_384
SHORT = "agent/short"
"""For clients that set no bound of their own. This model may go on until its context is full, and to an agent that is a
failure, as it should be."""
TOOL_TEMPLATE = Path(__file__).with_name("tool_template.jinja")
"""The demo model's own template has no tools, and a model without tools refuses agents that bring some."""
BROWSER_RUNS_ON = ("linux", "x86_64")
ANY_KEY = "local"
"""Where none is asked for."""


@pytest.fixture(scope="module")
def environments(request: pytest.FixtureRequest) -> Iterator[EnvironmentFactory]:
    """Installs what the selected tests need, ahead of them and two at a time."""
    factory = EnvironmentFactory()
    for item in request.session.items:
        called = getattr(item, "callspec", None)
        if called is not None and isinstance(client := called.params.get("client"), Client):
            factory.prepare(client.name)
            if client.in_browser:
                factory.prepare(BROWSER)
    yield factory
    factory.close()


class Results:
    """What went wrong, by client, and in which tests it was looked for."""

    def __init__(self) -> None:
        self._wrong: dict[str, dict[str, list[str]]] = {}

    def add(self, client: Client, test: str, wrong: list[str]) -> None:
        """How a client did in one test."""
        self._wrong.setdefault(client.name, {})[test] = wrong

    def is_complete(self) -> bool:
        """Whether every client was in each of its tests."""
        wanted = {client.name: {"scripted", "real"} if client.real else {"scripted"} for client in CLIENTS}
        return wanted == {name: set(tests) for name, tests in self._wrong.items()}

    def by_client(self) -> dict[str, str]:
        """As the page has them."""
        return {name: "; ".join(itertools.chain(*tests.values())) or WELL for name, tests in self._wrong.items()}


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """A run of all tests writes the page."""
    found = Results()
    yield found
    if found.is_complete():
        PAGE.write_text(render(found.by_client()))


@pytest.fixture
def environment(client: Client, environments: EnvironmentFactory) -> Environment:
    return environments.get(client.name)


@pytest.fixture
def browser(client: Client, environments: EnvironmentFactory) -> Environment | None:
    if client.in_browser and (sys.platform, platform.machine()) != BROWSER_RUNS_ON:
        pytest.skip(f"the package of the browser is for {' on '.join(BROWSER_RUNS_ON)}")
    return environments.get(BROWSER) if client.in_browser else None


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Nobody gets anything without a key. It pulls from a hub of this machine."""
    folder = tmp_path_factory.mktemp("clients")
    gateway = {
        "cors": {"allowed_origins": [f"http://{ALLOWED_HOST}:*"]},
        "ollama_sources": {"small-of-the-library:q4": f"hf:{PULLED}"},
    }
    hub = ModelHub()
    hub.repositories[PULLED] = HubRepository(files={"small-Q4_0.gguf": b"GGUF".ljust(PULLED_BYTES, b"x")})
    with pytest.MonkeyPatch.context() as environment, hub.running(), media_servers() as media:
        config = write_client_config(folder, media, auth={"required": True}, gateway=gateway)
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_TOKEN", ""), ("HF_HOME", str(folder / "hf"))):
            environment.setenv(name, value)
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            yield mesh


def new_key(mesh: MeshProcess, role: str) -> str:
    code, out, error = asyncio.run(run_weft("keys", "create", "--role", role, "-o", "name", home=mesh.home))
    assert code == 0, error
    return out.strip()


class Keys(NamedTuple):
    """As two persons get them."""

    user: str
    """Of one who is to use models and nothing else."""
    operator: str
    """Of one who may pull models, too."""


@pytest.fixture(scope="module")
def keys(mesh: MeshProcess) -> Keys:
    return Keys(new_key(mesh, "user"), new_key(mesh, "operator"))


@pytest.fixture(scope="module")
def real_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """With a context that holds the first words of agents, and a template that has their tools.

    `SHORT` says one sentence, whatever it is asked.
    """
    folder = tmp_path_factory.mktemp("real")
    model = {
        "name": DEMO_MODEL,
        "path": str(demo_model_path()),
        "chat_template_path": str(TOOL_TEMPLATE),
        "slots": 1,
        "context_tokens": REAL_CONTEXT_TOKENS,
    }
    short = {"name": "short", "model": DEMO_MODEL, "default_params": {"temperature": 0, "stop": [".", "!", "?"]}}
    config = write_config(folder, {"name": "local", "models": [model], "agents": [short]})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_client_supports_all_its_features(
    client: Client,
    environment: Environment,
    browser: Environment | None,
    mesh: MeshProcess,
    keys: Keys,
    results: Results,
    tmp_path: Path,
) -> None:
    scripted = Against(
        model="talk", text=TALK_TEXT, key=keys.user, operator_key=keys.operator, features=client.features
    )
    async with wire_tap(mesh.url) as tap:
        run = await run_client(client, environment, scripted, tap, tmp_path, browser)
    wrong = [*what_failed(run, scripted.features), *what_is_odd(client, scripted, tap)]
    results.add(client, "scripted", wrong)
    assert not wrong, told(run, tap)


@pytest.mark.parametrize("client", [client for client in CLIENTS if client.real], ids=lambda client: client.name)
async def test_client_chats_with_the_real_model(
    client: Client, environment: Environment, real_mesh: MeshProcess, results: Results, tmp_path: Path
) -> None:
    real = Against(model=SHORT if client.unbounded else DEMO_MODEL, text="", key=ANY_KEY, features=client.real)
    async with wire_tap(real_mesh.url) as tap:
        run = await run_client(client, environment, real, tap, tmp_path)
    wrong = [f"real model: {failed}" for failed in what_failed(run, real.features)]
    results.add(client, "real", wrong)
    assert not wrong, told(run, tap)


def what_failed(run: ClientRun, features: tuple[str, ...]) -> list[str]:
    """The features that a check did not report as well, and whether it came to its end."""
    wrong = [f"{feature} fails" for feature in features if run.features.get(feature, "not tried")]
    return wrong if run.exit_code == 0 else [*wrong, f"exit code {run.exit_code}"]


def what_is_odd(client: Client, against: Against, tap: WireTap) -> list[str]:
    """What the wire tells against the table: refusals that nobody meant, APIs that were not used, other keys."""
    asked = tap.asked
    refused = [request for request in asked if 400 <= request.status < 500 and not _is_meant_to_fail(request)]
    unused = {PATHS[surface] for surface in client.surfaces} - {request.path for request in asked}
    served = [request for request in asked if request.method == "POST" and not _is_meant_to_fail(request)]
    kinds, sent = {request.key_kind for request in served}, {request.key for request in served}
    return [
        *sorted({f"{request.status} for {request.method} {request.path}" for request in refused}),
        *(f"{path} not used" for path in sorted(unused)),
        *([] if kinds == set(client.keys) else [f"key sent as {', '.join(sorted(kinds))}"]),
        *([] if sent - {against.operator_key} == {against.key} else ["another key sent"]),
    ]


def told(run: ClientRun, tap: WireTap) -> str:
    """What a person wants to read when a client failed."""
    refused = [
        f"{asked.status} {asked.method} {asked.path} {asked.body[-1000:]}" for asked in tap.asked if asked.status >= 400
    ]
    failed = [f"{feature}: {detail}" for feature, detail in run.features.items() if detail]
    return "\n".join([f"exit {run.exit_code}", *failed, run.output[-6000:], *refused, tap.transcript()])


def _is_meant_to_fail(asked: Asked) -> bool:
    """What a check wants refused; and Anthropic's tool runner asks whether the server keeps conversations."""
    return any(
        mark in asked.key + asked.query + asked.body
        for mark in ("no-such-model", "meant-to-fail", '"thread":{"type":"create"}')
    )
