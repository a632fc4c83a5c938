"""InferenceService: the public gRPC API, over the same dispatcher as the HTTP edge. Translation only."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from router_svc.call_metadata import metadata_of, tenant_of
from router_svc.spans import CallSpans
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.agents import name_asked_for, require_model_name
from weft.dispatch.aliases import AskedName
from weft.dispatch.call import Call, RequestDispatcher, warned
from weft.dispatch.operation_table import OPERATIONS, OperationSpec
from weft.dispatch.parameter_checks import allowed_handling, client_of, handling_of, labels_of, priority_of, session_of
from weft.dispatch.request_receipt import Journal, RequestContext
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.access.principal import MAY_LEAVE, USE_MODELS
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import add_methods, answering
from weft.kernel.requests.request_values import Operation
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.names import (
    MAX_REQUEST_ID_CHARS,
    new_id,
    require_token,
)

REQUEST_ID = "x-request-id"
RECEIPT_TRAILER = "weft-receipt-bin"

Context = grpc.aio.ServicerContext[Any, Any]
Spec = OperationSpec[Any, Any]


class InferenceServicer:
    """Implements InferenceService with one method per row of the operations table."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        default_timeout_seconds: float,
        schemas: SchemaLimits,
        journal: JournalPolicy | None = None,
        asked: Callable[[str, str], AskedName] = lambda model, _: AskedName(model),
        spans: CallSpans | None = None,
    ) -> None:
        """`journal`: which requests settings turn into durable tasks; None: none.

        `asked` resolves the model of a tenant's request: the name for an id, the target for an alias.
        """
        self._spans = spans or CallSpans(SystemClock())
        self._journal = journal
        self._asked = asked
        self._dispatcher = dispatcher
        self._default_timeout_seconds = default_timeout_seconds
        self._schemas = schemas

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Add InferenceService to a server."""
        methods = {
            spec.router_rpc: partial(self._stream if spec.streamed else self._answer, spec)
            for spec in OPERATIONS.values()
        }
        whole = {spec.whole.rpc: partial(self._whole_answer, spec) for spec in OPERATIONS.values() if spec.whole}
        add_methods(server, {**methods, **whole})

    async def _stream(self, spec: Spec, request: Any, context: Context) -> AsyncGenerator[Any]:
        response = spec.router_rpc.response
        async with answering(context):
            trace = self._spans.begin(metadata_of(context))
            call = await self._call(spec, request, context, trace.traceparent)
            try:
                async with aclosing(call.chunks()) as chunks:
                    async for chunk in chunks:
                        yield response(**spec.fields(chunk))
                if "receipt" in response.DESCRIPTOR.fields_by_name:
                    yield response(receipt=call.receipt)
            finally:
                _send_receipt(context, call)
                self._spans.end(trace, spec.router_rpc.path, call.receipt)

    async def _answer(self, spec: Spec, request: Any, context: Context) -> Any:
        async with answering(context):
            trace = self._spans.begin(metadata_of(context))
            call = await self._call(spec, request, context, trace.traceparent)
            try:
                result = await call.result()
            finally:
                _send_receipt(context, call)
                self._spans.end(trace, spec.router_rpc.path, call.receipt)
            return spec.router_rpc.response(receipt=call.receipt, **spec.fields(result))
        raise AssertionError("abort raises")

    async def _whole_answer(self, spec: Spec, request: Any, context: Context) -> Any:
        assert spec.whole is not None, "only these operations have the method"
        rpc = spec.whole.rpc
        async with answering(context):
            trace = self._spans.begin(metadata_of(context))
            call = await self._call(spec, request, context, trace.traceparent)
            try:
                result = await call.whole_result()
            finally:
                _send_receipt(context, call)
                self._spans.end(trace, rpc.path, call.receipt)
            return rpc.response(receipt=call.receipt, **{spec.whole.field: result})
        raise AssertionError("abort raises")

    async def _call(self, spec: Spec, request: Any, context: Context, traceparent: str) -> Call[Any]:
        ctx = await self._context_of(request, spec.operation, context, traceparent)
        warnings = spec.check(request.payload, self._schemas)
        call = self._dispatcher.call(spec, ctx, request.payload)
        return call.through(warned(warnings)) if warnings else call

    async def _context_of(
        self, request: Any, operation: Operation, context: Context, traceparent: str
    ) -> RequestContext:
        metadata = metadata_of(context)
        request_id = metadata.get(REQUEST_ID) or new_id("req")
        require_token(request_id, REQUEST_ID, MAX_REQUEST_ID_CHARS)
        if request.options.allow_remote:
            caller().require(MAY_LEAVE)
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        tenant = tenant_of(metadata)
        asked = self._asked(request.model, tenant)
        model = require_model_name(asked.model, "model")
        caller().require_name(USE_MODELS, name_asked_for(model))
        when_left = None if self._journal is None else self._journal.required(model, tenant, operation)
        return RequestContext(
            request_id=request_id,
            tenant=tenant,
            caller=caller().name,
            model=model,
            asked_model=asked.alias,
            preset=asked.preset,
            operation=operation,
            traceparent=traceparent,
            priority=priority_of(request.options),
            names_priority=request.options.priority != 0,
            max_priority=caller().max_priority,
            allow_remote=request.options.allow_remote,
            timeout_seconds=context.time_remaining() or self._default_timeout_seconds,
            handling=allowed_handling(handling_of(request.options), caller(), model),
            client_id=client_of(request.options),
            session=session_of(request.options),
            labels=labels_of(request.options),
            journal=None if when_left is None else Journal(when_left=when_left),
        )


def _send_receipt(context: Context, call: Call[Any]) -> None:
    if call.receipt is not None:
        trailer = receipt_pb2.Receipt()
        trailer.CopyFrom(call.receipt)
        # Metadata has little room, and exceeding it would fail the call. The stream has both.
        trailer.ClearField("signals")
        trailer.ClearField("warnings")
        for attempt in trailer.attempts:
            attempt.ClearField("message")
        context.set_trailing_metadata(((RECEIPT_TRAILER, trailer.SerializeToString()),))
