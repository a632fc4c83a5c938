"""A stand-in for Pillow. Its image files are a mark of their format and JSON."""
