"""A runtime for weft: a server that continues text by the word n-grams of a file."""
