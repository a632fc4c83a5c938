"""The environment of diffusers."""
