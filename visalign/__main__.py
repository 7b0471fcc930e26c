# SPDX-License-Identifier: Apache-2.0
"""`python -m visalign` is the command `visalign`; it says what to install where only the core is."""

import sys

from visalign.versions import missing_extra


def main() -> None:
    """Entry point of the installed command and of `python -m visalign`."""
    try:
        from visalign.pipelines.cli.app import main as command

        command()
    except ModuleNotFoundError as error:
        if mend := missing_extra(error):
            sys.exit(f"Error: {mend}")
        raise


if __name__ == "__main__":
    main()
