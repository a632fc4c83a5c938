"""Who may have an operation carried out: tokens, signatures, and the rules."""
