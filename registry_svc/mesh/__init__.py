"""The mesh: sessions of runners, declarations of operators, and the watch of what changes."""
