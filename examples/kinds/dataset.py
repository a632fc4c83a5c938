"""Datasets that models are evaluated with."""

from weft.api.registry.v1.dataset_pb2 import Dataset, DatasetManifest

from weft.documents.kind import DeclaredKind, PointsTo, ReferenceField
from weft.documents.resource_kinds import ResourceKind

KIND = DeclaredKind(
    kind=ResourceKind("dataset"),
    declared=DatasetManifest,
    record=Dataset,
    summary="A dataset that a model is evaluated with.",
    references=(ReferenceField(name="model", to=PointsTo.MODEL_OR_POOL, key="model", words="model"),),
    shares_namespace=False,
)
