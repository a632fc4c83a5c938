"""The VRAM ledger: leases of accelerator memory by host and device."""
