"""A host's accelerators and the processes that hold their memory, as observed on the host."""
