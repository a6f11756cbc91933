{{/*
The pod template of a Ray node, head or worker. Takes (root, group, head): `group` is ray.cluster.head or one of
ray.cluster.workerGroups; ray.cluster.common goes into each, maps under the group's own and lists before them.
*/}}
{{- define "slotline.rayPod" -}}
{{- $cluster := .root.Values.ray.cluster -}}
{{- $common := default (dict) $cluster.common -}}
{{- $group := .group -}}
{{- $autoscaler := and .head $cluster.autoscaling.enabled -}}
{{- $labels := merge (dict) (default (dict) $group.podLabels) (default (dict) $common.podLabels) -}}
{{- $annotations := merge (dict) (default (dict) $group.podAnnotations) (default (dict) $common.podAnnotations) -}}
{{- $env := merge (dict) (default (dict) $group.env) (default (dict) $common.env) -}}
{{- if not .head }}{{ $env = merge $env (default (dict) $cluster.nccl) }}{{ end -}}
{{- if not $cluster.auth }}{{ $_ := set $env "RAY_AUTH_MODE" "disabled" }}{{ end -}}
{{- $envFrom := concat (default (list) $common.envFrom) (default (list) $group.envFrom) -}}
{{- $volumes := concat (default (list) $common.volumes) (default (list) $group.volumes) -}}
{{- $mounts := concat (default (list) $common.volumeMounts) (default (list) $group.volumeMounts) -}}
{{- $selector := merge (dict) (default (dict) $group.nodeSelector) (default (dict) $common.nodeSelector) -}}
{{- with $group.gpuType }}{{ $_ := set $selector "nvidia.com/gpu.product" . }}{{ end -}}
{{- $tolerations := concat (default (list) $common.tolerations) (default (list) $group.tolerations) -}}
{{- $pullSecrets := concat (default (list) .root.Values.imagePullSecrets) (default (list) $common.imagePullSecrets) -}}
{{- $podSecurity := dict "runAsNonRoot" true "runAsUser" 1000 "runAsGroup" 1000 "fsGroup" 1000 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- $security := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
{{- if $group.rdma -}}
{{- $podSecurity = mergeOverwrite $podSecurity (dict "runAsNonRoot" false "runAsUser" 0) -}}
{{- $security = mergeOverwrite $security (dict "capabilities" (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- $podSecurity = mergeOverwrite $podSecurity (deepCopy (default (dict) $common.podSecurityContext)) (deepCopy (default (dict) $group.podSecurityContext)) -}}
{{- $security = mergeOverwrite $security (deepCopy (default (dict) $common.securityContext)) (deepCopy (default (dict) $group.securityContext)) -}}
{{- $resources := $group.resources -}}
{{- if and .head (not $resources) -}}
{{- $memory := printf "%dMi" (add (int $group.memory.baseMiB) (mul (int $group.drivers) (int $group.memory.perDriverMiB))) -}}
{{- $resources = dict "requests" (dict "cpu" $group.cpu "memory" $memory) "limits" (dict "memory" $memory) -}}
{{- end -}}
{{- if or $labels $annotations }}
metadata:
  {{- with $labels }}
  labels: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
spec:
  {{- with $pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with (default $common.serviceAccountName $group.serviceAccountName) }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- /* Ray's autoscaler asks Kubernetes for pods, with the token of the head's account. */}}
  automountServiceAccountToken: {{ if $autoscaler }}true{{ else }}false{{ end }}
  securityContext: {{- toYaml $podSecurity | nindent 4 }}
  {{- if $group.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- range $field := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with index $group $field }}
  {{ $field }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- with $group.initContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" .head }}
      image: {{ printf "%s:%s" $cluster.image.repository $cluster.image.tag | quote }}
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
      {{- with $envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .head }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        {{- with $mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $group.sharedMemory }}}
    {{- with $volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $selector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
