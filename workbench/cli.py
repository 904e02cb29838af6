"""The command line: `workbench report`, `list`, `doctor`. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from workbench import report
from workbench.reporting import notebooks as nbs


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit code: 0 done, 1 something failed, 2 refused, 130 interrupted."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except ValueError as refused:
        print(f"workbench: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("workbench: interrupted; what is done is written", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="workbench", description="A workbench for long-sequence attention.")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    make = commands.add_parser(
        "report",
        help="run notebooks and write self-contained HTML reports",
        description="Run notebooks in order and write each as one HTML file that needs no network, with an index.",
        epilog='example: workbench report 01 05 --profile quick -p heads 4 -p lengths "[1024, 4096]"',
    )
    make.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="a path or a name in notebooks/ (default: all)")
    make.add_argument("--profile", choices=nbs.PROFILES, help="how much (default: gpu where there is CUDA, else quick)")
    make.add_argument("--out", metavar="DIR", help="where the reports go (default: outputs/reports/<profile>)")
    make.add_argument(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "JSON"),
        help="set a parameter, in every notebook that declares it (repeatable; see `workbench list`)",
    )
    limit = "seconds a cell may take (default: %(default)g)"
    make.add_argument("--timeout", type=float, default=report.LIMIT_S, metavar="S", help=limit)
    make.set_defaults(command=_report)

    listing = commands.add_parser("list", help="the notebooks and their parameters")
    listing.set_defaults(command=_list)

    doctor = commands.add_parser("doctor", help="what works on this machine, and why not what does not")
    doctor.add_argument("--quick", action="store_true", help="do not run FlexAttention, which compiles for seconds")
    doctor.set_defaults(command=_doctor)
    return top


def _report(arguments) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a supervisor's polite end is a Ctrl-C
    asked = {name: _value(name, text) for name, text in arguments.parameters}
    reports = report.run(arguments.notebooks, arguments.profile, arguments.out, asked, arguments.timeout)
    return int(any(done.status != "ok" for done in reports))


def _value(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        hint = f"a string has quotes of its own: -p {name} '\"{text}\"'"
        raise ValueError(f"parameter {name}={text}: not JSON; {hint}") from None


def _list(arguments) -> int:
    for path in nbs.find():
        nb = nbs.read(path)
        print(f"{path.stem}: {nbs.title(nb, path.stem)}")
        own = nbs.declared(nb, path.stem)
        profiles = nb["metadata"].get("workbench", {}).get("profiles", {})
        for name in nbs.set_of(own):
            setting = [profile for profile in nbs.PROFILES if name in profiles.get(profile, {})]
            sets = [f"{profile}: {json.dumps(profiles[profile][name])}" for profile in setting]
            others = f"   [{', '.join(sets)}]" if sets else ""
            print(f"    {name} ({nbs.kind(own[name])}) = {json.dumps(own[name])}{others}")
    return 0


def _doctor(arguments) -> int:
    from workbench import doctor

    return doctor.main(arguments.quick)
