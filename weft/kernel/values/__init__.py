"""Names, addresses, units and other plain values."""
