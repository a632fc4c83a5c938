"""The devices of an engine, as environment variables of its process."""

from runner_svc.backend.port import LoadOrder

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""Numbers devices as the memory ledger does; CUDA's default puts the fastest device first."""


def uses_no_device(order: LoadOrder) -> bool:
    """Whether the load must not use any device."""
    return order.shares == ()


def hidden_devices(order: LoadOrder) -> dict[str, str]:
    """Returns environment variables that hide other devices from the engine; empty: it sees the runner's devices."""
    if uses_no_device(order):
        return {VISIBLE_DEVICES: ""}
    if order.shares is None or not order.hides_devices:
        return {}
    return {DEVICE_ORDER: BY_BUS, VISIBLE_DEVICES: ",".join(str(share.device_index) for share in order.shares)}
