"""Models made of the layers: a transformer over any pattern, and LongNet."""

from workbench import files_of

__getattr__ = files_of(__name__)
