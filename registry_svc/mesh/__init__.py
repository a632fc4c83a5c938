"""The mesh: sessions of runners, declarations of operators, and watches of changes."""
