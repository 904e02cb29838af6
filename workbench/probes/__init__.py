"""Probes of one card, a module and a verb each: timing.time, memory.measure, roofline.ceilings, error.of,
speed.sweep, suite.run, validity.check. What is predicted for any card is in `workbench.fit`, several cards are in
`workbench.scaling`; their `estimate`, `frontier`, `layer` and `link` are found here, too.
"""

from workbench import files_of

_ELSEWHERE = {name: f"workbench.fit.{name}" for name in ("estimate", "frontier", "layer")}
__getattr__ = files_of(__name__, **_ELSEWHERE, link="workbench.scaling.link")
