"""Whole models by their plans."""
