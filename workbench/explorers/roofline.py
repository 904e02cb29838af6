"""The roofline as an explorer: every kernel and length a point, its name on hover and by the arrow keys."""

from collections.abc import Mapping

from workbench.explorers import Explorer


def roofline(devices: Mapping[str, dict]) -> Explorer:
    """devices: {name: `analysis.roofline.device`}; the first is shown first."""
    data = [{**device, "name": name, "points": device["points"].to_dict("records")} for name, device in devices.items()]
    return Explorer("Roofline", ["roofline"], {"devices": data})
