"""ComfyUI, running or started by weft, as the extension `comfyui`."""
