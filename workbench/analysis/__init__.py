"""What a notebook asks: tables and sentences from patterns, predictions and records."""

from workbench import files_of

__getattr__ = files_of(__name__)
