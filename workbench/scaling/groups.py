"""Named groups of cases by which several cards are measured, for `scaling.sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, checks, layouts, orderings
from workbench.patterns.dilated import geometric
from workbench.probes.case import Case

SIZES = ((12, 64), (8, 128))  # heads, head_dim
GRID, RADIUS = (1024, 1024), 8
BILLION = 1 << 30
SPARSE = layouts.local(19) | layouts.strided(32)  # of the 2,048 blocks of 128 of 262,144: 5 %


def groups(device: str = "cuda", dtype: str = "bfloat16") -> dict[str, Callable[[], dict[str, Case]]]:
    """{name: a function that makes {label: Case}}."""

    def case(pattern, n, heads=12, d=64, mode="fwd") -> Case:
        return Case(pattern, n, heads, d, dtype, "auto", mode, device)

    found = {}
    for n in (32_768, 131_072):
        for mode in ("fwd", "fwdbwd"):
            found[f"dense {mode} {n}"] = lambda n=n, mode=mode: {
                f"dense {h}x{d} {mode} {n}": case(Dense(), n, h, d, mode) for h, d in SIZES
            }
    found["dense causal 131072"] = lambda: {
        f"dense causal {h}x{d} fwd 131072": case(Dense(causal=True), 131_072, h, d) for h, d in SIZES
    }
    for n in (131_072, 1_048_576):
        found[f"longnet {n}"] = lambda n=n: {
            f"longnet-geometric {mode} {n}": case(geometric(n), n, mode=mode) for mode in ("fwd", "fwdbwd")
        }
    found["block-sparse 262144"] = lambda: {
        f"local and strided {mode} 262144": case(BlockSparse(SPARSE), 262_144, mode=mode) for mode in ("fwd", "fwdbwd")
    }
    found["dilation 131072"] = lambda: {
        f"dilated r={r} fwd 131072": case(Dilated((32_768, 131_072), (r, r)), 131_072) for r in (1, 2)
    }
    # for four cards and more
    found["dense 524288"] = lambda: {
        f"dense 12x64 {mode} 524288": case(Dense(), 524_288, mode=mode) for mode in ("fwd", "fwdbwd")
    }
    found["longnet 4194304"] = lambda: {
        f"longnet-geometric {mode} 4194304": case(geometric(1 << 22), 1 << 22, mode=mode) for mode in ("fwd", "fwdbwd")
    }
    found["neighborhood 1048576"] = lambda: {
        f"neighborhood {name} fwd 1048576": case(Neighborhood(GRID, RADIUS, getattr(orderings, name)(GRID)), 1 << 20)
        for name in ("row_major", "hilbert")
    }
    for n in (BILLION // 4, BILLION):
        found[f"longnet {n}"] = lambda n=n: {
            f"longnet-geometric 2x32 float16 fwd {n}": Case(geometric(n), n, 2, 32, "float16", device=device)
        }
    return found


def cases(names: Iterable[str], device: str = "cuda", dtype: str = "bfloat16") -> dict[str, Case]:
    """{label: Case} of all groups whose name begins with one of `names`, or of all for "all". ValueError for a name
    with which no group begins."""
    found, names = groups(device, dtype), checks.listed("groups", names)
    for name in names:
        if name != "all" and not (isinstance(name, str) and name and any(x.startswith(name) for x in found)):
            raise ValueError(f"group={name!r}: want 'all', or what one of these begins with: {', '.join(found)}")
    chosen = [make for x, make in found.items() if "all" in names or x.startswith(tuple(names))]
    return {label: case for make in chosen for label, case in make().items()}
