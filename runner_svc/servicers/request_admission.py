"""Admission of data-plane requests: the ticket, the instance, the slot, and the runner's part of the receipt."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

from runner_svc.backend.port import CallInfo
from runner_svc.cache.manager import CacheManager
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.instance.instance import Instance
from runner_svc.session.clock_offset import ClockOffset
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.runner.v1 import serve_options_pb2, ticket_pb2
from weft.dispatch.parameter_checks import granted_priority_of, handling_of
from weft.dispatch.payload_description import Payload, untaken_words_of
from weft.dispatch.tickets import TicketGate
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.failover import quotes_model
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import TRACEPARENT, trace_id_of, traceparent_of
from weft.kernel.time.clock import Clock, clock_off
from weft.link.carried_calls import CarriedContext

log = get_logger("weft.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIdentity:
    """The runner's identity in receipts and events."""

    runner: str
    incarnation: str
    host: str


class RequestAdmission:
    """Checks tickets, finds instances, holds slots, and writes the runner's part of receipts."""

    def __init__(
        self,
        *,
        identity: RunnerIdentity,
        gate: TicketGate,
        instances: Mapping[str, Instance],
        caches: CacheManager,
        clock: Clock,
        clock_offset: ClockOffset | None = None,
    ) -> None:
        """`clock`: the mesh's."""
        self._clock_offset = clock_offset
        self._identity = identity
        self._gate = gate
        self._instances = instances
        self._clock = clock
        self.caches = caches

    def hold(
        self,
        permit: ticket_pb2.TicketClaims,
        instance: Instance,
        options: serve_options_pb2.ServeOptions,
        call: CallInfo,
        *,
        takes_slot: bool = True,
    ) -> AbstractContextManager[AdmittedRequest]:
        """Admits a permitted request to its instance until the end of a block, to enter now. Raises as Instance.admit.

        Raises INVALID_ARGUMENT naming an option that is out of range.
        """
        handling = handling_of(options)
        admission = instance.admit(
            permit.request_id,
            name=permit.model,
            keep_alive_seconds=handling.keep_alive_seconds,
            priority=granted_priority_of(options),
            takes_slot=takes_slot,
            cache=self.caches.of_request(
                permit.model,
                permit.tenant,
                handling,
                permit.prompt_source if permit.HasField("prompt_source") else None,
            ),
        )
        return _Attempt(admission, call, permit.model)

    def admit(self, ticket: Any) -> tuple[ticket_pb2.TicketClaims, Instance]:
        """Checks a ticket; returns its permit and its instance.

        Raises TICKET_INVALID, TICKET_EXPIRED or MODEL_NOT_FOUND; CLOCK_OFF while this machine's clock is too far off.
        """
        permit = self._gate.admit(ticket, now=self._clock.utc_now().timestamp())
        if permit.moved_prefix:
            raise WeftError(Reason.TICKET_INVALID, "the ticket is for a stored prompt, not for a request")
        if self._clock_offset is not None and self._clock_offset.is_refused:
            raise clock_off(self._identity.runner, self._clock_offset.seconds)
        instance = self._instances.get(permit.model)
        if instance is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {permit.model}")
        if instance.config.remote and not permit.allow_remote:
            raise WeftError(Reason.TICKET_INVALID, "the ticket does not allow this request a remote model")
        return permit, instance

    def started(self, permit: ticket_pb2.TicketClaims) -> event_pb2.InferenceEvent:
        """Returns the event that names the runner and the model of the attempt."""
        return event_pb2.InferenceEvent(
            started=event_pb2.Started(
                runner=self._identity.runner,
                runner_incarnation=self._identity.incarnation,
                model=permit.model,
                attempt=permit.attempt,
            )
        )

    def complete(self, receipt: receipt_pb2.Receipt, permit: ticket_pb2.TicketClaims, instance: Instance) -> None:
        """Adds the runner's part to a backend's receipt."""
        receipt.request_id = permit.request_id
        receipt.model = permit.model
        receipt.model_digest = instance.digest
        receipt.adapter_digest = instance.adapter_digests.get(permit.model, "")
        receipt.host = self._identity.host
        if not instance.memory.holds_devices:
            # Compute time without a leased accelerator is not GPU time.
            receipt.ClearField("gpu_time")
        receipt.left_premises = receipt.left_premises or instance.config.remote


def require_abilities(instance: Instance, model: str, payload: Payload) -> None:
    """Raises MODALITY_UNSUPPORTED if the model is known not to support the payload's last turn.

    Routers check this first, by the runner's report. This check is for requests granted before that report, and for
    languages, which routers do not check.
    """
    if untaken := untaken_words_of(payload, instance.capabilities_of(model)):
        raise WeftError(Reason.MODALITY_UNSUPPORTED, f"{model} {untaken}")


def _log_attempt(event: str, call: CallInfo, model: str) -> None:
    """Logs the beginning or the end of an attempt, to find a request in the log."""
    if not log.writes_debug():
        return
    log.debug(event, request_id=call.request_id, trace_id=trace_id_of(call.traceparent), model=model)


def _log_failure(call: CallInfo, model: str, error: WeftError) -> None:
    """Logs a failed attempt in one line."""
    log.warning(
        "attempt failed",
        request_id=call.request_id,
        trace_id=trace_id_of(call.traceparent),
        model=model,
        reason=error.reason.name.lower(),
        message=None if quotes_model(error.reason) else error.log_message,
    )


class _Attempt:
    """An admitted request whose beginning, end or failure is logged."""

    __slots__ = ("_admission", "_call", "_model")

    def __init__(self, admission: AbstractContextManager[AdmittedRequest], call: CallInfo, model: str) -> None:
        self._admission, self._call, self._model = admission, call, model

    def __enter__(self) -> AdmittedRequest:
        _log_attempt("attempt begun", self._call, self._model)
        return self._admission.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            _log_attempt("attempt ended", self._call, self._model)
        elif isinstance(error, WeftError):
            _log_failure(self._call, self._model, error)
        self._admission.__exit__(kind, error, trace)


def call_info(
    permit: ticket_pb2.TicketClaims,
    instance: Instance,
    context: CarriedContext,
    *,
    whole: bool = False,
    joins_texts: bool = False,
    ends_loops: bool = False,
    provider_headers: Mapping[str, str] = MappingProxyType({}),
) -> CallInfo:
    """Returns the call context for a backend. `whole`: the answer is not streamed. For the others see CallInfo."""
    metadata = {key: str(value) for key, value in context.invocation_metadata() if key == TRACEPARENT}
    left = context.time_remaining()
    answer_by = None if left is None else asyncio.get_running_loop().time() + left
    return CallInfo(
        request_id=permit.request_id,
        traceparent=traceparent_of(metadata),
        adapter="" if permit.model == instance.model else permit.model,
        answer_by=answer_by,
        whole=whole,
        joins_texts=joins_texts,
        ends_loops=ends_loops,
        provider_headers=provider_headers,
    )
