"""How one of several candidates is chosen: one small policy per file, over what is free."""
