"""Integrations with other libraries, each of which is imported by its own module only."""
