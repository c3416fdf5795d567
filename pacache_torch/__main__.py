"""``python -m pacache_torch demo``, ``doctor`` and ``verify``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": ("pacache_torch.demo.cli", "serve text through a paged cache and check it"),
    "doctor": ("pacache_torch.doctor", "show what is installed and whether it works"),
    "verify": ("pacache_torch.verify.cli", "hold the operators on a device against the reference, and report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument with the rest of them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m pacache_torch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:8} {purpose}" for name, (_, purpose) in _COMMANDS.items()),
    )
    parser.add_argument("command", choices=_COMMANDS, help="followed by its options")
    module_name, _ = _COMMANDS[parser.parse_args(arguments[:1]).command]
    # Only the command that was asked for: the doctor has to run where the demo cannot.
    module = importlib.import_module(module_name)
    exit_code: int = module.main(arguments[1:])
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
