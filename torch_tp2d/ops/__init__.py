"""The math on local shards, as autograd functions. DTensors stay outside of this package."""
