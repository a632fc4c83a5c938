"""The error tree, reasons of failures, and the texts of errors."""
