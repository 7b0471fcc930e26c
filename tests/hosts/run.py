# SPDX-License-Identifier: Apache-2.0
"""The plugins inside their hosts, before a release: an environment per host, and its tests there.

python tests/hosts/run.py                 # all, into ~/.cache/visalign-hosts; first it fetches 5 GB each
python tests/hosts/run.py trl --folder F  # one, elsewhere; an environment that is there is used again
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {
    "verl": ["verl==0.9.1", "cachetools", "fastapi", "uvicorn"],  # it imports the last three unasked
    "trl": ["trl==1.16.0"],
    "flow_factory": [],
    "unirl": ["ray"],
}
"""Host -> what pip installs. Its tests are test_HOST.py beside this file."""
SOURCES = {
    "flow_factory": ("https://github.com/X-GenGroup/Flow-Factory", "a0b2bc5a2b4f", "src"),
    "unirl": ("https://github.com/Tencent-Hunyuan/UniRL", "1a7b501e8fe8", ""),
}
"""Host that is no package -> (repository, commit, folder that is imported from); its judges see images."""


def environment(host: str, folder: Path) -> Path:
    """The Python of a host's environment, made where it is absent: the host, and the core of visalign."""
    python, finished = folder / host / "bin" / "python", folder / host / "finished"
    if not finished.exists():  # absent, or begun and broken off
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / host)], check=True)
        packages = [*HOSTS[host], "pytest>=8.4", "--editable", f"{ROOT}[images]" if host in SOURCES else str(ROOT)]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        finished.touch()
    return python


def source(host: str, folder: Path) -> list[str]:
    """Where a host that is no package is imported from, fetched where it is absent."""
    if host not in SOURCES:
        return []
    repository, commit, part = SOURCES[host]
    checkout = folder / "src" / host
    if not checkout.exists():
        fetched = checkout.with_name(f"{host}.part")
        shutil.rmtree(fetched, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", repository, str(fetched)], check=True)
        subprocess.run(["git", "-C", str(fetched), "checkout", "--quiet", commit], check=True)
        fetched.rename(checkout)
    return [str(checkout / part)]


def run(host: str, folder: Path) -> int:
    """Run a host's tests; the exit code of pytest."""
    python = environment(host, folder)
    frozen = subprocess.run([str(python), "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    packages = [line for line in frozen.splitlines() if line.split("==")[0] in (host, "torch", "transformers")]
    print(f"== {host}: {', '.join(packages)}", flush=True)
    settings = {"VISALIGN_HOST": host, "OMP_NUM_THREADS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), *source(host, folder)])
    settings |= {"VERL_USE_EXTERNAL_MODULES": "visalign.integrations.verl"} if host == "verl" else {}
    command = [str(python), "-m", "pytest", "-q", "-W", "default", "--confcutdir", "tests/hosts"]
    command += ["-o", "addopts=--import-mode=importlib"]
    tests = str(ROOT / "tests" / "hosts" / f"test_{host}.py")
    return subprocess.run([*command, tests], cwd=ROOT, env=os.environ | settings, check=False).returncode


def main() -> int:
    """Run the hosts that are named, or all; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", choices=[*HOSTS, []], help="default: all")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "visalign-hosts")
    arguments = parser.parse_args()
    return max(run(host, arguments.folder) != 0 for host in arguments.hosts or HOSTS)


if __name__ == "__main__":
    sys.exit(main())
