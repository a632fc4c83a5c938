"""`durable: "wait"`: whether a request is run as a durable task while its caller watches."""

from functools import partial

from starlette.types import Scope

from gateway.intake.headers import headers_of, idempotency_key_of
from gateway.intake.request_model import HandledRequest
from gateway.request_facts import RequestFacts, facts_of
from weft.dispatch.request_trace import Journal, WhenLeft
from weft.kernel.errors import invalid_field
from weft.kernel.request import TEXT_OPERATIONS, Operation


def journal_of(scope: Scope, asked: HandledRequest, operation: Operation, *, is_possible: bool) -> Journal | None:
    """What a request asks for; None: nothing of the kind.

    Raises INVALID_ARGUMENT naming the field where it cannot be had: here (`is_possible`), or for this operation.
    """
    if asked.durable is None:
        if asked.on_disconnect is not None:
            raise invalid_field("on_disconnect", "goes with 'durable': 'wait'")
        return None
    if not is_possible:
        raise invalid_field("durable", "there are no durable tasks here: leave it out")
    if operation not in TEXT_OPERATIONS:
        raise invalid_field("durable", "is for chats, completions and embeddings: leave it out")
    return Journal(
        when_left=WhenLeft(asked.on_disconnect or WhenLeft.CANCEL.value),
        idempotency_key=idempotency_key_of(headers_of(scope)),
        on_task=partial(_note_task, facts_of(scope)),
    )


def _note_task(facts: RequestFacts, task_id: str) -> None:
    facts.task_id = task_id
