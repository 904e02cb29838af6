"""Pictures, a file for each subject: each function draws from a DataFrame or a pattern alone and returns a Figure."""

from workbench import files_of

__getattr__ = files_of(__name__)
