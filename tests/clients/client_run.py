"""One run of a client's check: its surroundings, what it printed, and what it sent."""

import asyncio
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from client_catalogue import Client
from client_environments import FOLDER, Environment
from wire_tap import WireTap

from weft_app.cli import launch_tools

RUN_SECONDS = 1200.0
"""A bound for what hangs: on a busy machine the real model reads the first words of an agent for minutes."""
AGENT_FILE, AGENT_TEST = "notes.txt", "test.sh"
"""Lie in the folder that a client is started in; the models of agents ask to change the notes and to run the test."""
AGENT_TEXT = "The notes are about a lake."
"""What those models say when they have run it."""
ALLOWED_HOST = "app.weft.test"
"""The mesh lets web pages of this host call it."""
PULLED = "acme/small-GGUF"
"""A repository of the hub of these tests, with one file."""
PULLED_BYTES = 4 * 1024 * 1024
_NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not exist: what a client would tell anybody but weft fails at once."""
_SILENCE = {
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "AI_SDK_TELEMETRY_DISABLED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What a client is run against."""

    model: str
    text: str
    """What that model says; empty: nobody knows."""
    key: str
    operator_key: str = ""
    """Of one who may load and pull models; empty: nobody's."""
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRun:
    """How a check went."""

    features: dict[str, str]
    """By feature: empty where it is well, else what went wrong."""
    exit_code: int | None
    """None: it took too long."""
    output: str
    """Everything that it printed."""


async def run_client(
    client: Client,
    environment: Environment,
    against: Against,
    tap: WireTap,
    folder: Path,
    browser: Environment | None = None,
) -> ClientRun:
    """Run the client's check to its end, in this empty folder, which holds its home as well.

    `browser`: the environment with one; None: the check needs none.
    """
    (folder / "work").mkdir()
    (folder / "work" / AGENT_FILE).write_text("The sea is wide and deep.\n")
    (folder / "work" / AGENT_TEST).write_text(f"grep -q lake {AGENT_FILE} && echo 1 passed\n")
    process = await asyncio.create_subprocess_exec(
        "nice",
        *environment.interpreter,
        str(_check(client, environment)),
        cwd=folder / "work",
        env=_surroundings(folder, environment, against, tap.url) | ({} if browser is None else browser.browser),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**24,
        start_new_session=True,
    )
    output = b""
    try:
        async with asyncio.timeout(RUN_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    text = output.decode(errors="replace")
    return ClientRun(features=_features(text), exit_code=process.returncode, output=text)


def _check(client: Client, environment: Environment) -> Path:
    """The script. Node looks for modules beside it, so it is copied to where they are."""
    script = FOLDER / client.name / "check.mjs"
    if not script.exists():
        return FOLDER / client.name / "check.py"
    for source in (script, FOLDER / "shared" / "report.mjs"):
        shutil.copy(source, environment.folder)
    return environment.folder / script.name


def _surroundings(folder: Path, environment: Environment, against: Against, url: str) -> dict[str, str]:
    homes = {
        name: str(folder / name.lower()) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
    }
    homes |= {name: str(folder / name.lower()) for name in ("XDG_CACHE_HOME", "TMPDIR")}
    for home in homes.values():
        Path(home).mkdir()
    return {
        **homes,
        **_SILENCE,
        "PATH": os.pathsep.join([*map(str, environment.path), os.defpath]),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(FOLDER / "shared"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HTTP_PROXY": _NOWHERE,
        "HTTPS_PROXY": _NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
        "WEFT_URL": url,
        "WEFT_KEY": against.key,
        "WEFT_OPERATOR_KEY": against.operator_key,
        "WEFT_PULLED": f"hf.co/{PULLED}",
        "WEFT_PULLED_BYTES": str(PULLED_BYTES),
        "WEFT_TALK_MODEL": against.model,
        "WEFT_TALK_TEXT": against.text,
        "WEFT_AGENT_TEXT": AGENT_TEXT,
        "WEFT_LAUNCH_TOOLS": launch_tools.__file__,
        "WEFT_ALLOWED_HOST": ALLOWED_HOST,
        "WEFT_FEATURES": ",".join(against.features),
    }


def _features(output: str) -> dict[str, str]:
    """What the lines of JSON among the output say."""
    found = {}
    for line in output.splitlines():
        if line.startswith('{"feature"'):
            said = json.loads(line)
            found[said["feature"]] = "" if said["ok"] else said.get("detail") or "failed"
    return found
