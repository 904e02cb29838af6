"""The parts of `workbench report`: parameters, the kernel, the page, the index."""
