"""The registry: who is in the mesh, what each can do right now, and who has gone."""
