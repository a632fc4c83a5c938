"""The life cycle of services, and the health of a process."""
