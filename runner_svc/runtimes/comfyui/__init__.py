"""Runtime comfyui: image workflows in an external ComfyUI, or in one that weft starts."""
