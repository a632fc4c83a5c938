"""What a request is and needs."""
