{{- define "mig-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "mig-agent.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "mig-agent.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "mig-agent.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Names of objects outside of namespaces: two releases in two namespaces do not meet. */ -}}
{{- define "mig-agent.clusterName" -}}
{{- printf "%s-%s" (include "mig-agent.fullname" .) .Release.Namespace | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "mig-agent.namespace" -}}
{{- .Release.Namespace }}
{{- end }}

{{- define "mig-agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "mig-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mig-agent.labels" -}}
{{ include "mig-agent.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "mig-agent.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "mig-agent.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "cannot install: name the service account with serviceAccount.name, or let the chart create one" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "mig-agent.image" -}}
{{- $repository := required "cannot install: say where the image is, with --set image.repository=REGISTRY/mig-agent (it is built from Dockerfile.agent)" .Values.image.repository }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" $repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* How the node shows what it can give. */ -}}
{{- define "mig-agent.advertise" -}}
{{- default .Values.advertise .Values.settings.advertise }}
{{- end }}

{{- define "mig-agent.tlsSecret" -}}
{{- default (printf "%s-tls" (include "mig-agent.fullname" .)) .Values.scheduler.tlsSecret }}
{{- end }}

{{- define "mig-agent.tlsFolder" -}}
/etc/mig-agent-tls
{{- end }}

{{- /* The configuration file. What `settings` says wins. */ -}}
{{- define "mig-agent.settings" -}}
{{- if eq .Values.resources.profilePrefix .Values.resources.memoryPrefix }}
{{- fail "cannot install: nobody could tell profiles from amounts of memory; give resources.profilePrefix and resources.memoryPrefix different values" }}
{{- end }}
{{- if .Values.scheduler.enabled }}
{{- if not .Values.scheduler.names }}
{{- fail "cannot install: nobody could use the schedulers' port; give scheduler.names the names in their certificates" }}
{{- end }}
{{- if hasKey .Values.settings "listen" }}
{{- fail "cannot install: scheduler.enabled says where the agents listen, and so does settings.listen; leave out one of them" }}
{{- end }}
{{- if and .Values.metrics.enabled (eq (int .Values.scheduler.port) (int .Values.metrics.port)) }}
{{- fail (printf "cannot install: schedulers and metrics cannot share the port %d; give scheduler.port or metrics.port another" (int .Values.metrics.port)) }}
{{- end }}
{{- end }}
{{- $metrics := ternary (printf "0.0.0.0:%d" (int .Values.metrics.port)) "off" .Values.metrics.enabled }}
{{- $chart := dict
      "kubernetes" true
      "kubelet_dir" .Values.paths.kubelet
      "cdi_dir" .Values.paths.cdi
      "state_dir" .Values.paths.state
      "listen" (printf "unix://%s/mig-agent.sock" .Values.paths.run)
      "lock_dir" (printf "%s/locks" .Values.paths.run)
      "resource_prefix" .Values.resources.profilePrefix
      "memory_resource_prefix" .Values.resources.memoryPrefix
      "memory_resources" .Values.resources.memory
      "feature_labels" .Values.featureLabels
      "metrics" $metrics }}
{{- with .Values.nodeLabel }}{{ $_ := set $chart "node_label" . }}{{ end }}
{{- with .Values.advertise }}{{ $_ := set $chart "advertise" . }}{{ end }}
{{- if .Values.scheduler.enabled }}
{{- /* The address on which it listens for them is the pod's own: see the DaemonSet. */}}
{{- $folder := include "mig-agent.tlsFolder" . }}
{{- $_ := set $chart "tls_cert" (printf "%s/tls.crt" $folder) }}
{{- $_ := set $chart "tls_key" (printf "%s/tls.key" $folder) }}
{{- $_ := set $chart "tls_client_ca" (printf "%s/ca.crt" $folder) }}
{{- $_ := set $chart "tls_schedulers" .Values.scheduler.names }}
{{- /* An authority signs for many: its word alone is not enough. */}}
{{- $_ := set $chart "tls_users" list }}
{{- end }}
{{- with .Values.resources.wholeGpu }}{{ $_ := set $chart "whole_gpu_resource" . }}{{ end }}
{{- with .Values.simulate }}{{ $_ := set $chart "simulate" . }}{{ end }}
{{- range $name, $value := merge (deepCopy .Values.settings) $chart }}
{{- if kindIs "bool" $value }}
{{- /* YAML takes `off` for false, and it may be what was meant. */}}
{{ $name }}: {{ ternary "on" "off" $value }}
{{- else if kindIs "float64" $value }}
{{ $name }}: {{ $value | toString }}
{{- else }}
{{ $name }}: {{ $value | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Nodes with an NVIDIA GPU, and those that somebody labelled by hand. */ -}}
{{- define "mig-agent.affinity" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range list "nvidia.com/gpu.present" "feature.node.kubernetes.io/pci-10de.present" "feature.node.kubernetes.io/pci-0302_10de.present" "feature.node.kubernetes.io/pci-0300_10de.present" }}
      - matchExpressions:
          - {key: {{ . }}, operator: In, values: ["true"]}
      {{- end }}
      {{- with .Values.nodeLabel }}
      - matchExpressions:
          - {key: {{ regexReplaceAll "=.*$" . "" }}, operator: Exists}
      {{- end }}
{{- end }}
