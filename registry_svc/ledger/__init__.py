"""The book of accelerator memory: who holds how much on which device of which host."""
