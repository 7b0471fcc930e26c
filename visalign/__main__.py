# SPDX-License-Identifier: Apache-2.0
"""Run the command `visalign`; name the extra to install where only the core is installed."""

import signal
import sys

from visalign.versions import missing_extra


def main() -> None:
    """Entry point of the installed command and of `python -m visalign`."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        _run()
    finally:  # an import that Ctrl-C broke off may end in any error
        error = sys.exc_info()[1]
        if interrupted and error is not None and not isinstance(error, SystemExit):
            print("Interrupted: Stopped by Ctrl-C.", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)


def _run() -> None:
    try:
        from visalign.pipelines.cli.app import main as command

        command()
    except ModuleNotFoundError as error:
        install = missing_extra(error)
        if not install:
            raise
        if sys.argv[1:] != ["doctor"]:
            sys.exit(f"Error: {install}")
        from visalign.doctor import examine

        print(examine().text)
        sys.exit(1)


if __name__ == "__main__":
    main()
