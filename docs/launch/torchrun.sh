#!/usr/bin/env bash
# One machine, a process for each GPU (on a machine without one: for each core that you give).
# bash torchrun.sh PROCESSES CONFIG [key=value ...] --output FOLDER [--resume]
set -euo pipefail
processes=$1
shift
exec torchrun --standalone --nproc_per_node "$processes" -m visalign train "$@"
