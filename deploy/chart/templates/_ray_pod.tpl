{{/*
The pod template of a Ray node, head or worker. Takes (root, group, head): `group` is ray.cluster.head or one of
ray.cluster.workerGroups. The template of ray.cluster.common is merged over the chart's own, and then the group's.
*/}}
{{- define "slotline.rayPod" -}}
{{- $common := default (dict) .root.Values.ray.cluster.common -}}
{{- range $where, $values := dict "common" $common (ternary "head" (printf "workerGroups %s" .group.name) .head) .group -}}
{{- include "slotline.retired" (dict "where" (printf "ray.cluster.%s" $where) "values" $values "container" "ray") -}}
{{- $spec := default (dict) (default (dict) $values.template).spec -}}
{{- if hasKey $spec "hostNetwork" -}}
{{- fail (printf "ray.cluster.%s: template.spec.hostNetwork: say hostNetwork: true beside template, as ports and the NetworkPolicy depend on it" $where) -}}
{{- end -}}
{{- range $spec.containers -}}
{{- if and (eq .name "ray") (hasKey . "resources") -}}
{{- fail (printf "ray.cluster.%s: template gives the container ray resources: say resources beside template, as what Ray offers depends on them" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "slotline.podTemplate" (dict "base" (include "slotline.rayPodBase" .) "templates" (list $common.template .group.template)) -}}
{{- end -}}

{{/* What `ray start` gets, as YAML: the chart's parameters, and the group's rayStartParams over them. (group, head) */}}
{{- define "slotline.rayStartParams" -}}
{{- $group := .group -}}
{{- $shared := int (include "slotline.mebibytes" $group.sharedMemory) -}}
{{- $store := max 80 (min 4096 (div $shared 4)) -}}
{{- $params := dict "object-store-memory" (toString (mul $store 1048576)) -}}
{{- if .head -}}
{{- $_ := set $params "dashboard-host" "0.0.0.0" -}}
{{- $_ := set $params "num-cpus" "0" -}}{{/* drivers run here, accelerators never */}}
{{- $_ := set $params "num-gpus" "0" -}}{{/* also on a node that has some */}}
{{- else -}}
{{- with $group.cpuWorkers -}}{{- $_ := set $params "resources" (printf `"{\"slotline_worker\": %d}"` (int .)) -}}{{- end -}}
{{- if not (include "slotline.gpus" (default (dict) (default (dict) $group.resources).limits)) -}}{{- $_ := set $params "num-gpus" "0" -}}{{- end -}}
{{- end -}}
{{- range $name, $value := $group.rayStartParams -}}{{- $_ := set $params $name (include "slotline.text" $value) -}}{{- end -}}
{{- $bytes := int64 (get $params "object-store-memory") -}}
{{- if gt $bytes (mul (int64 $shared) 1048576) -}}
{{- fail (printf "ray.cluster: %s has an object store of %d bytes and sharedMemory of %v, in which it lies: raise sharedMemory, or lower rayStartParams.object-store-memory" (default "head" $group.name) $bytes $group.sharedMemory) -}}
{{- end -}}
{{- toYaml $params -}}
{{- end -}}

{{/* A port of Ray: of rayStartParams, or Ray's own. (group, name, default) */}}
{{- define "slotline.rayPort" -}}
{{- include "slotline.text" (default .default (get (default (dict) .group.rayStartParams) .name)) -}}
{{- end -}}

{{- define "slotline.rayPodBase" -}}
{{- $cluster := .root.Values.ray.cluster -}}
{{- $common := default (dict) $cluster.common -}}
{{- $group := .group -}}
{{- $autoscaler := and .head $cluster.autoscaling.enabled -}}
{{- $env := merge (dict) (default (dict) $group.env) (default (dict) $common.env) -}}
{{- if not .head }}{{ $env = merge $env (default (dict) $cluster.nccl) }}{{ end -}}
{{- if not $cluster.auth }}{{ $_ := set $env "RAY_AUTH_MODE" "disabled" }}{{ end -}}
{{- /* Drivers' lines go where collectors of container logs look; workers are as nice as anything else on the node. */}}
{{- range $name, $value := dict "SLOTLINE_LOG_COPY_TO" "/proc/1/fd/1" "RAY_worker_niceness" "0" }}
{{- if not (hasKey $env $name) }}{{ $_ := set $env $name $value }}{{ end -}}
{{- end -}}
{{- /* By this label Slotline calls a Ray node what kubectl calls its node. Variables stand in the order of their names: one
may refer to those before it. Ray has the label from the environment, as KubeRay takes none in rayStartParams. */}}
{{- if not (hasKey $env "RAY_OVERRIDE_LABELS") -}}
{{- $_ := set $env "KUBERNETES_NODE_NAME" (dict "fieldRef" (dict "fieldPath" "spec.nodeName")) -}}
{{- $_ := set $env "RAY_OVERRIDE_LABELS" "{\"kubernetes.io/hostname\": \"$(KUBERNETES_NODE_NAME)\"}" -}}
{{- end -}}
{{- $podSecurity := dict "runAsNonRoot" true "runAsUser" 1000 "runAsGroup" 1000 "fsGroup" 1000 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- $security := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
{{- if $group.rdma -}}
{{- $podSecurity = mergeOverwrite $podSecurity (dict "runAsNonRoot" false "runAsUser" 0) -}}
{{- $security = mergeOverwrite $security (dict "capabilities" (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- $resources := deepCopy (default (dict) $group.resources) -}}
{{- if and .head (not $resources) -}}
{{- $memory := printf "%dMi" (add (int $group.memory.baseMiB) (mul (int $group.drivers) (int $group.memory.perDriverMiB))) -}}
{{- $resources = dict "requests" (dict "cpu" $group.cpu "memory" $memory) "limits" (dict "memory" $memory) -}}
{{- end -}}
{{- $shared := include "slotline.mebibytes" $group.sharedMemory -}}
{{- with (default (dict) $resources.limits).memory -}}
{{- if ge (int $shared) (int (include "slotline.mebibytes" .)) -}}
{{- fail (printf "ray.cluster: %s has sharedMemory of %v within a memory limit of %v: what lies there counts as the container's memory, so lower one or raise the other" (default "head" $group.name) $group.sharedMemory .) -}}
{{- end -}}
{{- end -}}
{{- $drain := ternary 0 (int (ternary $group.drainSeconds 120 (hasKey $group "drainSeconds"))) .head -}}
{{- $scratch := default "10Gi" $group.scratch -}}
{{- $requests := default (dict) $resources.requests -}}
{{- if not (or (hasKey $requests "ephemeral-storage") (hasKey (default (dict) $resources.limits) "ephemeral-storage")) -}}
{{- $_ := set $resources "requests" (merge (dict "ephemeral-storage" $scratch) $requests) -}}
{{- end -}}
{{- $dashboard := include "slotline.rayPort" (dict "group" $group "name" "dashboard-port" "default" 8265) -}}
{{- $agent := include "slotline.rayPort" (dict "group" $group "name" "dashboard-agent-listen-port" "default" 52365) -}}
{{- $metrics := include "slotline.rayPort" (dict "group" $group "name" "metrics-export-port" "default" 8080) -}}
{{- $health := printf "wget --tries 1 -T 4 -q -O- http://localhost:%s/api/local_raylet_healthz | grep -q success" $agent -}}
{{- if .head }}{{ $health = printf "%s && wget --tries 1 -T 4 -q -O- http://localhost:%s/api/gcs_healthz | grep -q success" $health $dashboard }}{{ end -}}
spec:
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- /* Ray's autoscaler asks Kubernetes for pods, with the token of the head's account. */}}
  automountServiceAccountToken: {{ if $autoscaler }}true{{ else }}false{{ end }}
  securityContext: {{- toYaml $podSecurity | nindent 4 }}
  {{- if $drain }}
  terminationGracePeriodSeconds: {{ add $drain 30 }}
  {{- end }}
  {{- if $group.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  containers:
    - name: ray
      image: {{ include "slotline.rayImage" .root | quote }}
      imagePullPolicy: {{ $cluster.image.pullPolicy }}
      {{- with $env }}
      env:
        {{- range $name, $value := . }}
        {{- if kindIs "map" $value }}
        - name: {{ $name }}
          valueFrom: {{- toYaml $value | nindent 12 }}
        {{- else }}
        - {name: {{ $name }}, value: {{ include "slotline.text" $value | quote }}}
        {{- end }}
        {{- end }}
      {{- end }}
      ports:
        {{- if .head }}
        - {name: gcs-server, containerPort: {{ include "slotline.rayPort" (dict "group" $group "name" "port" "default" 6379) }}}
        - {name: dashboard, containerPort: {{ $dashboard }}}
        {{- end }}
        - {name: metrics, containerPort: {{ $metrics }}}
      {{- /* KubeRay's own probes ask Ray's default ports, whatever rayStartParams say. */}}
      {{- if or (ne $agent "52365") (and .head (ne $dashboard "8265")) }}
      {{- range $probe := list "livenessProbe" "readinessProbe" }}
      {{ $probe }}:
        exec: {command: [bash, -c, {{ $health | quote }}]}
        initialDelaySeconds: 30
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ ternary 12 3 (eq $probe "livenessProbe") }}
      {{- end }}
      {{- end }}
      {{- if $drain }}
      {{- /* Before Ray is told to end: attempts save and go on elsewhere, whatever ends the pod. */}}
      lifecycle:
        preStop:
          exec: {command: [env, SLOTLINE_DRAIN_S={{ $drain }}, python, -m, worker.tasks, drain]}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: ray-logs, mountPath: /tmp/ray}
  volumes:
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $group.sharedMemory }}}
    {{- /* By this name KubeRay gives it to the autoscaler, too. */}}
    - name: ray-logs
      emptyDir: {sizeLimit: {{ $scratch }}}
  {{- with $group.gpuType }}
  nodeSelector: {nvidia.com/gpu.product: {{ . | quote }}}
  {{- end }}
{{- end -}}
