"""The runtime diffusers: pipelines of images in their own process."""
