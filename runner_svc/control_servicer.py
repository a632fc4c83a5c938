"""gRPC translation for the runner's control plane: look at it, wake, load and unload its models, read their logs."""

from collections.abc import AsyncGenerator, Mapping

import grpc

from runner_svc import description
from runner_svc.instance import Instance
from runner_svc.report import RunnerReport
from runner_svc.supervise.logs import LogBatch
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_NAME_CHARS
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering

MAX_LOG_LINES = 1000


class RunnerServicer(runner_service_pb2_grpc.RunnerServiceServicer):
    """See RunnerService."""

    def __init__(self, report: RunnerReport, instances: Mapping[str, Instance]) -> None:
        self._report = report
        self._instances = instances

    async def Describe(  # noqa: N802 - the rpc's name
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse]
    ) -> pb.DescribeResponse:
        """See RunnerService.Describe."""
        async with answering(context):
            _require_line_count("log_line_count", request.log_line_count)
            return self._report.describe(request.log_line_count)
        raise AssertionError("abort has raised")

    async def Wake(  # noqa: N802 - the rpc's name
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext[pb.WakeRequest, pb.WakeResponse]
    ) -> pb.WakeResponse:
        """See RunnerService.Wake."""
        async with answering(context):
            await self._instance(request.model).wake()
            return pb.WakeResponse()
        raise AssertionError("abort has raised")

    async def Load(  # noqa: N802 - the rpc's name
        self, request: pb.LoadRequest, context: grpc.aio.ServicerContext[pb.LoadRequest, pb.LoadResponse]
    ) -> pb.LoadResponse:
        """See RunnerService.Load."""
        async with answering(context):
            await self._instance(request.model).load()
            return pb.LoadResponse()
        raise AssertionError("abort has raised")

    async def Unload(  # noqa: N802 - the rpc's name
        self, request: pb.UnloadRequest, context: grpc.aio.ServicerContext[pb.UnloadRequest, pb.UnloadResponse]
    ) -> pb.UnloadResponse:
        """See RunnerService.Unload."""
        async with answering(context):
            await self._instance(request.model).unload()
            return pb.UnloadResponse()
        raise AssertionError("abort has raised")

    async def GetRequest(  # noqa: N802 - the rpc's name
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """See RunnerService.GetRequest."""
        async with answering(context):
            found = [instance.records.find(request.request_id) for instance in self._instances.values()]
            # A request that failed over to another model of this runner has a record at each; the last one counts.
            record = max(filter(None, found), key=lambda record: record.started, default=None)
            if record is None:
                raise WeftError(
                    Reason.NOT_FOUND, f"this runner remembers no request {request.request_id[:MAX_NAME_CHARS]}"
                )
            return pb.GetRequestResponse(record=description.of_request(record), output=record.output)
        raise AssertionError("abort has raised")

    async def TailLogs(  # noqa: N802 - the rpc's name
        self, request: pb.TailLogsRequest, context: grpc.aio.ServicerContext[pb.TailLogsRequest, pb.TailLogsResponse]
    ) -> AsyncGenerator[pb.TailLogsResponse]:
        """See RunnerService.TailLogs."""
        async with answering(context):
            log = self._instance(request.model).backend.log
            _require_line_count("line_count", request.line_count)
            with log.follow(request.line_count) as follower:
                first = follower.take()
                if first.lines:
                    yield self._batch(first)
                while request.follow and await follower.wait():
                    yield self._batch(follower.take())

    def end_tails(self) -> None:
        """End every stream of logs: the runner is stopping."""
        for instance in self._instances.values():
            instance.backend.log.end_followers()

    def _instance(self, model: str) -> Instance:
        instance = self._instances.get(model)
        if instance is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {model[:MAX_NAME_CHARS]}")
        return instance

    def _batch(self, batch: LogBatch) -> pb.TailLogsResponse:
        return pb.TailLogsResponse(lines=map(self._report.tellable, batch.lines), lost_line_count=batch.lost_line_count)


def _require_line_count(field: str, count: int) -> None:
    if not 0 <= count <= MAX_LOG_LINES:
        raise invalid_field(field, f"must be 0 to {MAX_LOG_LINES}")
