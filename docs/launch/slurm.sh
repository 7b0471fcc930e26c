#!/usr/bin/env bash
# Machines of a SLURM cluster that share the output folder; a run that is there already goes on.
# sbatch --nodes 2 slurm.sh CONFIG FOLDER [key=value ...]
#SBATCH --job-name=visalign
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail
config=$1 folder=$2
shift 2
resume=()
if [ -f "$folder/config.yaml" ]; then resume=(--resume); fi
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi # srun asks for it
exec srun --kill-on-bad-exit torchrun \
  --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:$((20000 + SLURM_JOB_ID % 10000))" \
  -m visalign train "$config" "$@" --output "$folder" ${resume[@]+"${resume[@]}"}
