"""The parallel styles, a file each, and what they share.

``base`` says what a style is and what a styled module runs, ``boundary`` where tensors enter and
leave one, ``module_kinds`` what kind of module is before us, ``surroundings`` what the plan says of
the tensors around it.
"""
