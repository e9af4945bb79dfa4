#!/usr/bin/env bash
# Train under Slurm: one process per GPU node, requeued when it is preempted or runs out of time.
#
#   sbatch --nodes=4 scripts/launch_slurm.sh CONFIG [field=value ...]
#
# Submit it from a directory that all nodes share and that has lwm in .venv
# (`python -m venv .venv && .venv/bin/pip install -c constraints/3.12.txt ".[cuda]"`).
#
# To resume: submit the same line again. A preempted job and one that reached its time limit do so by themselves: Slurm
# sends SIGTERM two minutes before the end, lwm saves and exits with 42, and the job is put back into the queue. So it is
# after 43 (hang) and after a lost node. 0 (done), 2 (bad input) and 44 (no finite loss) end it.
#SBATCH --job-name=lwm
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lwm-%j.log
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,13p' "$0"; exit 2; }

# jax finds coordinator, process count and process id in Slurm's variables; `lwm train` sees them and joins.
# --kill-on-bad-exit ends the other tasks where one is lost, so that they do not wait for the heartbeat.
srun --kill-on-bad-exit=1 .venv/bin/lwm train "$@"
code=$?
case $code in
  0 | 2 | 44) exit $code ;;
  *)
    echo "lwm exit code $code: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
