"""Chat templates: rendered in a process that can be killed."""
