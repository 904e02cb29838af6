"""Will it fit? Ways to run attention on a card that need not be there, by what each needs: a line per way.

Dimensions: N tokens, H heads, D head_dim.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pandas as pd

from workbench.engines import dispatch, torch_rules
from workbench.fit import cards, estimate, frontier
from workbench.fit.model import Model
from workbench.harness.narrate import title
from workbench.harness.outcome import attempt
from workbench.harness.processes import imported
from workbench.patterns import Dense, Dilated, Pattern, checks
from workbench.probes import catalog
from workbench.probes.case import BASELINES, FUSED, Case

USUAL = ("dense", "longnet-paper", "window-blocks")
LISTS = 1 << 18  # the lists of blocks for more tokens take seconds to make
STEP = 0.02  # 0.2 % for a prediction, see `frontier.search`


def ways(
    names: Iterable[str], patterns: Mapping[str, catalog.Maker] = catalog.PATTERNS, causal=False, device="cuda",
    kind: type[Case] = Case, **sizes,
) -> dict[str, frontier.Lengths]:  # fmt: skip
    """{"pattern, backend": the Case of that at N}, for `table`, `frontier.search` and `frontier.sweep`.

    names: such pairs: a name of `patterns`, or a pattern's spec as JSON, and a backend of `Case`'s. kind: Case, or
    `model.Model`. sizes: its batch, heads, head_dim, dtype and mode, and a model's own. ValueError for a name that is
    none.
    """
    found = {}
    for name in checks.listed("ways", names):
        what, comma, backend = str(name).rpartition(", ")
        if not (comma and backend):
            raise ValueError(f"way={name!r}: want 'pattern, backend', the pattern one of {', '.join(patterns)}")
        make = catalog.maker(what, patterns)
        _check(backend)

        def at(n: int, make=make, backend=backend) -> Case:
            return kind(make(n, causal), n, backend=backend, device=device, **sizes)

        found[name] = at
    return found


def executions(
    names: Iterable[str], backends: Iterable[str], causal: bool, card: cards.Card, kind: type[Case] = Case, **sizes
) -> dict[str, frontier.Lengths]:
    """`ways` for every name with every backend.

    names: of `catalog.PATTERNS`, or a pattern's spec as JSON; USUAL if empty. backends: as in `Case`; if empty those
    that run the pattern well: of dense attention those of torch's kernels that take the call on the card
    (`torch_rules`), "auto" where none does.
    sizes: as of `ways`. ValueError for a name that is none, and for sizes that no call has.
    """
    names, backends, pairs = checks.listed("patterns", names), checks.listed("backends", backends), []
    for name in names or USUAL:
        pattern = catalog.maker(name)(frontier.FIRST, causal)
        case = kind(pattern, frontier.FIRST, device="cuda", **sizes)
        usual = ("triton", "torch")
        if isinstance(case, Model):
            usual = ("auto",)
        elif isinstance(pattern, Dense):
            taken = torch_rules.kernels(
                card.capability, case.dtype, case.head_dim, grouped=case.kv_heads != case.heads, n=case.n, nq=case.nq,
                causal=pattern.causal, gradients=case.mode == "fwdbwd",
            )  # fmt: skip
            usual = tuple(x for x in taken if x in FUSED) or ("auto",)
        pairs += [f"{name}, {backend}" for backend in backends or usual]
    return ways(pairs, causal=causal, kind=kind, **sizes)


def table(
    ways: Mapping[str, Callable[[int], Case]], card: str | cards.Card, *, n: int | None = None,
    budget_bytes: int | None = None, seconds: float = 60.0,
) -> pd.DataFrame:  # fmt: skip
    """A line per way (`executions`), all of it predicted: longest_n, longest_ms there (None where no time is known,
    which then limits nothing), and limiter, what stands in the way of more.

    With n, and ranked by ms there, what fits first: fits, where it is not known to compute wrongly; device_bytes, the
    context included; ms, None where this is not known; pairs_share, of dense attention's pairs, 1.0 being exact. note:
    why there is no such number, or what is wrong. Of models also longest_batch, the largest that fits at n.
    budget_bytes, seconds: as `frontier.search`'s. limiter "search": of patterns that are lists of blocks, LISTS.
    """
    card = cards.find(card)
    n = None if n is None else checks.whole("n", n, 1)
    lines, options = [], {"card": card, "budget_bytes": budget_bytes, "say": None}
    for name, at in checks.named("ways", ways, "a function of N that gives a Case").items():
        first = at(frontier.FIRST)
        limit_n = LISTS if listed(first.pattern) else 1 << 30
        row = frontier.search(at, seconds=seconds, limit_n=limit_n, step=STEP, **options)
        line = {"way": name, "longest_n": row["n"], "longest_ms": row["predicted_ms"], "limiter": row["limiter"]}
        line |= {"note": row["error"]}
        if n is not None:
            line |= _at(at, n, card, row["budget_bytes"])
            if isinstance(first, Model):
                of = {"first": max(1, (row["n"] or 0) // n), "limit_n": 1 << 20, "grain": 1, "step": 1e-6}
                line["longest_batch"] = frontier.search(lambda b, at=at: replace(at(n), batch=b), **of, **options)["n"]
        lines.append(line)
    frame = pd.DataFrame(lines)
    if n is not None:
        frame = frame.sort_values(["fits", "ms"], ascending=[False, True], kind="stable", na_position="last")
    return frame.reset_index(drop=True)


def words(frame: pd.DataFrame, card: cards.Card, sizes: dict, n, budget_bytes, seconds) -> str:
    """A table of `table`, made with these options, as text."""
    given = card.total_bytes - card.context_bytes if budget_bytes is None else budget_bytes
    kv = f" ({sizes['kv_heads']} of keys)" if sizes.get("kv_heads") else ""
    lines = [
        f"{card.name}: {given / 2**30:.2f} GiB for tensors, {card.context_bytes / 2**30:.2f} for the CUDA context, of "
        f"{card.total_bytes / 2**30:.2f}; at most {seconds:g} s per call",
        f"batch {sizes['batch']}, {sizes['heads']} heads{kv} x {sizes['head_dim']}, {sizes['dtype']}, {sizes['mode']}; "
        "predicted, nothing is measured",
    ]
    if "layers" in sizes:
        step = f", {sizes['optimizer']}" + ", checkpointed" * sizes["checkpoint"] if sizes["mode"] == "fwdbwd" else ""
        width = sizes["heads"] * sizes["head_dim"]
        lines.append(f"a model: {sizes['layers']} layers of width {width:,}, vocabulary {sizes['vocab']:,}{step}")
    searched, longest = frame["limiter"].eq("search"), frame["longest_n"]  # no limit up to the longest N tried
    if n is not None:
        longest = longest.mask(searched & frame["fits"], longest.clip(lower=n))
    shown = pd.DataFrame({"execution": frame["way"], "longest N": longest.map(_number)})
    shown["longest N"] = shown["longest N"].where(~searched, "at least " + shown["longest N"])
    limiter = frontier.limiters(frame.rename(columns={"longest_n": "n", "longest_ms": "predicted_ms"}))
    shown["limited by"] = limiter.fillna("").map(title).mask(searched, "search ends there")
    if n is not None:
        lines[1] += f"; the right half is at N = {n:,}"
        late = frame["fits"] & (frame["ms"].astype(float) > 1000 * seconds)
        shown["fits"] = frame["fits"].map({True: "yes", False: "no"}).mask(late, "too slow")
        shown["device GiB"] = frame["device_bytes"].astype(float).map(lambda x: _number(x / 2**30, ".2f"))
        shown["ms"] = frame["ms"].astype(float).map(lambda x: _number(x, ",.3g" if x < 1000 else ",.0f"))
        if "longest_batch" in frame:
            shown["largest batch"] = frame["longest_batch"].map(_number)
        share = frame["pairs_share"].astype(float)
        shown["share of dense pairs"] = share.map(lambda x: _number(x, ".3g" if x < 1 else ".0f"))
    shown["note"] = frame["note"].fillna("").str.slice(0, 100)
    return "\n".join([*lines, "", aligned(shown, ("execution", "limited by", "note"))])


def aligned(shown: pd.DataFrame, left: tuple[str, ...]) -> str:
    """A table of strings as text, a line a row; the columns named in `left` begin where their header does."""
    rows = [shown.columns.tolist(), *shown.to_numpy().tolist()]
    widths = [max(len(row[x]) for row in rows) for x in range(len(rows[0]))]
    sides = [str.ljust if name in left else str.rjust for name in shown.columns]
    return "\n".join("  ".join(s(x, w) for s, x, w in zip(sides, row, widths, strict=True)).rstrip() for row in rows)


def _number(x, form: str = ",.0f") -> str:
    return "?" if x is None or x != x else format(x, form)


def _at(at: frontier.Lengths, n: int, card: cards.Card, budget_bytes: int) -> dict:
    """What a way needs at n, and whether the budget has it."""

    def traced() -> tuple[Case, estimate.Estimate]:
        case = at(n)
        least = case.dtype.itemsize * case.batch * case.head_dim * n * 2 * (case.heads + case.kv_heads)
        if n > LISTS and listed(case.pattern) and least > budget_bytes:  # its lists may take minutes
            raise ValueError(f"q, k, v and out alone are {least / 2**30:,.2f} GiB")
        return case, estimate.trace(case, card)

    outcome = attempt(traced)
    if outcome.status != "ok":
        return {"fits": False, "device_bytes": None, "ms": None, "pairs_share": None, "note": outcome.error}
    case, found = outcome.result
    reserved = frontier.reserves(found, budget_bytes)
    device = found.device_bytes if reserved is None else reserved + card.context_bytes
    return {
        "fits": reserved is not None and not found.wrong, "device_bytes": device, "ms": found.milliseconds,
        "pairs_share": case.pattern.pairs(case.n, case.heads) / (case.heads * case.n**2),
    } | ({"note": found.wrong} if found.wrong else {})  # fmt: skip


def listed(pattern: Pattern) -> bool:
    """Whether a pattern is lists of blocks to the kernels."""
    return not isinstance(pattern, (Dense, Dilated))


def _check(backend: str) -> None:
    known = ("auto", *dispatch.BACKENDS, *BASELINES)
    if ":" in backend:
        imported(backend)
    elif backend not in known:
        raise ValueError(f"backend={backend!r}: want one of {', '.join(known)}, or your own as module:function")
