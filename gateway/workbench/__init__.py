"""The workbench: the gateway's web page at `/ui`."""
