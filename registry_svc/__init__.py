"""The registry: which runners are in the mesh, what each can serve now, and which have gone."""
