"""Runtime comfyui: workflows of images in a ComfyUI that runs already, or that weft starts."""
