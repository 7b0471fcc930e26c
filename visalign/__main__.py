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

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell has its background jobs ignore it
        signal.signal(signal.SIGINT, interrupt)
    try:
        _run()
    finally:  # an import that Ctrl-C broke off may end in any error
        if interrupted and _ends_silently(sys.exc_info()[1]):
            print("Interrupted: Stopped by Ctrl-C.", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)


def _ends_silently(error: BaseException | None) -> bool:
    """Return whether nothing says that Ctrl-C ended the command; typer turns it into an Exit without a word."""
    if isinstance(error, SystemExit):
        return error.__context__ is not None and isinstance(error.__context__.__cause__, KeyboardInterrupt)
    return error is not None


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
