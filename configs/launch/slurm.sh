#!/usr/bin/env bash
# A run under Slurm: the first TRAINERS hosts train, the others generate. Submit it from the root of the repository:
#   sbatch configs/launch/slurm.sh CONFIG [key=value ...]
# The number of hosts is TRAINERS plus those of the engines; rollout.engines counts the engines of each trainer.
#SBATCH --job-name=trace-jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
#SBATCH --output=trace-jax-%j.log
set -euo pipefail

TRAINERS=${TRAINERS:-1}
TRAINER_ENV=${TRAINER_ENV:-$PWD/.venv}              # has trace-jax[cuda13,ray]
ENGINE_ENV=${ENGINE_ENV:-$PWD/.venv-engine}         # has trace-jax[ray], with JAX for CPU; the same Python and Ray as TRAINER_ENV
VLLM_PYTHON=${VLLM_PYTHON:-$PWD/.venv-vllm/bin/python}
OUT=${OUT:-runs/$SLURM_JOB_ID}                      # on a file system that all hosts share
config=${1:?write: sbatch configs/launch/slurm.sh CONFIG [key=value ...]}
shift

engines=$((SLURM_JOB_NUM_NODES - TRAINERS))
if ((engines < 1)); then
  echo "error: $SLURM_JOB_NUM_NODES hosts and TRAINERS=$TRAINERS leave none for the engines; write sbatch --nodes=$((TRAINERS + 1))" >&2
  exit 2
fi
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
RAY_PORT=$((20000 + SLURM_JOB_ID % 10000))
export HEAD RAY_AUTH_TOKEN RAY_PORT RAY_AUTH_MODE=token TRAINERS TRAINER_ENV ENGINE_ENV SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Free shared memory: weights go through the object store and through vLLM's ring.
srun --ntasks="$SLURM_JOB_NUM_NODES" bash -c \
  '(( $(df --output=avail -B1G /dev/shm | tail -n 1) >= 16 )) || { echo "error: $(hostname) has less than 16 GB free in /dev/shm" >&2; exit 1; }'

# The Ray cluster is a step of its own, so that a signal to the trainers does not reach it. Their hosts are nodes without resources, where no
# engine is placed.
srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" bash -c '
  where=$HEAD
  ((SLURM_PROCID)) || where=head
  if ((SLURM_PROCID < TRAINERS)); then
    PATH="$TRAINER_ENV/bin:$PATH" exec configs/launch/ray-node.sh "$where" --num-cpus=0 --num-gpus=0 --block
  fi
  export JAX_PLATFORMS=cpu
  PATH="$ENGINE_ENV/bin:$PATH" exec configs/launch/ray-node.sh "$where" --block
' &
ray_step=$!
trap 'kill "$ray_step" 2>/dev/null || true' EXIT
until "$TRAINER_ENV/bin/ray" health-check --address "$HEAD:$RAY_PORT" >/dev/null 2>&1; do
  kill -0 "$ray_step" || { echo "error: the Ray cluster did not start" >&2; exit 1; }
  sleep 5
done

# jax.distributed finds its processes in the variables of this step: SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS, SLURM_PROCID.
srun --overlap --nodes="$TRAINERS" --ntasks="$TRAINERS" --relative=0 "$TRAINER_ENV/bin/trace-jax" train "$config" --out "$OUT" \
  rollout.engine=vllm rollout.vllm.python="$VLLM_PYTHON" rollout.launcher=ray rollout.ray.address="$HEAD:$RAY_PORT" "$@" &
trainer_step=$!
# Five minutes before the end of the allocation: the step in progress, and a checkpoint. `wait` returns at the signal, and once more at the end.
trap 'kill -TERM "$trainer_step"' TERM
code=0
wait "$trainer_step" || code=$?
while kill -0 "$trainer_step" 2>/dev/null; do
  code=0
  wait "$trainer_step" || code=$?
done
exit "$code"
