"""Parameters of an embedding."""

from vllm.recorded import Fields


class PoolingParams(Fields):
    recorded = ("PoolingParams",)
