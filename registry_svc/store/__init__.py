"""What the registry remembers across a restart: the port, its SQL implementation and the migrations."""
