"""The registry: the runners of the mesh, and what each can serve now."""
