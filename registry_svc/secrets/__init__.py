"""Secrets of the mesh, such as the API keys of providers, encrypted at rest."""
