"""The time of a request on accelerators, from its receipt: one rule for headers and for usage."""

from enum import StrEnum

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import receipt_pb2


class TimeSource(StrEnum):
    """Where a time on accelerators comes from."""

    DEVICE = "device"
    """The request's share of what the devices did, as measured."""
    ENGINE = "engine"
    """The engine's own report, which has the whole time of requests that are computed together."""


def accelerator_time(receipt: receipt_pb2.Receipt) -> tuple[Duration, TimeSource] | None:
    """Returns the measured share of the devices' time, else the engine's report; None: neither is known."""
    if receipt.device_usage.HasField("device_time"):
        return receipt.device_usage.device_time, TimeSource.DEVICE
    if receipt.HasField("gpu_time"):
        return receipt.gpu_time, TimeSource.ENGINE
    return None
