# SPDX-License-Identifier: Apache-2.0
"""The plugins inside their hosts, before a release: an environment per host, and its tests there.

python tests/hosts/run.py                 # all, into ~/.cache/visalign-hosts; first it fetches 5 GB each
python tests/hosts/run.py trl --folder F  # one, elsewhere; an environment that is there is used again
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {"verl": ["verl==0.9.1", "cachetools", "fastapi", "uvicorn"], "trl": ["trl==1.16.0"]}
"""Host -> what pip installs (verl imports three that it does not ask for). Its tests are test_HOST.py beside
this file."""


def environment(host: str, folder: Path) -> Path:
    """The Python of a host's environment, made where it is absent: the host, and the core of visalign."""
    python = folder / host / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / host)], check=True)
        wanted = [*HOSTS[host], "pytest>=8.4", "--editable", str(ROOT)]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def run(host: str, folder: Path) -> int:
    """Run a host's tests; the exit code of pytest."""
    python = environment(host, folder)
    frozen = subprocess.run(
        [str(python), "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    ).stdout
    named = [line for line in frozen.splitlines() if line.split("==")[0] in (host, "torch", "transformers")]
    print(f"== {host}: {', '.join(named)}", flush=True)
    settings = {"VISALIGN_HOST": host, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings |= {"VERL_USE_EXTERNAL_MODULES": "visalign.integrations.verl"} if host == "verl" else {}
    command = [str(python), "-m", "pytest", "-q", "-W", "default", "--confcutdir", "tests/hosts"]
    command += ["-o", "addopts=--import-mode=importlib"]
    tests = str(ROOT / "tests" / "hosts" / f"test_{host}.py")
    return subprocess.run([*command, tests], cwd=ROOT, env=os.environ | settings, check=False).returncode


def main() -> int:
    """Run the hosts that are named, or all; 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hosts", nargs="*", choices=[*HOSTS, []], help="default: all")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "visalign-hosts")
    given = parser.parse_args()
    return max(run(host, given.folder) != 0 for host in given.hosts or HOSTS)


if __name__ == "__main__":
    sys.exit(main())
