#!/bin/bash
# One Ray node for each task of a Slurm job, and rung on the first one: sbatch slurm.sh job.yaml
#SBATCH --nodes=4 --ntasks-per-node=1
#SBATCH --signal=B:TERM@120
set -euo pipefail

read -ra hosts <<< "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')"
head=${hosts[0]} port=${RAY_PORT:-6379} others=$(( ${#hosts[@]} - 1 ))

srun --nodes=1 --ntasks=1 -w "$head" ray start --head --port="$port" --block &
ready=no
for _ in $(seq 60); do
    if ray status --address="$head:$port" > /dev/null 2>&1; then ready=yes; break; fi
    sleep 2
done
if [ "$ready" = no ]; then echo "no Ray head answers at $head:$port" >&2; exit 1; fi
if (( others > 0 )); then
    srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$head:$port" --block &
fi

# Nodes that join later are taken up then. The batch script runs on the first node, so rung does too. grace_s leaves
# time for the last save before Slurm's own end, 120 s after the signal.
rung launch "${1:-job.yaml}" --set cluster.address="$head:$port" --set cluster.workers="[1, ${#hosts[@]}]" \
    --set grace_s=100 &
launcher=$!
trap 'kill -TERM "$launcher"' TERM
code=0
wait "$launcher" || code=$?
# A signal interrupts the wait; the launcher then still saves.
while kill -0 "$launcher" 2> /dev/null; do code=0; wait "$launcher" || code=$?; done
exit "$code"
