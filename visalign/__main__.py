# SPDX-License-Identifier: Apache-2.0
"""`python -m visalign` is the command `visalign`."""

from visalign.pipelines.cli.app import main

if __name__ == "__main__":
    main()
