"""Every private name of torch that the package uses, and what it is used for.

Under torch's name without the underscore where they are torch's unchanged. Each has a test in
``tests/arithmetic/test_torch_compat*.py``, whose name tells what a release of torch has moved;
``test_package.py`` allows no private names elsewhere.
"""
