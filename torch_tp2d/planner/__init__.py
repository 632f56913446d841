"""What a plan costs, and which to choose."""
