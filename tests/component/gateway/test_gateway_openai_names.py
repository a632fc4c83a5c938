"""Model names, and permission to leave the premises, alike in chat, completions and embeddings."""

import json

import pytest
from gateway_script import ScriptedDispatcher, serving

from weft.kernel.request import Operation

BODIES: dict[str, tuple[dict[str, object], Operation]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, Operation.CHAT),
    "/v1/completions": ({"prompt": "hi"}, Operation.COMPLETION),
    "/v1/embeddings": ({"input": "hi"}, Operation.EMBEDDING),
}


NAMES = ["tiny", "chat", "route/drafts", "agent/reviewer", "auto", "model:7b-q4"]


@pytest.mark.parametrize("path", BODIES)
async def test_every_kind_of_name_reaches_the_dispatcher_from_every_route(path: str) -> None:
    fields, operation = BODIES[path]
    asked = [(name, allow_remote) for name in NAMES for allow_remote in (None, False, True)]
    async with serving(ScriptedDispatcher(vectors=[[1.0]])) as gateway:
        for name, allow_remote in asked:
            body = json.dumps({"model": name, "allow_remote": allow_remote, **fields})
            answer = await gateway.request("POST", path, body.encode())
            assert answer.status == 200, answer.body
    told = [(context.model, context.operation, context.allow_remote) for context in gateway.dispatcher.contexts]
    assert told == [(name, operation, bool(allow_remote)) for name, allow_remote in asked]
