#!/usr/bin/env bash
# Makes this host a node of the run's Ray cluster.
#   ray-node head [arguments of ray start]        the first one, in the background
#   ray-node HOST [arguments of ray start]        another one, once the head on HOST answers; with --block it ends with the head
# All nodes need the same RAY_AUTH_TOKEN: whoever reaches the port could run code in the cluster.
set -euo pipefail

: "${RAY_AUTH_TOKEN:?set RAY_AUTH_TOKEN to the same secret on all hosts}"
export RAY_AUTH_MODE=token
port=${RAY_PORT:-6379}
where=${1:?write: ray-node head, or ray-node HOST}
shift

if [[ "$where" == head ]]; then
  exec ray start --head --port="$port" --include-dashboard=false "$@"
fi
for ((tries = 0; tries < 120; tries++)); do
  if ray health-check --address "$where:$port" >/dev/null 2>&1; then
    exec ray start --address="$where:$port" "$@"
  fi
  sleep 5
done
echo "no Ray cluster answers at $where:$port after 10 minutes" >&2
exit 1
