"""Processes and their faults: `processes` (a call in a fresh process) and `ranks` (several that work together)."""
