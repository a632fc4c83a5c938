"""A fake of ComfyUI: its HTTP API, websocket and worker, with nodes that make small images and fail on demand."""
