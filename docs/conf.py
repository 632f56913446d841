"""How Sphinx builds these pages: ``make docs``."""

import torch_tp2d

project = "torch_tp2d"
release = version = torch_tp2d.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# What docstrings name beside the public functions is code, not a page.
nitpicky = False
