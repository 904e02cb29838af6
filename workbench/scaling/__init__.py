"""Several cards, measured: strategies, sweeps over them, the link between ranks."""

from workbench import files_of

__getattr__ = files_of(__name__)
