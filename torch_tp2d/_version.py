"""The version of the package that is installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("torch_tp2d")
except PackageNotFoundError:  # Imported from a checkout that is not installed.
    __version__ = "0+unknown"
