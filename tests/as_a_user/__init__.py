"""What a user starts: tutorials, notebooks, benchmarks, integrations."""
