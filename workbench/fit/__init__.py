"""What fits on a card that need not be there: cards, their allocator, traces of programs, the longest sequence."""

from workbench import files_of

__getattr__ = files_of(__name__)
