"""The outbound link of a dial-out runner."""
