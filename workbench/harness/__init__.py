"""What measurements stand on: processes, ranks, outcomes, records, the machine."""

from workbench import files_of

__getattr__ = files_of(__name__)
