"""The adapter of a request."""

from vllm.recorded import Fields


class LoRARequest(Fields):
    recorded = ("LoRARequest",)
