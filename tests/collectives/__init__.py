"""Collectives and products on real ranks, and what is made of them alone."""
