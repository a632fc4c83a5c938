"""What an engine is told about the devices that a load may use; the same for every engine over llama.cpp."""

from runner_svc.backends.port import LoadOrder

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""The order in which the book numbers devices; CUDA's own puts the fastest first."""
MEBIBYTE = 1024 * 1024


def uses_no_device(order: LoadOrder) -> bool:
    """Whether the load may use none at all."""
    return order.shares == ()


def hidden_devices(order: LoadOrder) -> dict[str, str]:
    """Environment variables by which the engine sees its devices and no other; empty: what the runner sees itself."""
    if uses_no_device(order):
        return {VISIBLE_DEVICES: ""}
    if order.shares is None or not order.hides_devices:
        return {}
    return {DEVICE_ORDER: BY_BUS, VISIBLE_DEVICES: ",".join(str(share.index) for share in order.shares)}


def tensor_split(order: LoadOrder) -> list[int]:
    """Parts of the model for each device that the engine sees, in MiB; empty where there is nothing to split.

    Where devices are not hidden the engine counts all of them, so those between the shares get nothing.
    """
    shares = order.shares or ()
    if len(shares) < 2:
        return []
    parts = {share.index: max(1, share.bytes // MEBIBYTE) for share in shares}
    if order.hides_devices:
        return [parts[share.index] for share in shares]
    return [parts.get(index, 0) for index in range(shares[-1].index + 1)]
