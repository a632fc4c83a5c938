"""JSON and encoded texts, read and written within bounds."""
