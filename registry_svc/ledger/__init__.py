"""The VRAM ledger: who holds how much accelerator memory on which device of which host."""
