"""The method by which an endpoint picker holds the slot of an engine; pickers and runners share it."""

from weft.api.runner.v1 import engine_lane_service_pb2
from weft.kernel.rpc import RpcMethod

HOLD_SLOT = RpcMethod(
    engine_lane_service_pb2.DESCRIPTOR.services_by_name["EngineLaneService"].methods_by_name["HoldSlot"]
)
