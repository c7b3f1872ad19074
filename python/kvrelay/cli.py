"""The command line: ``kvrelay``, or ``python -m kvrelay``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from kvrelay import __version__
from kvrelay.devices import devices
from kvrelay.errors import ConfigError, KvRelayError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and gives its exit status: 2 for what kvrelay refuses, 130 for Ctrl-C."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
        return 0
    except KvRelayError as error:
        print("kvrelay:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay", description="Prefill and decode on separate workers, the KV cache relayed."
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    listing = commands.add_parser("devices", help="what is usable on this machine, and why the rest is not")
    listing.add_argument("--json", action="store_true", help="for programs")
    listing.set_defaults(run=_devices)
    demo = commands.add_parser(
        "demo", help="a real model and the published example, policies compared, one picture"
    )
    demo.add_argument(
        "--output", default="demo.png", metavar="FILE", help="where the picture goes (%(default)s)"
    )
    demo.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bars")
    demo.set_defaults(run=_demo)
    return parser


def _devices(options: argparse.Namespace) -> None:
    found = devices()
    if options.json:
        print(json.dumps(asdict(found) | {"cuda_available": found.cuda_available}, indent=2))
    else:
        print(*found.lines(), sep="\n")


def _demo(options: argparse.Namespace) -> None:
    from kvrelay import demo

    try:
        demo.main(options.output, progress=options.progress)
    except ImportError as error:
        # Without the extra for plots.
        raise ConfigError(str(error)) from error
