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
        if not (mend := missing_extra(error)):
            raise
        if sys.argv[1:] != ["doctor"]:
            sys.exit(f"Error: {mend}")
        from visalign.doctor import examine

        print(examine().text)
        sys.exit(1)


if __name__ == "__main__":
    main()
