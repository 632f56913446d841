"""The 2-D mesh: layouts as data, and the grid as one rank sees it."""
