"""The math on local shards, each an autograd.Function. No DTensor below this line."""
