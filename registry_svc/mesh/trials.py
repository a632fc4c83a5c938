"""Verdicts of people about the pairs of a trial; they are in the trial's record."""

from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.policy.limits import require_room
from weft.api.registry.v1 import trial_service_pb2 as pb
from weft.api.registry.v1 import trial_service_pb2_grpc
from weft.api.registry.v1.trial_pb2 import Trial
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import MAX_NAME_CHARS, MAX_TENANT_CHARS, require_token
from weft.kernel.values.unknown_names import unknown_name

MAX_VERDICTS = 2_000
"""Maximum verdicts of one trial, including those about pairs that are deleted."""


class TrialServicer(AnsweringServicer, trial_service_pb2_grpc.TrialServiceServicer):
    """See TrialService in the contract."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    @override
    async def JudgePair(
        self, request: pb.JudgePairRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.JudgePairResponse:
        check_message(request)
        require_token(request.task, "task", MAX_NAME_CHARS)
        tenant = require_token(request.tenant, "tenant", MAX_TENANT_CHARS) if request.tenant else ""
        known = caller()
        own = tenant if known.names_tenants else known.tenant_for(tenant, "tenant")
        return pb.JudgePairResponse(trial=await self._core.write(lambda: self._judge(request, own)))

    async def _judge(self, request: pb.JudgePairRequest, tenant: str) -> Trial:
        declared = self._core.mesh.documents[ResourceKind.TRIAL].declared(request.trial)
        if declared is None or tenant not in ("", declared.manifest.tenant):
            raise unknown_name(ResourceKind.TRIAL.value, request.trial)
        record = Trial()
        record.CopyFrom(declared)
        if request.task not in record.verdicts:
            require_room(f"verdicts in the trial {request.trial}", len(record.verdicts), 1, MAX_VERDICTS)
        record.verdicts[request.task] = request.verdict
        await self._core.store.save_documents([record])
        self._core.publish(self._core.mesh.declare([record]))
        return record
