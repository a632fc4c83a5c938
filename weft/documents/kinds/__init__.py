"""The kinds of resources that operators declare, one module for each."""
