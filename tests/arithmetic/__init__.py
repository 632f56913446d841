"""No processes: placement rules, costs, bytes that are counted, torch as we take it."""
