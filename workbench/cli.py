# PYTHON_ARGCOMPLETE_OK
"""The command line: `workbench report`, `list`, `doctor`, `fit`, `scale`. What one needs is imported when it runs."""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import signal
import sys

from workbench import __version__, report
from workbench.report import notebooks as nbs
from workbench.report import parameters

MOST = 1 << 53  # of a number: sums and products of a few stay within 64 bits
LONG = 120  # characters of a list of choices that `list` prints once


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit code: 0 done, 1 something failed, 2 refused, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the encoding lacks is escaped
    try:
        top = parser()
        with contextlib.suppress(ImportError):  # an extra, which does something only where a shell asks
            importlib.import_module("argcomplete").autocomplete(top)
        arguments = top.parse_args(argv)
        code = arguments.command(arguments)
        print(end="", flush=True)
        return code
    except ValueError as refused:
        print(f"workbench: {refused}", file=sys.stderr)
        return 2
    except OSError as failed:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still holds at its end
        if isinstance(failed, BrokenPipeError):
            return 0  # whoever read has left (`| head -1`)
        print(f"workbench: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("workbench: interrupted; what is done is written", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    shells = 'Tab completion: pip install argcomplete, then eval "$(register-python-argcomplete workbench)".'
    top = argparse.ArgumentParser("workbench", description="A workbench for long-sequence attention.", epilog=shells)
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    make = commands.add_parser(
        "report",
        help="run notebooks and write self-contained HTML reports",
        description="Run notebooks in order and write each as one HTML file that needs no network, with an index.",
        epilog='example: workbench report 01 05 --profile quick -p heads 4 -p lengths "[1024, 4096]"',
    )
    add = make.add_argument
    names = add("notebooks", nargs="*", metavar="NOTEBOOK", help="a path or a name in notebooks/ (default: all)")
    names.completer = lambda **_: [path.stem for path in nbs.find()]
    add("--profile", choices=parameters.PROFILES, help="how much (default: gpu where there is CUDA, else quick)")
    add("--out", metavar="DIR", help="where the reports go (default: outputs/reports/<profile>)")
    setting = "set a parameter, in every notebook that declares it (repeatable; see `workbench list`)"
    add("-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "JSON"), help=setting)
    add("--timeout", type=float, default=report.LIMIT_S, metavar="S", help="seconds a cell may take (%(default)g)")
    make.set_defaults(command=_report)

    commands.add_parser("list", help="the notebooks and their parameters").set_defaults(command=_list)
    commands.add_parser("doctor", help="what works here, and what does not and why").set_defaults(command=_doctor)

    fit = commands.add_parser(
        "fit",
        help="will it fit? the longest sequence on a named card, predicted, with no card needed",
        description="The longest sequence that each execution runs on a card, and what stands in the way of a longer "
        "one; at a length N, what each needs, the fastest first. Predicted from the programs: no card is needed.",
        epilog="example: workbench fit --card h100 --heads 12 --mode fwdbwd --pattern longnet-paper --n 1000000",
    )
    add = fit.add_argument
    card = add("--card", default="h100", help="such as h100, a100-80gb, gtx1080 (default: %(default)s)")
    card.completer = lambda **_: [*importlib.import_module("workbench.fit.cards").CARDS]
    n = "search as far at least, and show what each needs for N tokens: 1000000, 1e6, 1M (1,024^2)"
    _add_call(fit, "dense, longnet-paper and window-blocks", n)
    dtypes = ("bfloat16", "float16", "float32")
    add("--dtype", type=_dtype, choices=dtypes, default="bfloat16", help="or bf16, fp16, fp32 (%(default)s)")
    backend = "a backend, or your module:function of q, k and v (default: those that run the pattern well)"
    add("--backend", nargs="+", default=[], metavar="NAME", help=backend)
    add("--budget-gib", type=float, metavar="GIB", help="what tensors may take (default: the card's, less its context)")
    add("--seconds", type=float, default=60.0, metavar="S", help="time limit of a call (default: %(default)g)")
    add("--layers", type=int, metavar="L", help="layers of a transformer that is trained, instead of attention alone")
    add("--width", type=int, metavar="E", help="width of the transformer (default: heads x head_dim)")
    add("--vocab", type=_count, metavar="V", help="its vocabulary (default: 32000)")
    add("--optimizer", choices=("adamw", "adam", "sgd"), help="(default: adamw)")
    add("--checkpoint", action="store_true", default=None, help="keep only each layer's input for the backward")
    fit.set_defaults(command=_fit)

    scale = commands.add_parser(
        "scale",
        help="what several cards give: each way of using them against one card, measured",
        description="Times each way of using several cards against one of them on the same sequence, interleaved; "
        "checks that the result is the same; measures memory, bytes moved and busy share. Where there is no CUDA, the "
        "ranks are processes on this CPU. Every row is a record (in $WORKBENCH_RECORDS or outputs/records), and what "
        "the records have is not measured again.",
        epilog="example: workbench scale --nproc 2 --pattern longnet-geometric dense --n 131072 --mode fwdbwd",
    )
    add = scale.add_argument
    add("--nproc", type=int, default=2, metavar="P", help="cards, or processes (default: %(default)s)")
    _add_call(scale, "dense", "tokens of all cards (default: 131072, CPU: 4096)")
    add("--dtype", type=_dtype, choices=(*dtypes, "float64"), help="or bf16, ..., fp64 (bfloat16, on a CPU float32)")
    strategies = "ways to use the cards, or your module:function of q, k, v and pattern (default: all)"
    add("--strategies", nargs="+", default=[], metavar="NAME", help=strategies)
    add("--samples", type=int, default=9, metavar="S", help="rounds of a case (default: %(default)s)")
    add("--seconds", type=float, default=20.0, metavar="S", help="for a case's rounds (default: %(default)g)")
    add("--within", type=float, metavar="S", help="seconds after which no case is begun; the same line again goes on")
    scale.set_defaults(command=_scale)
    return top


def _add_call(command: argparse.ArgumentParser, patterns: str, n: str) -> None:
    """The options of a call of attention that `fit` and `scale` share; the default patterns, and the help of --n."""
    add, name = command.add_argument, 'a name (others are refused with the list) or {"pattern": "Window", "width": 512}'
    names = add("--pattern", nargs="+", default=[], metavar="NAME", help=f"{name} (default: {patterns})")
    names.completer = lambda **_: [*importlib.import_module("workbench.probes.catalog").PATTERNS]
    add("--n", type=_count, metavar="N", help=n)
    add("--heads", type=int, metavar="H", help="query heads (default: 12, or width / head_dim)")
    add("--kv-heads", type=int, metavar="H", help="key heads (default: as many)")
    add("--head-dim", type=int, default=64, metavar="D", help="(default: %(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="(default: %(default)s)")
    add("--mode", choices=("fwd", "fwdbwd"), help="with gradients? (default: fwd, of a model fwdbwd)")
    add("--causal", action="store_true", help="of the patterns that can be")
    add("--json", action="store_true", help="print JSON: a list of objects, one for each line of the table")


def _count(text: str) -> int:
    """A number of tokens: 1000000, 1_000_000, 1e6, 128K (131,072), 1M (1,048,576)."""
    from fractions import Fraction

    found = re.fullmatch(r"([-+]?[\d_.]+(?:e\+?\d{1,2})?)([kmgt]?)", text.strip().lower())
    try:
        number = Fraction(found[1]) * 1024 ** " kmgt".index(found[2] or " ")
    except (TypeError, ValueError):
        number = Fraction(1, 2)
    if number.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a number of tokens, e.g. 131072, 1e6, 128K or 1M")
    return int(number)


def _dtype(text: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}.get(text, text)


def _report(arguments) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a supervisor's polite end is a Ctrl-C
    asked = {name: _value(name, text) for name, text in arguments.parameters}
    reports = report.run(arguments.notebooks, arguments.profile, arguments.out, asked, arguments.timeout)
    return int(any(done.status != "ok" for done in reports))


def _value(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        word = text.replace("_", "").isalnum()
        hint = f"a string has quotes of its own: -p {name} '\"{text}\"'" if word else str(error)
        raise ValueError(f"parameter {name}={text}: not JSON; {hint}") from None


def _list(arguments) -> int:
    if nbs.root() == nbs.SHARED:
        print(f"Those of the installed package; to edit them: cp -r {nbs.SHARED / 'notebooks'} .")
    told = {}  # long lists of choices, as of all cards: where they stand
    for path in nbs.find():
        nb = nbs.read(path)
        print(f"{path.stem}: {nbs.title(nb, path.stem)}")
        profiles, rules = parameters.profiles(nb), parameters.rules(nb)
        for name, default in parameters.declared(nb, path.stem).items():
            if name == "profile":
                continue
            setting = [profile for profile in parameters.PROFILES if name in profiles.get(profile, {})]
            sets = [f"{profile}: {json.dumps(profiles[profile][name])}" for profile in setting]
            others = f"   [{', '.join(sets)}]" if sets else ""
            rule = rules.get(name, {})
            choices = json.dumps(rule.get("choices", []))
            wanted = parameters.wanted(default, rule).replace(choices, told.get(choices, choices))
            if len(choices) > LONG:
                told.setdefault(choices, f"as for {name} of {path.stem}")
            print(f"    {name} ({wanted}) = {json.dumps(default)}{others}")
    return 0


def _doctor(_) -> int:
    from workbench import doctor

    return doctor.main()


def _fit(arguments) -> int:
    from workbench.fit import cards
    from workbench.fit import executions as fit
    from workbench.fit.model import Case, Model

    sys.path.insert(0, os.getcwd())  # where module:function may be
    card = cards.find(arguments.card)
    least = dict.fromkeys(("heads", "kv_heads", "head_dim", "batch", "n", "layers", "width", "vocab"), 1)
    _at_least(arguments, **least, budget_gib=1e-3, seconds=1e-3)
    of_model = {x: getattr(arguments, x) for x in ("layers", "width", "vocab", "optimizer", "checkpoint")}
    of_model = {name: x for name, x in of_model.items() if x is not None}
    if of_model and arguments.layers is None:
        raise ValueError(f"--{', --'.join(of_model)}: want --layers, too: they are of a transformer")
    kind, mode = (Model, "fwdbwd") if of_model else (Case, "fwd")
    _defaults(arguments, of_model.pop("width", None), mode)
    sizes = {x: getattr(arguments, x) for x in ("heads", "kv_heads", "head_dim", "batch", "dtype", "mode")}
    sizes |= {"vocab": 32_000, "optimizer": "adamw", "checkpoint": False} | of_model if of_model else {}
    ways = fit.executions(arguments.pattern, arguments.backend, arguments.causal, card=card, kind=kind, **sizes)
    budget = None if arguments.budget_gib is None else int(arguments.budget_gib * 2**30)
    options = {"n": arguments.n, "budget_bytes": budget, "seconds": arguments.seconds}
    frame = fit.table(ways, card, **options)
    print(frame.to_json(orient="records", indent=1) if arguments.json else fit.words(frame, card, sizes, **options))
    return int(frame["longest_n"].isna().all())  # none of them can be run there


def _scale(arguments) -> int:
    import torch

    from workbench.scaling import sweeps

    sys.path.insert(0, os.getcwd())  # where module:function may be
    _defaults(arguments)
    _at_least(arguments, nproc=1, heads=1, kv_heads=1, head_dim=1, batch=1, n=1, samples=3, seconds=1e-3)
    cards, processors = torch.cuda.device_count(), os.cpu_count() or 1
    most, which = cards or 4 * processors, "the cards of this machine"
    if arguments.nproc > most:
        which = which if cards else "four a processor, where there are no cards"
        raise ValueError(f"--nproc {arguments.nproc}: want at most {most}, {which}")
    cases = _patterns(arguments, cards)
    frame = sweeps.sweep(
        cases, arguments.nproc, arguments.strategies or sweeps.STRATEGIES, samples=arguments.samples,
        seconds=arguments.seconds, within_s=arguments.within, profile="gpu" if cards else "quick",
        say=None if arguments.json else lambda *words, **_: print(*words, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(frame.to_json(orient="records", indent=1) if arguments.json else sweeps.table(frame))
    return int(sweeps.failed(frame))


def _patterns(arguments, cards: int) -> dict:
    """{name: Case} of the patterns asked for, on cards or, where there are none, on the CPU."""
    from workbench.probes import catalog
    from workbench.probes.case import Case

    n, dtype = arguments.n or (131_072 if cards else 4096), arguments.dtype or ("bfloat16" if cards else "float32")
    sizes = (n, arguments.heads, arguments.head_dim, dtype, "auto", arguments.mode, "cuda" if cards else "cpu")
    patterns = {name: catalog.maker(name)(n, arguments.causal) for name in arguments.pattern or ["dense"]}
    return {name: Case(x, *sizes, arguments.batch, arguments.kv_heads) for name, x in patterns.items()}


def _defaults(arguments, width: int | None = None, mode: str = "fwd") -> None:
    """Fill in heads and mode where they are not given."""
    if arguments.heads is None:
        arguments.heads = 12 if width is None else width // arguments.head_dim
    if width not in (None, arguments.heads * arguments.head_dim):
        raise ValueError(f"--width {width}: want heads x head_dim, here {arguments.heads} x {arguments.head_dim}")
    arguments.mode = arguments.mode or mode


def _at_least(arguments, **least) -> None:
    for name, value in ((name, getattr(arguments, name)) for name in least):
        most = float("inf") if name == "seconds" else MOST
        if value is not None and not least[name] <= value <= most:  # nor is nan
            raise ValueError(f"--{name.replace('_', '-')} {value}: want at least {least[name]}, at most {most:,}")
