#!/usr/bin/env bash
# A smoke test on a real API server: builds the CPU images, makes a kind cluster, installs KubeRay's operator and the chart
# with chart/ci/kind.yaml, runs helm test, trains a job of two steps, upgrades while it is installed, and uninstalls.
# Wants docker, kind, kubectl, helm and slotline (the client) on the PATH, 16 GiB of memory and 40 GB of disk; some 30 minutes.
#   TORCH_INDEX   index of torch's CPU wheels, for the image of Ray's nodes
#   KUBERAY_CHART the operator's chart as helm takes it (a folder, a file, oci://..., or repo/name), version 1.5.1 or later
#   KEEP=1        leave the cluster for a look
set -euo pipefail
cd "$(dirname "$0")/.."

: "${TORCH_INDEX:?name the index of torch CPU wheels}" "${KUBERAY_CHART:?name the chart of the KubeRay operator}"
for tool in docker kind kubectl helm slotline; do
  command -v "$tool" >/dev/null || { echo "kind_test: $tool is not on the PATH: install it" >&2; exit 1; }
done
cluster=slotline-test
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
scratch=$(mktemp -d)
forward=

finish() {
  code=$?
  [ -z "$forward" ] || kill "$forward" 2>/dev/null || true
  if [ "$code" != 0 ]; then
    echo "kind_test: failed; what the cluster says:" >&2
    kubectl get pods,rayclusters,events -A >&2 || true
    kubectl -n ml logs deploy/slotline --tail=100 >&2 || true
  fi
  [ -n "${KEEP:-}" ] || kind delete cluster --name "$cluster" || true
  rm -rf "$scratch"
  exit "$code"
}

# Says how long it may take, as every wait has a limit: within SECONDS COMMAND...
within() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || { echo "kind_test: still fails: $*" >&2; "$@"; return 1; }
    sleep 2
  done
}

docker build -f deploy/Dockerfile.control-plane -t "slotline/control-plane:$version" .
docker build -f deploy/Dockerfile.worker --build-arg CUDA_MAJOR= --build-arg "TORCH_INDEX=$TORCH_INDEX" -t "slotline/worker:$version-cpu" .

trap finish EXIT
kind create cluster --name "$cluster" --wait 180s
for image in "slotline/control-plane:$version" "slotline/worker:$version-cpu"; do
  kind load docker-image --name "$cluster" "$image"
done
helm upgrade --install kuberay-operator "$KUBERAY_CHART" -n kuberay --create-namespace --wait --timeout 5m

# without the Prometheus operator's objects: nothing installs their definitions here
monitoring="monitoring.serviceMonitor.enabled=false,monitoring.jobs.enabled=false,monitoring.rules.enabled=false"
helm upgrade --install slotline deploy/chart -n ml --create-namespace -f deploy/chart/ci/kind.yaml --set "$monitoring" --wait --timeout 5m
kubectl -n ml wait raycluster/slotline-ray --for=condition=RayClusterProvisioned --timeout=600s
helm test slotline -n ml --timeout 3m

kubectl -n ml port-forward svc/slotline 18470:80 >"$scratch/forward" 2>&1 &
forward=$!
export SLOTLINE_URL=http://127.0.0.1:18470
within 60 slotline jobs
cat >"$scratch/job.yaml" <<'JOB'
name: kind-smoke
model: {factory: "worker.examples.gpt:build", args: {layers: 2, width: 16, heads: 2, length: 16}}
data: {factory: "worker.examples.text:ByteWindows", args: {length: 16}}
loss: {factory: "torch.nn.functional:cross_entropy"}
optimizer: {factory: "torch.optim:AdamW", args: {lr: 1.0e-3}}
training: {steps: 2, global_batch: 4, microbatches: 2}
pipeline: {stages: 2}
resources: {meshes: 2, device: cpu}
checkpoint: {uri: /runs, every_steps: 1}
JOB
timeout 900 slotline submit --wait "$scratch/job.yaml"

# the same release once more: the hook, the Deployment's strategy and the volume bear an upgrade, and the job is still known
helm upgrade slotline deploy/chart -n ml -f deploy/chart/ci/kind.yaml --set "$monitoring,settings.SLOTLINE_LOG_LEVEL=debug" --wait --timeout 5m
kill "$forward" 2>/dev/null || true
kubectl -n ml port-forward svc/slotline 18470:80 >"$scratch/forward" 2>&1 &
forward=$!
within 60 slotline jobs
slotline jobs --json | grep -q kind-smoke
helm uninstall slotline -n ml --wait --timeout 5m
echo "kind_test: passed"
