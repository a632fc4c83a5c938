"""The runtime diffusers: pipelines of images in a process of their own."""
