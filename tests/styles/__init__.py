"""Styles, one module at a time, and what they refuse."""
