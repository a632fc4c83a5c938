"""The routers of the mesh and their sessions."""
