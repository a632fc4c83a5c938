"""Stored responses: answers that a later request may continue, in the router's database."""
