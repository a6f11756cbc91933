{{/* The pod template of the control plane, before the values' own is merged over it. */}}
{{- define "slotline.controlPod" -}}
metadata:
  labels:
    {{- include "slotline.labels" . | nindent 4 }}
  annotations:
    checksum/settings: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
spec:
  serviceAccountName: {{ include "slotline.serviceAccount" . }}
  automountServiceAccountToken: false
  # Kubernetes would set SLOTLINE_PORT to tcp://... for a Service named slotline.
  enableServiceLinks: false
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: 30
  securityContext: {{- include "slotline.podSecurity" . | nindent 4 }}
  containers:
    - name: control-plane
      image: {{ include "slotline.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve]
      envFrom:
        - configMapRef:
            name: {{ include "slotline.fullname" . }}
        {{- with .Values.envFrom }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- with .Values.database.urlSecret }}
        {{- if .name }}
        - name: SLOTLINE_DATABASE_URL
          valueFrom:
            secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
        {{- end }}
        {{- end }}
        {{- with .Values.auth.apiTokenSecret }}
        {{- if .name }}
        - name: SLOTLINE_API_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
        {{- end }}
        {{- end }}
        {{- with .Values.auth.metricsTokenSecret }}
        {{- if .name }}
        - name: SLOTLINE_METRICS_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
        {{- end }}
        {{- end }}
        {{- if and .Values.ray.cluster.create .Values.ray.cluster.auth }}
        - name: RAY_AUTH_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ include "slotline.rayCluster" . }}, key: auth_token}
        {{- else if .Values.ray.tokenSecret.name }}
        - name: RAY_AUTH_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .Values.ray.tokenSecret.name }}, key: {{ .Values.ray.tokenSecret.key }}}
        {{- end }}
        {{- range $name, $one := .Values.ray.clusters }}
        {{- if and $one.tokenSecret $one.tokenSecret.name }}
        - name: {{ include "slotline.tokenVariable" $name }}
          valueFrom:
            secretKeyRef: {name: {{ $one.tokenSecret.name }}, key: {{ default "auth_token" $one.tokenSecret.key }}}
        {{- end }}
        {{- end }}
      ports:
        - name: http
          containerPort: 8470
      startupProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .Values.probes.startup | nindent 8 }}
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      readinessProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      securityContext: {{- include "slotline.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /var/lib/slotline}
        - {name: scratch, mountPath: /tmp}
  volumes:
    - name: data
      {{- if include "slotline.persistent" . }}
      persistentVolumeClaim:
        claimName: {{ default (include "slotline.fullname" .) .Values.persistence.existingClaim }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: scratch
      emptyDir: {}
{{- end -}}

{{- define "slotline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "slotline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/*
What of the values' template also holds for pods of hooks, as JSON: where they run, rights, volumes, native sidecars, and of the
container control-plane environment and mounts. Other containers would never end. (root, container)
*/}}
{{- define "slotline.hookTemplate" -}}
{{- $template := deepCopy (default (dict) .root.Values.template) -}}
{{- $spec := default (dict) $template.spec -}}
{{- $containers := list -}}
{{- range $spec.containers -}}
{{- if eq .name "control-plane" -}}
{{- $containers = append $containers (merge (dict "name" $.container) (pick . "env" "envFrom" "volumeMounts" "securityContext")) -}}
{{- end -}}
{{- end -}}
{{- $spec = merge (dict "containers" $containers) (pick $spec "nodeSelector" "tolerations" "affinity" "securityContext" "imagePullSecrets" "volumes" "initContainers" "runtimeClassName" "hostAliases") -}}
{{- pick (set $template "spec" $spec) "spec" | toJson -}}
{{- end -}}
