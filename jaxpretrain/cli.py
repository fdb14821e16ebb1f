"""What every command line shares: `--config=FILE[:args] --config.a.b=value`; mistakes as one line and exit code 1."""

import argparse
import difflib
import logging
import sys
import traceback
from collections.abc import Callable

from ml_collections import ConfigDict

from jaxpretrain import config as config_lib
from jaxpretrain.errors import explain
from jaxpretrain.signals import EXIT_INTERRUPTED

EXIT_DONE, EXIT_ERROR, EXIT_STOPPED = 0, 1, 75


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose mistakes are ValueErrors, and which knows `--config` and `--debug`."""

    def __init__(self, *, description: str):
        super().__init__(description=description, allow_abbrev=False)
        self.add_argument("--config", metavar="FILE[:flag,key=value]", help="a recipe; --config.KEY=VALUE sets a key")
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; --help lists the flags")

    def parse(self, argv: list[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
        """The flags, and the `(key, text)` of each `--config.KEY=TEXT` or `--config.KEY TEXT`, in their order."""
        arguments, rest = self.parse_known_args(argv)
        overrides, rest = [], iter(rest)
        for item in rest:
            name, equals, text = item.partition("=")
            if not name.startswith("--config."):
                known = [option for action in self._actions for option in action.option_strings]
                nearest = difflib.get_close_matches(name, known, n=1)
                raise ValueError(f"unknown flag {name!r}: {f'did you mean {nearest[0]}?' if nearest else 'see --help'}")
            key = name.removeprefix("--config.")
            if not equals:
                text = next(rest, None)
                if text is None or text.startswith("--"):
                    raise ValueError(f"{name} needs a value: {name}=VALUE")
            overrides.append((key, text))
        return arguments, overrides


def load_config(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> ConfigDict:
    """The checked config of `--config` and its overrides. Raises ValueError."""
    if not arguments.config:
        raise ValueError("--config is missing: name a recipe, e.g. --config=configs/tiny.py")
    return config_lib.load(arguments.config, overrides)


def run(main: Callable[[list[str]], int]) -> None:
    """Ends the process with main(argv)'s exit code; an error is one line on stderr and 1, with --debug a traceback."""
    debug = "--debug" in sys.argv
    if not debug:  # what threads and callbacks of Orbax say of an error would bury our one line on it
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        sys.unraisablehook = lambda *_: None
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
