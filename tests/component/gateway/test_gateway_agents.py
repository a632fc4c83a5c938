"""Agents as models, through the whole gateway: the OpenAI client on one side, the runner's request on the other."""

from pathlib import Path

from gateway_script import FixedFleet, agent, model, serving
from mesh_script import AnsweringRunner, dispatching
from openai.types.chat import ChatCompletionMessageParam
from structlog.testing import capture_logs

from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Mine."},
    {"role": "user", "content": "Say hello"},
]


def fleet() -> FixedFleet:
    coder = agent("coder", temperature=0.25, max_tokens=100)
    return FixedFleet.of(model("tiny"), agents=[coder, agent("stray", "nowhere")])


def require_prepared(runner: AnsweringRunner, *, temperature: float) -> None:
    """The runner's request has the agent's properties, and the caller's messages."""
    for request in runner.asked:
        said = [(message.role, message.content[0].text) for message in request.chat.messages]
        assert said == [
            (chat_pb2.ROLE_SYSTEM, "Be terse."),
            (chat_pb2.ROLE_SYSTEM, "Mine."),
            (chat_pb2.ROLE_USER, "Say hello"),
        ]
        assert (request.chat.sampling.temperature, request.chat.sampling.max_tokens) == (temperature, 100)


async def test_every_attempt_sends_the_same_payload_and_the_log_names_the_agent(tmp_path: Path) -> None:
    died = WeftError(Reason.SERVER_DIED, "it died")
    with capture_logs() as logs:
        async with (
            dispatching(tmp_path, fleet(), died) as (dispatcher, scheduler, runner),
            serving(dispatcher, fleet=fleet()) as gateway,
        ):
            await gateway.sdk.chat.completions.create(model="agent/coder", messages=MESSAGES)
    assert (len(scheduler.placed), len(runner.asked)) == (1, 2)
    require_prepared(runner, temperature=0.25)
    line = next(entry for entry in logs if entry["event"] == "request")
    assert (line["agent"], line["model"], line["attempts"]) == ("coder", "tiny", 2)
