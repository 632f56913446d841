"""The parallel styles, a file or folder each, and the code that they have in common.

``base`` defines what a style is and what a styled module runs, ``boundary`` how tensors enter and
leave a style. ``module_kinds`` recognizes the kind of a module, and ``surroundings`` holds what the
plan says of the tensors around it.
"""
