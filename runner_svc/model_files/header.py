"""The dimensions of a model, from file headers of either format."""

from dataclasses import dataclass

from runner_svc.policy.memory_estimate import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """The facts that every format has. 0 and empty: not in the files."""

    tensor_count: int = 0
    weight_bytes: int = 0
    """Size of all tensors; if the type of one is unknown, size of everything after the header."""
    context_tokens: int = 0
    """The model's training context."""
    layers: int = 0
    embedding_length: int = 0
    vocabulary: int = 0
    """Number of tokens to choose from; 0 for an encoder, which generates no tokens."""
    heads: int = 0
    """Attention heads of the layer with the most."""
    kv_heads: tuple[int, ...] = ()
    """Key-value heads of each layer; empty: unknown."""
    key_length: int = 0
    value_length: int = 0
    """Numbers per value of a head; `key_length` per key."""
    sliding_window: int = 0
    """Maximum number of tokens that some layers attend to."""

    @property
    def shape(self) -> ModelShape | None:
        """The shape of the model for estimates; None: a number is missing."""
        kv_heads = sum(self.kv_heads)
        if not (self.weight_bytes and self.layers and kv_heads and self.key_length and self.value_length):
            return None
        return ModelShape(
            weight_bytes=self.weight_bytes,
            keys_per_token=kv_heads * self.key_length,
            values_per_token=kv_heads * self.value_length,
            layers=self.layers,
            heads=self.heads,
            embedding_length=self.embedding_length,
            vocabulary=self.vocabulary,
        )
