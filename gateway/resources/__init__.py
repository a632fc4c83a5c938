"""Resources of the mesh as JSON under `/api/v1`, read from and written to the registry."""
