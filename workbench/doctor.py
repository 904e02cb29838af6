"""What works on this machine, and what does not and why: `workbench doctor`.

Nothing is taken on trust: each backend runs small cases in each dtype, forward and backward, held to the oracle.
"""

import torch

from workbench import requirements
from workbench.engines.check import DTYPES
from workbench.engines.dispatch import BACKENDS
from workbench.harness import machine
from workbench.patterns import BlockSparse, Dilated, Neighborhood, layouts, orderings
from workbench.probes import error
from workbench.probes.case import Case

CASES = {
    "dilated": (Dilated([64, 256], [1, 2], causal=True), 300),
    "block-sparse": (BlockSparse(layouts.local(0) | layouts.global_(1), block_size=128, causal=True), 500),
    "neighborhood": (Neighborhood((8, 12), 1, orderings.hilbert((8, 12))), 96),
}
MODES = {"fwd": "forward", "fwdbwd": "backward"}


def main() -> int:
    """Print the report; 0 if the package is usable here: all that it needs is installed, and all that runs is right."""
    missing = requirements.unmet(requirements.declared())
    for name, value in facts().items():
        print(f"{name:14}{value}")
    print(f"{'packages':14}{'all that is needed' if not missing else '; '.join(missing)}\n")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Small cases on {device}, against the float64 oracle:")
    wrong = 0
    for case, (pattern, n) in CASES.items():
        for backend in BACKENDS:
            for mode, title in MODES.items():
                verdicts = {d: verdict(pattern, n, d, backend, mode, device) for d in DTYPES}
                wrong += sum(v.startswith(("WRONG", "FAILED")) for v in verdicts.values())
                for line in grouped(verdicts):
                    print(f"{case:14}{backend:11}{title:10}{line}", flush=True)
    if missing or wrong:
        print(f"\nNot usable as it is: {len(missing)} packages missing or of another version, {wrong} cases wrong.")
        return 1
    print("\nUsable: whatever ran is as exact as its dtype allows.")
    return 0


def facts() -> dict[str, object]:
    """What the machine is, in the order in which it is printed."""
    found = {name: value or "none" for name, value in machine.describe().items()}
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        found[f"card {i}"] = f"{card.name}, {card.total_memory / 2**30:.1f} GiB"
    return found


def verdict(pattern, n: int, dtype: torch.dtype, backend: str, mode: str, device: str) -> str:
    """In a few words, how a backend did on `n` tokens: exact, no (and why not), WRONG or FAILED."""
    try:
        row = error.of(Case(pattern, n, 2, 32, dtype, backend, mode, device))
    except Exception as e:  # whatever it is, it is this machine's answer
        return f"FAILED: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    if row["status"] != "ok":
        return f"no: {row['error']}"
    if not row["worst"] <= 1:
        return f"WRONG: {row['worst']:.3g} times the error allowed"
    return "exact"


def grouped(verdicts: dict[torch.dtype, str]) -> list[str]:
    """One line for each verdict, with the dtypes that share it."""
    shared = {}
    for dtype, words in verdicts.items():
        shared.setdefault(words, []).append(str(dtype).removeprefix("torch."))
    return [f"{', '.join(names)}: {words}" for words, names in shared.items()]
