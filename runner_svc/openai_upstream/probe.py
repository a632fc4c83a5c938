"""Probes of running servers, limited in time and size, without redirects, proxies and cookies."""

import asyncio
from dataclasses import dataclass

from runner_svc.engine_http.client import EngineClient
from runner_svc.engine_http.faults import HttpFaultError, UnansweredError, Unconnected, UnconnectedError
from runner_svc.openai_upstream.answers import read_bounded, unreached
from runner_svc.openai_upstream.server_probes import HEALTH, LISTED, MODELS, ServerProbe, lacks_list
from runner_svc.policy.model_names import ServerList, listed_models
from weft.kernel.errors.error_tree import WeftError

MAX_ANSWER_BYTES = 8 * 1024 * 1024
WEFT = "weft"
"""Owner of a mesh's models in its model list. A mesh that followed itself would list each model repeatedly."""
NAME_ITS_MODELS = "list them beside its url, such as models: [{name: qwen}]"
"""Advice for an attached server that is a mesh."""
_REFUSED = frozenset({401, 403})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response to a probe."""

    status: int | None = None
    """HTTP status; None: no response before the timeout."""
    body: bytes = b""
    why: str = ""
    """Why the status or the body is missing."""


async def get(url: str, seconds: float, key: str = "") -> Answer:
    """Returns the response to a GET within this time. Server faults never raise."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    status, client = None, None
    try:
        # The timeout below comes first.
        client = EngineClient(url, headers=headers, connect_seconds=2 * seconds, idle_seconds=0.0)
        async with asyncio.timeout(seconds):
            answer = await client.send("GET", "", {})
            status = answer.status
            return Answer(status=status, body=await read_bounded(answer.parts(), MAX_ANSWER_BYTES))
    except WeftError:
        return Answer(status=status, why=f"its answer is longer than {MAX_ANSWER_BYTES // 1024**2} MiB")
    except TimeoutError:
        return Answer(why=f"it did not answer within {seconds:g} s")
    except UnconnectedError as error:
        return Answer(why=unreached(error) if error.why is Unconnected.FORBIDDEN else "it does not answer")
    except UnansweredError:
        return Answer(why="it does not answer")
    except (HttpFaultError, ValueError):
        return Answer(why="its answer is not HTTP")
    finally:
        if client is not None:
            client.close()
            # The loop closes its socket in the next round.
            await asyncio.sleep(0)


async def probe(base_url: str, seconds: float, key: str = "") -> ServerProbe:
    """Returns the response to a request for the server's models. Server faults never raise."""
    answer = await get(f"{base_url}{MODELS}", seconds, key)
    if lacks_list(answer.status):
        health = await get(f"{base_url}{HEALTH}", seconds, key)
        return ServerProbe(status=answer.status, health=health.status)
    if answer.status != LISTED or answer.why:
        return ServerProbe(status=answer.status, why=answer.why)
    return ServerProbe(status=answer.status, listed=listed_models(answer.body))


def list_of(probe: ServerProbe) -> ServerList:
    """Returns the models that a server lists, or why they are unknown."""
    if probe.status is None or probe.why:
        return ServerList(models=None, why=probe.why)
    if probe.status in _REFUSED:
        return ServerList(
            models=None, why=f"it refuses the key (status {probe.status})", remedy="correct api_key_env, or its value"
        )
    found = probe.listed
    if found is None:
        return ServerList(models=None, why=f"it has no list of models (status {probe.status})")
    if not found.is_list:
        return ServerList(models=None, why="its answer is not a list of models")
    if found.owners == {WEFT}:
        why = "it is a weft mesh; list its models one by one"
        return ServerList(models=None, why=why, remedy=NAME_ITS_MODELS)
    return ServerList(models=found)
