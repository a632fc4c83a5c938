"""What a host's accelerators are and who holds their memory, as seen from the host itself."""
