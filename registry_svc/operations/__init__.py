"""Operations (loads, unloads and flushes): durable, cancellable, governed, and audited."""
