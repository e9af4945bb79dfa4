#!/usr/bin/env bash
# Train on a TPU pod slice over ssh: the same command on all of its hosts, started again when they are preempted.
#
#   scripts/launch_tpu_pod.sh NAME ZONE DIRECTORY CONFIG [field=value ...]
#   scripts/launch_tpu_pod.sh my-v4-512 us-central2-b /mnt/shared/lwm lwm_text_7b checkpoint.keep_every=500
#
# NAME and ZONE are the slice's; PROJECT, if set, its project. DIRECTORY is where lwm is installed on every host
# (`python -m venv .venv && .venv/bin/pip install -c constraints/3.12.txt ".[tpu]"`) and must hold, or link to, storage
# that all hosts share: corpora, tokenizers and output_dir are read and written there.
#
# To resume: run the same line again. It also does so by itself after exit code 42 (preempted and saved), 43 (hang) or a
# lost host, up to RESTARTS times (default 20); 0 (done), 2 (bad input) and 44 (no finite loss) end it.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,16p' "$0"; exit 2; }
name=$1 zone=$2 directory=$3 config=$4
shift 4

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" ${PROJECT:+--project "$PROJECT"} --worker=all --command "$1"
}

# Each host writes its own code, because ssh to all of them at once returns one code for all.
arguments=$(printf ' %q' "$config" cluster.join=yes "$@")
train="cd $(printf %q "$directory") && .venv/bin/lwm train$arguments; code=\$?; echo \"lwm exit code \$code\"; exit \$code"
for restart in $(seq 0 "${RESTARTS:-20}"); do
  log=$(mktemp)
  on_all_hosts "$train" 2>&1 | tee "$log" || true
  for code in 2 44; do
    if grep -q "lwm exit code $code$" "$log"; then exit $code; fi
  done
  if grep -q "lwm exit code 0$" "$log" && ! grep -q "lwm exit code [1-9]" "$log"; then exit 0; fi
  echo "restart $((restart + 1)) of ${RESTARTS:-20} in 30 s"
  # A host that is still in a hung collective holds the chips: end what is left of the run before the next start.
  on_all_hosts "pkill -TERM -f '[l]wm train' ; sleep 20; pkill -KILL -f '[l]wm train'; true" || true
  sleep 30
done
echo "gave up after ${RESTARTS:-20} restarts"
exit 1
